"""Flags of Miles that have another name here, or no effect: one row each. `compat` refuses the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from furlong.config.named_parts import FULLY_ASYNC


@dataclass(frozen=True)
class MilesFlag:
    """What a flag of Miles is here: `words`, in which `{}` is its value, or nothing, with the reason in `instead`.

    values: the value here by the value there; others are not accepted. Without it every value is.
    same_as: the field that must have the value, too.
    """

    words: str = ""
    instead: str = ""
    values: tuple[tuple[str, str], ...] = ()
    same_as: str = ""

    def translated(self, name: str, given: Sequence[str]) -> tuple[list[str], str]:
        """Return the words to read in place of `name` and its values, and a line for the log.

        Raises ValueError for a value that furlong does not have.
        """
        value = " ".join(given)
        if self.values and value not in dict(self.values):
            raise ValueError(f"{name} {value} is not supported; use {' or '.join(dict(self.values))}, or remove it")
        if self.instead:
            return [], f"{name} has no effect: {self.instead}"
        here = dict(self.values).get(value, value)
        words = [word.replace("{}", here) for word in self.words.split() if word != "{}" or here]
        return words, f"{name} of Miles is {' '.join(words)}"


_SESSIONS = MilesFlag(instead="every agent has a session, in which the ids of its turns are kept")
_VIEW = MilesFlag(instead="`furlong view` shows the run, and trackers export its metrics")
MILES_FLAGS = {
    "--custom-agent-function-path": MilesFlag("--agent-function-path {}"),
    "--fully-async": MilesFlag(f"--rollout-function-path {FULLY_ASYNC}"),
    "--max-weight-staleness": MilesFlag("--max-token-staleness {}"),
    "--pause-generation-mode": MilesFlag(
        "--pause-mode {}", values=(("in_place", "hold"), ("retract", "hold"), ("abort", "abort"))
    ),
    "--gradient-checkpointing": MilesFlag("--recompute-activations"),
    "--max-seq-len": MilesFlag("--rollout-max-context-len {}"),
    "--use-flash-attn": MilesFlag("--attention-backend flash"),
    "--warmup-ratio": MilesFlag("--lr-warmup-fraction {}"),
    "--use-session-server": _SESSIONS,
    "--session-server-ip": _SESSIONS,
    "--session-server-instances": _SESSIONS,
    "--session-message-matcher": _SESSIONS,
    "--tito-model": _SESSIONS,
    "--use-miles-dashboard": _VIEW,
    "--dashboard-host": _VIEW,
    "--dashboard-port": _VIEW,
    "--dashboard-gpu-sample-interval": _VIEW,
    "--dashboard-sglang-scrape-mode": _VIEW,
    "--use-prometheus": _VIEW,
    "--prometheus-port": _VIEW,
    "--prometheus-run-name": _VIEW,
    "--megatron-to-hf-mode": MilesFlag(instead="weights are always converted by furlong's own rules"),
    "--update-weight-transfer-mode": MilesFlag(
        instead="weights are sent by --update-weight-transport", values=(("broadcast", ""),)
    ),
    "--train-memory-margin-bytes": MilesFlag(instead="no memory is kept free for training"),
    "--attn-implementation": MilesFlag(instead="the attention kernel follows from device and dtype"),
    "--cp-comm-type": MilesFlag(instead="context parallelism always gathers keys and values"),
    "--qkv-format": MilesFlag(instead="micro-batches are always packed"),
    "--use-dynamic-global-batch-size": MilesFlag(
        instead="a step has --global-batch-size completions, however many samples they become"
    ),
    "--moe-flex-dispatcher-backend": MilesFlag(instead="tokens are sent with NCCL's all-to-all"),
    "--sglang-router-policy": MilesFlag(
        "--sglang-router-strategy {}",
        values=(
            ("consistent_hashing", "manual"),
            *((name, name) for name in ("cache_aware", "round_robin", "random", "power_of_two", "manual")),
        ),
    ),
    "--sglang-tp-size": MilesFlag(
        instead="--rollout-num-gpus-per-engine sets it", same_as="rollout_num_gpus_per_engine"
    ),
    "--fsdp-cpu-offload": MilesFlag("--optimizer-cpu-offload"),
    "--fsdp-cpu-backend": MilesFlag(instead="what is in host memory is not sent between ranks"),
    "--fsdp-state-dict-cpu-offload": MilesFlag(instead="checkpoints are always written from host memory"),
    "--keep-fp32-master": MilesFlag(instead="master weights are always float32 with --bf16"),
    "--rollout-submission-granularity": MilesFlag(instead="the samples of a group are submitted one by one"),
}
