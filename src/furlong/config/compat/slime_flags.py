"""slime's flags that furlong does not take, each with the reason and what to use.

`not-yet` is for a part that this version does not have; `refused` for something that furlong does another way.
Nothing here is ignored: using one is an error that says this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["refused", "not-yet"]


@dataclass(frozen=True)
class Refusal:
    """Why a flag, or one of its values, is not taken. `instead` is the way out."""

    verdict: Verdict
    reason: str
    instead: str

    def message(self, flag: str) -> str:
        """The problem to show for `flag`, spelled as it was given."""
        what = "is not taken" if self.verdict == "refused" else "is not in this version"
        return f"{flag} {what}: {self.reason}; {self.instead}"


def _refused(reason: str, instead: str) -> Refusal:
    return Refusal("refused", reason, instead)


def _not_yet(reason: str, instead: str = "leave it out") -> Refusal:
    return Refusal("not-yet", reason, instead)


_PLACEMENT = _not_yet("trainer processes live as long as the run, and batches go through the object store")
_MEGATRON = _not_yet("--train-backend megatron has no such setting")
_CRITIC = _not_yet("there is no critic", "use an estimator without one, such as --advantage-estimator grpo")
_DISTILLATION = _not_yet("on-policy distillation is not built")
_MTP = _not_yet("multi-token prediction heads are not trained")
_BUFFER_SERVER = _refused(
    "a rollout buffer is no flag but a function", "read your server in a function given to --rollout-function-path"
)
_CI = _refused("checks of the program are its tests, not flags of a run", "read metrics.jsonl of the run")
_GRAD_FILES = _refused("gradient norms are in metrics.jsonl", "compare two runs' `train/grad_norm` there")
_OWN_CHECKPOINTS = _refused(
    "checkpoints are whole tensors in safetensors, which any layout and both trainers read",
    "leave it out; `furlong convert` reads and writes Megatron-LM's",
)
_FLOAT32_STATES = _not_yet("masters and moments of the optimizer are float32")
_SCHEDULE = _refused(
    "the learning rate follows the flags of this start and the steps of the checkpoint", "leave it out"
)
_FP8 = _not_yet("training in FP8 is not built", "use --bf16")
_NEVER_PADDED = _refused("sequences are concatenated and never padded", "leave it out")

REFUSED: dict[str, Refusal] = {
    # processes and placement
    "--release-train": _PLACEMENT,
    "--rollout-data-transport": _PLACEMENT,
    "--use-distributed-post": _PLACEMENT,
    "--http-proxy": _refused("requests go to engines directly", "leave it out"),
    # trainer
    "--fp16": _not_yet("float16 needs losses that are scaled", "use --bf16 or --fp32"),
    "--overlap-param-gather": _not_yet(
        "layers read weights without calling the modules that would wait for them", "use --overlap-grad-reduce"
    ),
    "--model-name": _refused("each file of a model is read once, its class from config.json", "remove it"),
    "--hf": _refused("there is no such flag for a run", "give the model with --hf-checkpoint"),
    "--logdir": _refused(
        "it is a flag of TensorBoard", "run `tensorboard --logdir outputs/`; furlong's is --output-dir"
    ),
    "--data-pad-size-multiplier": _NEVER_PADDED,
    "--recompute-loss-function": _refused(
        "the loss never holds logits of the whole batch", "set --log-probs-chunk-size for less memory"
    ),
    "--log-probs-max-tokens-per-gpu": _refused(
        "log-prob passes use the micro-batches of training", "set --max-tokens-per-gpu"
    ),
    "--qwen-gdn-backend": _not_yet("linear attention runs on transformers' own kernels"),
    "--freeze-indexer": _not_yet("sparse-attention indexers are not built", "use --freeze-params-name-list"),
    "--loss-mask-type": _refused(
        "the mask of demonstrations follows from the tokenizer's chat template", "leave it out"
    ),
    "--allgather-cp": _MEGATRON,
    "--custom-model-provider-path": _MEGATRON,
    "--custom-megatron-init-path": _MEGATRON,
    "--custom-megatron-before-log-prob-hook-path": _MEGATRON,
    "--custom-megatron-before-train-step-hook-path": _MEGATRON,
    "--megatron-config-path": _MEGATRON,
    "--mtp-num-layers": _MTP,
    "--mtp-loss-scaling-factor": _MTP,
    "--enable-mtp-training": _MTP,
    # Megatron-LM's
    "--ckpt-format": _OWN_CHECKPOINTS,
    "--ckpt-fully-parallel-save": _OWN_CHECKPOINTS,
    "--ckpt-fully-parallel-load": _OWN_CHECKPOINTS,
    "--ckpt-assume-constant-structure": _OWN_CHECKPOINTS,
    "--dist-ckpt-optim-fully-reshardable": _OWN_CHECKPOINTS,
    "--main-params-dtype": _FLOAT32_STATES,
    "--exp-avg-dtype": _FLOAT32_STATES,
    "--exp-avg-sq-dtype": _FLOAT32_STATES,
    "--main-grads-dtype": _refused("gradients are float32", "use --grad-reduce-in-bf16 for those of bfloat16 models"),
    "--override-opt-param-scheduler": _SCHEDULE,
    "--use-checkpoint-opt-param-scheduler": _SCHEDULE,
    "--fp8-format": _FP8,
    "--fp8-recipe": _FP8,
    "--transformer-impl": _refused("layers are furlong's own, on PyTorch", "leave it out"),
    "--use-mcore-models": _refused("there are no others", "leave it out"),
    "--use-flash-attn": _refused("Megatron-LM calls it otherwise", "use --attention-backend flash"),
    "--qkv-format": _refused("micro-batches are packed (thd)", "leave it out"),
    "--cross-entropy-loss-fusion": _refused("the loss never holds logits of the whole batch", "leave it out"),
    "--use-cpu-initialization": _refused("weights are read and not drawn", "leave it out"),
    "--tp-comm-overlap": _not_yet("products do not overlap with what ranks send each other"),
    "--moe-enable-deepep": _not_yet("DeepEP is not used", "leave it out, with --moe-token-dispatcher-type alltoall"),
    "--moe-shared-expert-overlap": _not_yet("shared experts run after the others' tokens are sent"),
    "--moe-router-force-load-balancing": _refused("it would train another model than generates", "leave it out"),
    # weights
    "--custom-update-weight-post-write-path": _not_yet("no function is called between writing and loading"),
    # algorithm
    "--num-critic-only-steps": _CRITIC,
    "--value-clip": _CRITIC,
    "--lambd": _CRITIC,
    "--use-opd": _DISTILLATION,
    "--opd-type": _DISTILLATION,
    "--opd-kl-coef": _DISTILLATION,
    "--opd-teacher-load": _DISTILLATION,
    "--opd-teacher-ckpt-step": _DISTILLATION,
    "--teacher-port": _DISTILLATION,
    "--teacher-warmup-port": _DISTILLATION,
    "--teacher-warmup-timeout-s": _DISTILLATION,
    "--teacher-sample-reduction-chunk-size": _DISTILLATION,
    "--teacher-label-reduction-chunk-size": _DISTILLATION,
    # data
    "--multimodal-keys": _not_yet("models read text only"),
    "--rollout-buffer-url": _BUFFER_SERVER,
    "--fetch-trajectory-retry-times": _BUFFER_SERVER,
    "--min-batch-collection-ratio": _BUFFER_SERVER,
    "--rollout-task-type": _BUFFER_SERVER,
    # debug
    "--load-forge-rollout-data": _not_yet(
        "a dump cannot be replayed through generation", "train on it with --load-debug-rollout-data"
    ),
    "--memory-recorder": _refused(
        "memory is recorded by PyTorch", "use --record-memory-history, and memray's own command for the host's memory"
    ),
    "--memory-snapshot-dir": _refused("snapshots are in profile/ of the run's folder", "name that by --output-dir"),
    "--ci-test": _CI,
    "--ci-disable-kl-checker": _CI,
    "--ci-train-rollout-logprob-abs-diff-threshold": _CI,
    "--ci-save-grad-norm": _GRAD_FILES,
    "--ci-load-grad-norm": _GRAD_FILES,
}

PREFIXES: dict[str, Refusal] = {
    "--megatron-": _MEGATRON,
    "--no-megatron-": _MEGATRON,
    "--critic-": _CRITIC,
}

VALUES: dict[tuple[str, str], Refusal] = {
    ("--attention-backend", "fused"): _not_yet("it is TransformerEngine's", "use flash"),
    ("--attention-backend", "local"): _refused("it cannot pack sequences", "use unfused"),
    ("--recompute-modules", "core_attn"): _refused(
        "the kernels keep no scores: attention is computed again in the backward pass as it is", "leave it out"
    ),
    ("--advantage-estimator", "ppo"): _CRITIC,
    ("--moe-router-load-balancing-type", "sinkhorn"): _refused(
        "no engine chooses experts that way, so another model would be trained than generates", "use aux_loss"
    ),
    ("--moe-router-load-balancing-type", "global_aux_loss"): _not_yet(
        "tokens are counted by micro-batch or by sample", "use seq_aux_loss, which does not depend on packing"
    ),
    ("--moe-token-dispatcher-type", "allgather"): _refused(
        "it wants as many tokens on every rank, and packed micro-batches differ", "use alltoall"
    ),
    ("--moe-token-dispatcher-type", "flex"): _not_yet("DeepEP is not used", "use alltoall"),
    ("--moe-router-dtype", "fp64"): _not_yet("routers compute in float32, as engines do", "use fp32"),
    ("--update-weight-delta-checksum", "blake3"): _refused(
        "its library is not among furlong's", "use xxh3-128, which is as long"
    ),
    ("--rm-type", "ifbench"): _refused(
        "its checks are a repository of their own", "install it and call it from a function given to --custom-rm-path"
    ),
    ("--rm-type", "boxed_dapo"): _refused(
        "dapo reads the line after 'Answer:', which is not inside a box", "use boxed_math or dapo"
    ),
    ("--rm-type", "boxed_deepscaler"): _refused(
        "deepscaler itself reads the box, after the end of the thinking", "use deepscaler"
    ),
}


def refusal(flag: str) -> Refusal | None:
    """Why `flag` is not taken; None for a flag that furlong has or that nobody knows."""
    if flag in REFUSED:
        return REFUSED[flag]
    return next((why for prefix, why in PREFIXES.items() if flag.startswith(prefix)), None)
