"""Metrics and events of runs: each faulty story gets its diagnosis and remedy, each healthy one none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from faults_marker import fault
from furlong.catalogue import Diagnosis
from furlong.config.command_line import config_from_values
from furlong.core.sample import Group, Sample
from furlong.diagnosis.monitors import MONITORS
from furlong.diagnosis.monitors.monitor import MonitorSuite, RunFacts
from furlong.rollout.metrics import rollout_metrics

Flags = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A story, the row that it gets ("" for a healthy one), and words of the remedy, separated by `|`."""

    name: str
    row: str
    diagnose: Callable[[], Sequence[Diagnosis]]
    remedy: str = ""
    without: str = ""


def steps(
    name: str,
    row: str,
    metrics: Sequence[Mapping[str, float]],
    flags: Flags | None = None,
    *,
    has_template: bool = True,
    sizes: tuple[int, int] = (151_936, 1_500_000_000),
    remedy: str = "",
    without: str = "",
) -> Case:
    """The metrics of a run's first steps. sizes: vocabulary and parameters of the model."""

    def diagnose() -> list[Diagnosis]:
        suite = MonitorSuite(MONITORS, RunFacts(config_from_values(dict(flags or {})), has_template, *sizes))
        return [each for number, values in enumerate(metrics, 1) for each in suite.step(number, values)]

    return Case(name, row, diagnose, remedy, without)


def happened(
    name: str, row: str, events: Sequence[Flags], flags: Flags | None = None, *, remedy: str = "", without: str = ""
) -> Case:
    """The events of a run."""

    def diagnose() -> list[Diagnosis]:
        suite = MonitorSuite(MONITORS, RunFacts(config_from_values(dict(flags or {}))))
        return [each for event in events for each in suite.event(event)]

    return Case(name, row, diagnose, remedy, without)


GAP = "train/train_rollout_logprob_abs_diff"
CUSTOM = {"custom_generate_function_path": "own.py:generate"}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3"}
FLAT_ROW = {"rollout/zero_std_frac": 1.0, "rollout/reward_range": 0.0}
WAITS = {"perf/wait_time_ratio": 0.9, "perf/rollout_time": 10.0, "perf/step_time": 10.0}


def _gap(size: float, **shares: float) -> dict[str, float]:
    return {GAP: size} | {f"selftest/share/{name}": share for name, share in shares.items()}


def _rewards(*means: float, flat: bool = True, **more: float) -> list[dict[str, float]]:
    row = FLAT_ROW if flat else {"rollout/zero_std_frac": 0.2, "rollout/reward_range": 1.0}
    return [row | {"rollout/raw_reward": mean} | more for mean in means]


GOOD = _rewards(*[0.6] * 10, flat=False)


# The metrics that runs on one H100 recorded, by learning rate: Qwen2.5-Coder-0.5B on word problems, 80 healthy steps,
# and 60 of a run in which responses run to their limit from step 57 on. One number is that of all steps.
RECORDED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "word_problems.json").read_text())
WORD_PROBLEMS = {"rollout_batch_size": 64, "n_samples_per_prompt": 8, "rollout_max_response_len": 400}
BUSY = {"rollout/zero_std_frac": 0.3, "rollout/reward_range": 1.0, "train/grad_norm": 0.5}


def _recorded(name: str) -> list[dict[str, float]]:
    columns = RECORDED[name]
    count = max(len(values) for values in columns.values() if isinstance(values, list))
    rows = [
        {metric: values[i] if isinstance(values, list) else values for metric, values in columns.items()}
        for i in range(count)
    ]
    return [{metric: value for metric, value in row.items() if value is not None} for row in rows]


SPEED = {
    "perf/rollout_time": 0.3, "perf/tokens_per_gpu_per_sec": 1000.0, "perf/longest_sample_tokens_per_sec": 40.0
}  # fmt: skip


def _norms(*norms: float, **more: float) -> list[dict[str, float]]:
    return [{"train/grad_norm": norm} | more for norm in norms]


PPO = {"advantage_estimator": "ppo"}


OPD = {"use_opd": True, "opd_type": "trainer"}


def _kl(*values: float) -> list[dict[str, float]]:
    return [{"train/opd_reverse_kl": each} for each in values]


def _critic(*explained: float, loss: float = 0.2) -> list[dict[str, float]]:
    return [{"train/critic-explained_variance": each, "train/critic-value_loss": loss} for each in explained]


ROLLOUTS = (
    steps("no response ends", "STOP02", [{"rollout/truncated_ratio": 1.0}], {"rollout_max_response_len": 8},
          remedy="--rollout-stop-token-ids|--rollout-max-response-len"),
    steps("no response ends before the context", "STOP02", [{"rollout/truncated_ratio": 0.97}],
          remedy="--rollout-max-context-len"),
    steps("responses do not end after an update", "STOP02",
          [{"rollout/truncated_ratio": 0.0}, *[{"rollout/truncated_ratio": 1.0}] * 8], remedy="--lr",
          without="--rollout-stop"),
    steps("a learning rate that lets every response run to its limit", "STOP02", _recorded("lr 1e-5"),
          WORD_PROBLEMS | {"lr": 1e-5}, remedy="--lr", without="--label-key"),
    steps("masks that leave nothing", "NUM06", [BUSY | {"train/grad_norm": 0.0, "rollout/response_len/mean": 0.0}] * 8,
          remedy="loss masks"),
    steps("a slow tool", "SLOW01", [SPEED] * 5 + [{n: v * 10 if n == "perf/rollout_time" else v / 10 for n, v in
                                                   SPEED.items()}] * 3, CUSTOM, remedy="nvidia-smi"),
    steps("responses at temperature 3", "STOP02", [{"rollout/truncated_ratio": 1.0}],
          {"rollout_temperature": 3.0, "rollout_max_response_len": 8}, remedy="--rollout-temperature"),
    steps("a minimum as long as the maximum", "STOP02", [{"rollout/truncated_ratio": 1.0}],
          {"rollout_min_new_tokens": 8, "rollout_max_response_len": 8}, remedy="--rollout-min-new-tokens"),
    steps("no right answer", "REW02", _rewards(0.0, 0.0, 0.0), {"label_key": "answer"}, remedy="--label-key"),
    steps("every answer right", "REW02", _rewards(1.0, 1.0, 1.0), remedy="harder"),
    steps("every reward 0.5", "REW02", _rewards(0.5, 0.5, 0.5), remedy="reward function", without="too hard|too easy"),
    steps("groups right or wrong as a whole", "REW02",
          _rewards(0.25, 0.25, 0.25, flat=True, **{"rollout/reward_range": 1.0}), 
          remedy="--n-samples-per-prompt|correct the reward", without="--label-key"),
    steps("an agent that gives itself the same reward", "REW02", _rewards(1.0, 1.0, 1.0), {"agent_command": "agent"},
          remedy="check --agent-command", without="label"),
    steps("a temperature at which answers are noise", "REW02", _rewards(0.0, 0.0, 0.0), {"rollout_temperature": 3.0},
          remedy="--rollout-temperature"),
    steps("a filter that removes the right answers", "REW02", [*GOOD, *_rewards(0.0, 0.0, 0.0)],
          {"rollout_sample_filter_path": "own.py:remove"}, remedy="--rollout-sample-filter-path"),
    steps("a policy without choice", "REW02",
          _rewards(0.25, 0.25, 0.25, flat=True, **{"rollout/reward_range": 1.0, "rollout/same_response_frac": 1.0}),
          {"rollout_temperature": 0.02}, remedy="--rollout-temperature", without="prompts"),
    steps("samples of a group that have one seed", "REW02",
          _rewards(0.25, 0.25, 0.25, flat=True, **{"rollout/reward_range": 1.0, "rollout/same_response_frac": 1.0}),
          {"data_source_path": "own.py:Source"}, remedy="Sample.seed",
          without="--rollout-temperature"),
    steps("weights that decay", "REW02", [*GOOD, *_rewards(0.0, 0.0, 0.0)], {"weight_decay": 5000.0, "lr": 1e-5},
          remedy="--weight-decay 5000", without="--entropy-coef"),
    steps("a custom loss with the wrong sign", "REW02", [*GOOD, *_rewards(0.0, 0.0, 0.0)],
          {"loss_type": "custom_loss", "custom_loss_function_path": "own.py:loss"},
          remedy="--custom-loss-function-path", without="--entropy-coef"),
    steps("a reward that does not ask for an end", "STOP02",
          [BUSY | {"rollout/raw_reward": 0.7, "rollout/truncated_ratio": float(i > 4)} for i in range(9)],
          WORD_PROBLEMS, remedy="responses without an end|--rollout-max-response-len|--lr"),
    steps("a policy that collapsed", "REW02", [*GOOD, *_rewards(0.0, 0.0, 0.0)], remedy="--lr",
          without="--label-key"),
    steps("a policy that fades", "REW02", [*GOOD, *_rewards(*[0.02] * 9, flat=False)], remedy="--lr"),
    steps("an entropy bonus that wins", "REW02", [*GOOD, *_rewards(0.0, 0.0, 0.0)], {"entropy_coef": 1.0},
          remedy="--entropy-coef"),
    steps("a KL loss that wins", "REW02", [*GOOD, *_rewards(0.0, 0.0, 0.0)], KL | {"kl_loss_coef": 1000.0},
          without="a larger --kl-loss-coef"),
    steps("one sample per prompt, all 0", "REW02", _rewards(0.0, 0.0, 0.0),
          {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "n_samples_per_prompt": 1,
           "rollout_batch_size": 32}, without="--n-samples-per-prompt"),
    steps("rewards that raise", "REW03", [{"rollout/reward_failed": 8.0}], {"rollout_batch_size": 8},
          remedy="furlong reward test"),
    steps("rewards that time out", "REW03", [{"rollout/reward_timed_out": 8.0}], {"rollout_batch_size": 8},
          remedy="--reward-timeout"),
    steps("empty answers that get the best reward", "REW05",
          [{"rollout/suspicious/empty": 9.0, "rollout/suspicious/empty_best": 9.0}], remedy="reward test"),
    steps("code that ends its tests", "REW05",
          [{"rollout/suspicious/exit": 10.0, "rollout/suspicious/exit_best": 9.0}], remedy="outside of the sandbox"),
    steps("a generate function that raises", "HOOK01", [{"rollout/generate_failed": 8.0}],
          CUSTOM | {"rollout_batch_size": 8}, remedy="run.log"),
    steps("a generate function that times out", "HOOK01", [{"rollout/generate_timed_out": 8.0}],
          CUSTOM | {"rollout_batch_size": 8}, remedy="--generate-timeout"),
    steps("agents that fail", "HOOK01", [{"rollout/episodes/agent_error": 8.0}],
          {"agent_command": "agent", "rollout_batch_size": 8, "n_samples_per_prompt": 1}, remedy="fix these"),
    steps("a generate function that blocks", "HOOK02",
          [{"perf/generate_held_time": 6.0, "perf/rollout_time": 8.0}], CUSTOM, remedy="httpx.AsyncClient"),
    steps("prompts that are slow to read", "DATA03", [WAITS | {"perf/data_time": 4.0}] * 3,
          remedy="--num-data-workers"),
    steps("samples above the bound", "ASYNC01", [{"rollout/staleness/max": 3.0, "rollout/staleness/mean": 2.0}],
          {"async_buffer_size": 1}, remedy="--async-buffer-size"),
    steps("old samples of partial rollouts", "ASYNC01",
          [{"rollout/staleness/max": 6.0, "rollout/staleness/mean": 4.0}],
          {"partial_rollout": True, "over_sampling_batch_size": 64}, remedy="--over-sampling-batch-size"),
    steps("a policy that moved on", "ASYNC01",
          [{GAP: 0.6, "rollout/staleness/max": 2.0, "rollout/staleness/mean": 1.5}] * 8, {"async_buffer_size": 2},
          remedy="--async-buffer-size|--lr"),
    steps("tool output in the loss", "TOOL01", [{"rollout/env_tokens_in_loss": 32.0}], CUSTOM,
          remedy="trainable=False"),
    steps("ids of decoded text", "AGT01",
          [{"session/retokenised": 12.0, "session/forked_frac": 1.0, "session/leaves": 3.0}], CUSTOM,
          remedy="token_ids", without="--session-leaves"),
    steps("eight samples of each episode", "AGT02", [{"session/forked_frac": 0.9, "session/leaves": 8.0}], CUSTOM,
          remedy="--session-leaves last"),
    steps("thinking that the template drops", "AGT03", [{"session/branch_reason/stripped": 40.0}], CUSTOM,
          remedy="--chat-template-path"),
    steps("an environment that blocks", "AGT05", [{"perf/generate_held_time": 6.0, "perf/rollout_time": 8.0}],
          {"environment": ["own.py:Env"]}, remedy="--env-workers", without="httpx"),
    steps("sandboxes that are evicted", "AGT06", [{"rollout/episodes/reissued": 8.0, "rollout/episodes/infra": 2.0}],
          CUSTOM | {"rollout_batch_size": 8}, remedy="run.log"),
    steps("agents of another endpoint", "AGT07",
          [{"rollout/episodes/silent": 8.0, "rollout/generate_failed": 8.0}],
          {"agent_command": "python agent.py", "rollout_batch_size": 8}, remedy="OPENAI_BASE_URL"),
    steps("environments that crash", "AGT06",
          [{"rollout/episodes/reissued": 8.0, "rollout/episodes/process_ended": 8.0}],
          {"environment": ["own.py:Env"], "env_workers": ["process", "2"], "rollout_batch_size": 8},
          remedy="run.log"),
    steps("a context that fills up", "TOOL02", [{"rollout/context_full_frac": 0.5}],
          CUSTOM | {"rollout_max_context_len": 64}, remedy="--rollout-max-context-len"),
)  # fmt: skip

NUMBERS = (
    steps("a small KL to the same weights", "NUM01", [{"train/kl_loss": 2e-3}], KL, remedy="--fp32"),
    steps("a large KL to the same weights", "NUM01", [{"rollout/kl": 2.0}], KL),
    steps("another model as the reference", "NUM01", [{"selftest/ref_kl": 0.8}],
          KL | {"hf_checkpoint": "policy", "ref_load": "other"}, remedy="--ref-load"),
    steps("log-probs of another temperature", "NUM02", [_gap(0.3, sampling_transform=0.9, numerics=0.1)],
          remedy="--rollout-temperature"),
    steps("log-probs of another temperature from a function", "NUM02", [_gap(0.3, sampling_transform=1.0)], CUSTOM,
          remedy="sampling_params|--custom-generate-function-path"),
    steps("log-probs that are shifted", "NUM02", [_gap(0.3, shifted=1.0)], CUSTOM, remedy="same position"),
    steps("log-probs that a function changes", "NUM02", [_gap(0.3, unexplained=1.0)], CUSTOM,
          remedy="--custom-generate-function-path", without="--embedded-dtype"),
    steps("weights of an older version", "NUM02", [_gap(0.3, stale_version=1.0)],
          remedy="--update-weights-interval 1"),
    steps("log-probs that are all the same", "NUM02", [_gap(2.0, flat=1.0)], remedy="--check-weight-update-equal"),
    steps("other experts", "NUM02", [_gap(0.2, routing=0.7, numerics=0.3)], remedy="--use-rollout-routing-replay"),
    steps("another precision", "NUM02", [_gap(0.05, unexplained=1.0)], remedy="--embedded-dtype|--use-tis"),
    steps("a gap of unknown origin", "NUM02", [{GAP: 0.2}], remedy="--check-weight-update-equal"),
    steps("a first gradient of 2,000", "NUM03", _norms(2000.0), remedy="furlong template check"),
    steps("a KL loss with a huge weight", "NUM03", _norms(7000.0), KL | {"kl_loss_coef": 1e4}, remedy="0.001 to 0.1",
          without="template"),
    steps("a gradient that jumps", "NUM03", _norms(*[1.0] * 12, 60.0, 1.0, 900.0), remedy="--lr|--clip-grad"),
    steps("a gradient that jumps without a limit", "NUM03", _norms(*[1.0] * 12, 60.0), {"clip_grad": 0.0},
          remedy="--lr|--clip-grad"),
    steps("rewards in thousands", "NUM03", _norms(5000.0, **{"rollout/reward_range": 10_000.0}),
          {"grpo_std_normalization": False}, remedy="scale rewards"),
    steps("rewards in thousands with a critic", "NUM03", _norms(500.0, **{"rollout/reward_range": 1000.0}), PPO,
          remedy="scale rewards", without="template|--disable-grpo"),
    steps("two passes that differ", "NUM03", [{"train/ppo_kl": 0.05}], remedy="--fp32"),
    steps("a critic that never learns", "NUM07", _critic(*[-0.02] * 32), PPO, remedy="--critic-lr|--critic-load"),
    steps("values that diverge", "NUM07", [*_critic(*[0.2] * 12), *_critic(-7.0, loss=40.0)], PPO,
          remedy="lower --critic-lr"),
    steps("a policy that starts with a new critic", "NUM08", _critic(-0.45), PPO, remedy="--num-critic-only-steps"),
    steps("a warm-up of one rollout", "NUM08", _critic(-0.5, -0.3), PPO | {"num_critic_only_steps": 1},
          remedy="--num-critic-only-steps"),
    steps("a teacher of another template", "OPD01", [{"rollout/teacher_log_probs": -11.0, "rollout/log_probs": -0.9}],
          OPD, sizes=(49_152, 10**6), remedy="tokenizer of --hf-checkpoint"),
    steps("a teacher that is the policy", "OPD02", [{"train/opd_reverse_kl": 0.0}], OPD, remedy="--load"),
    steps("a teacher that the policy does not follow", "OPD03", _kl(*[0.4] * 32, *[0.41] * 32), OPD,
          remedy="--opd-kl-coef"),
    steps("experts that disagree", "NUM05", [{"train/routing_agreement": 0.6}],
          remedy="--use-rollout-routing-replay"),
    steps("plain questions to an instruct model", "TPL03", [{"rollout/log_probs": -1.2}],
          remedy="furlong doctor"),
    steps("a model without its weights", "TPL03", [{"rollout/log_probs": -9.0}], remedy="furlong check"),
)  # fmt: skip

LOST: dict[str, Any] = {"event": "engine_lost", "engine": 0, "url": "http://127.0.0.1:1"}

MACHINES = (
    steps("one busy engine", "ENG04", [{"engine/requests/max": 30.0, "engine/requests/mean": 8.0}] * 5,
          remedy="--sglang-router-strategy round_robin"),
    steps("weight updates of a minute", "SYNC01", [{"perf/update_weights_time": 60.0, "perf/step_time": 80.0}] * 3,
          remedy="--update-weights-interval"),
    happened("an engine that died", "ENG03", [LOST | {"reason": "was ended by signal 9"}],
             remedy="--use-fault-tolerance"),
    happened("an engine of SGLang that died", "ENG03", [LOST | {"reason": "ended with exit code 1"}],
             {"engine": "sglang"}, remedy="--sglang-mem-fraction-static"),
    happened("an engine that is stopped", "ENG06",
             [{"event": "engine_silent", "url": "http://127.0.0.1:1", "running": 4, "asked": "/generate",
               "seconds": 31, "health": "no answer"}], remedy="kill -CONT"),
    happened("a reward that never returns", "HANG01",
             [{"event": "hang", "seconds": 3600, "doing": "functions wait, 0 requests finished: 1 x f (own.py:3)",
               "report": "hang_0.txt", "last": {}}], remedy="--reward-timeout"),
    happened("a time limit below a step's", "HANG01",
             [{"event": "hang", "seconds": 3, "doing": "the thread furlong-trainer is in forward (model.py:3)",
               "report": "hang_0.txt", "last": {}}], {"hang_timeout": 2.0}, remedy="--hang-timeout",
             without="fix the function"),
    happened("weights that hang", "HANG01",
             [{"event": "hang", "seconds": 3600, "doing": "a weight update", "updates_weights": True,
               "report": "hang_0.txt", "last": {}}], remedy="SYNC01"),
    happened("a worker thread that died", "ASYNC02",
             [{"event": "worker_died", "worker": "AsyncRolloutWorker", "error": "KeyError", "message": "'x'"}],
             remedy="run.log"),
)  # fmt: skip

STALE = {"rollout/staleness/max": 1.0, "rollout/staleness/mean": 1.0}
HEALTHY = (
    steps("a critic of a real model that begins far off", "",
          _critic(-21.58, -5.83, -8.32, -15.6, -8.84, -7.11, -2.78, -3.95, -3.39, -2.19, -1.04, -0.43, -1.55, -0.33,
                  -1.02, -1.18, 0.09, -0.01, -0.25, -0.04, -0.18, -0.02, 0.08, 0.07, 0.03, 0.05, 0.13, 0.15, 0.08, 0.09,
                  0.24, 0.31, 0.19, 0.2, 0.31, 0.39), PPO | {"num_critic_only_steps": 40}),
    steps("Qwen2.5-Coder-0.5B that learns word problems", "", _recorded("lr 2e-6"), WORD_PROBLEMS),
    steps("a critic of the quickstart's task", "",  # measured: chance decides most of the outcome
          _critic(-0.446, -0.131, -0.021, 0.083, 0.171, 0.087, 0.07, 0.104, 0.051, 0.026, 0.074, 0.011, 0.062, -0.036,
                  0.041, -0.034, -0.039, 0.03, -0.049, 0.06, 0.059, -0.004, -0.004, 0.04, -0.04, 0.013, 0.017, 0.024,
                  -0.02, 0.026, 0.034, 0.029, 0.082, -0.021, -0.005, 0.025), PPO | {"num_critic_only_steps": 4}),
    steps("a student that learns", "", _kl(*[0.9, 0.7, 0.5, 0.4] * 8, *[0.3] * 64), OPD, sizes=(49_152, 10**6)),
    steps("a student that has learned", "", _kl(*[0.02] * 80), OPD),
    steps("a student that a confident teacher corrects", "",
          [{"rollout/teacher_log_probs": -6.0, "rollout/log_probs": -0.9}], OPD, sizes=(49_152, 10**6)),
    steps("a policy that waits for its critic", "",
          [{"rollout/zero_std_frac": 0.3, "rollout/reward_range": 1.0, "train/grad_norm": 0.0}] * 12,
          PPO | {"num_critic_only_steps": 10}),
    steps("responses that get longer", "", [{n: v * (1 + i / 5 * (n == "perf/rollout_time")) for n, v in SPEED.items()}
                                            for i in range(40)]),
    steps("empty answers and exits that lose", "",
          [{"rollout/suspicious/empty": 60.0, "rollout/suspicious/empty_best": 2.0,
            "rollout/suspicious/exit": 20.0, "rollout/suspicious/exit_best": 10.0}] * 5),
    steps("agents that fail at times", "", [{"rollout/episodes/agent_error": 12.0}] * 3,
          {"agent_command": "agent", "rollout_batch_size": 4, "n_samples_per_prompt": 8}),
    steps("half of the episodes at their limit", "",
          [{"rollout/episodes/limit/turns": 16.0, "rollout/truncated_ratio": 0.5}] * 3,
          {"agent_command": "agent", "rollout_batch_size": 4, "n_samples_per_prompt": 8}),
    steps("a third of the responses cut off", "", [{"rollout/truncated_ratio": 0.7}] * 4),
    steps("KL of kernels", "", [{"train/kl_loss": 5e-5}], KL),
    steps("KL after training", "", [{"train/kl_loss": 0.0}, {"train/kl_loss": 0.4}], KL),
    steps("a warm start and its reference", "", [{"train/kl_loss": 0.5}],
          KL | {"hf_checkpoint": "base", "load": "sft", "finetune": True}),
    steps("a gap of bfloat16", "", [{GAP: 7e-3}] * 5),
    steps("a gap of stale samples", "", [{GAP: 0.08} | STALE] * 12, {"async_buffer_size": 1}),
    steps("a clipped gradient that jumps once", "", _norms(*[4.0] * 12, 159.0, 9.0)),
    steps("episodes of as many turns as the limit", "",
          [BUSY | {"rollout/episodes/limit/turns": 32.0, "rollout/truncated_ratio": 1.0}] * 3,
          {"environment": ["own.py:Game"], "rollout_batch_size": 4, "n_samples_per_prompt": 8}),
    steps("a first gradient of 9", "", [{"train/grad_norm": 9.0}]),
    steps("gradients that vary", "", [{"train/grad_norm": norm} for norm in (1, 2, 0.5, 3, 1, 1, 2, 1, 0.7, 4, 1)]),
    steps("gradients of 0 in between", "", [{"train/grad_norm": norm} for norm in (0, 1, 0, 1, 0, 1, 1, 0, 1, 1, 1.5)]),
    steps("hard data", "", [{"rollout/zero_std_frac": 1.0, "rollout/raw_reward": 0.0, "rollout/reward_range": 0.0}] * 2
          + GOOD),
    steps("rewards that rise", "", [{"rollout/zero_std_frac": 0.3, "rollout/raw_reward": i / 40,
                                     "rollout/reward_range": 1.0} for i in range(40)]),
    steps("rewards that dip", "", [*GOOD, *[row | {"rollout/raw_reward": 0.3} for row in GOOD], *GOOD]),
    steps("likely responses", "", [{"rollout/log_probs": -0.4}]),
    steps("a base model without a template", "", [{"rollout/log_probs": -1.6}], has_template=False),
    steps("SmolLM2-135M-Instruct in its own format", "", [{"rollout/log_probs": -2.0}], {"apply_chat_template": True},
          sizes=(49_152, 134_515_008)),
    steps("samples within the bound", "", [STALE] * 10, {"async_buffer_size": 1}),
    steps("a fast reward", "", [{"perf/reward_wait_time": 0.2, "perf/rollout_time": 10.0, "perf/wait_time_ratio": 0.8}]
          * 5),
    steps("balanced engines", "", [{"engine/requests/max": 12.0, "engine/requests/mean": 9.0}] * 10),
    steps("short weight updates", "", [{"perf/update_weights_time": 8.0, "perf/step_time": 90.0}] * 5),
    steps("memory that stays", "", [{"memory/engine_kept_frac": 0.06, "memory/trainer_peak_frac": 0.7}] * 10),
    steps("experts that mostly agree", "", [{"train/routing_agreement": 0.97}] * 3),
)  # fmt: skip

FEW = {"rollout_batch_size": 2, "n_samples_per_prompt": 2}
INSTRUCT = {"has_template": True, "sizes": (49_152, 134_515_008)}
ROUNDED = {"selftest/share/numerics": 1.0, "selftest/logp_rounding_limit": 0.08}
FLAT = {"rollout/zero_std_frac": 1.0, "rollout/raw_reward": 0.0, "rollout/reward_range": 0.0}
MEASURED = (
    steps("SmolLM2: questions at temperature 0.7", "", [{"rollout/log_probs": -0.93}], {"rollout_temperature": 0.7},
          **INSTRUCT),
    steps("SmolLM2: chat, bfloat16", "", [{"rollout/log_probs": -2.56}], {"bf16": True}, **INSTRUCT),
    steps("SmolLM2: chat, temperature 1.2", "", [{"rollout/log_probs": -3.75}], {"rollout_temperature": 1.2},
          **INSTRUCT),
    steps("SmolLM2: text to continue", "", [{"rollout/log_probs": -2.49}], **INSTRUCT),
    steps("SmolLM2: questions without a chat format", "", [{"rollout/log_probs": -3.66}], **INSTRUCT),
    steps("a base model at temperature 1.2", "", [{"rollout/log_probs": -3.77}], {"rollout_temperature": 1.2}),
    steps("a model of characters", "", [{"rollout/log_probs": -1.4}], sizes=(64, 5_000_000)),
    steps("SmolLM2: a gap of bfloat16", "", [{GAP: 0.038} | ROUNDED, *[{GAP: 0.041}] * 20], {"bf16": True}, **INSTRUCT),
    steps("a gap of bfloat16 at temperature 0.5", "", [{GAP: 0.039} | ROUNDED, {GAP: 0.054}],
          {"bf16": True, "rollout_temperature": 0.5}),
    steps("a gap of bfloat16 in a model with large logits", "",
          [{GAP: 0.041} | ROUNDED | {"selftest/logp_max_diff": 1.6}, {GAP: 0.068}], {"bf16": True}),
    steps("an engine in bfloat16, with importance sampling", "", [{GAP: 0.05, "selftest/share/unexplained": 1.0}],
          {"embedded_dtype": "bfloat16", "use_tis": True}),
    steps("four of four responses cut off", "", [{"rollout/truncated_ratio": 1.0}, {"rollout/truncated_ratio": 0.5}],
          FEW),
    steps("15 of 16 responses cut off once", "", [{"rollout/truncated_ratio": 0.9375},
                                                 {"rollout/truncated_ratio": 0.625}],
          {"rollout_batch_size": 4, "n_samples_per_prompt": 4}),
    steps("a context that fills up later", "", [{"rollout/truncated_ratio": 0.4}] * 5
          + [{"rollout/truncated_ratio": 0.95}] * 5, {"rollout_max_response_len": 64}),
    steps("hard data in small batches", "", [FLAT] * 12 + [FLAT | {"rollout/zero_std_frac": 0.5,
                                                                   "rollout/raw_reward": 0.25}], FEW),
    steps("four samples a step that vary", "", [
        {"rollout/zero_std_frac": 0.5, "rollout/raw_reward": reward, "rollout/reward_range": 1.0}
        for reward in [0.5, 0.25, 0.0] * 5 + [0.0, 0.25, 0.0, 0.0, 0.0] + [0.25, 0.0, 0.5] * 5 + [0.0] * 5], FEW),
    steps("rewards of -1 and 1", "", [{"rollout/zero_std_frac": 0.2, "rollout/raw_reward": (-1) ** i * 0.05,
                                      "rollout/reward_range": 2.0} for i in range(40)]),
    steps("rewards of 100 with their spread divided out", "", [{"train/grad_norm": 6.0, "rollout/reward_range": 100.0,
                                                                "rollout/zero_std_frac": 0.1,
                                                                "rollout/raw_reward": 40.0}] * 5),
    steps("an entropy bonus while the reward rises", "", [
        {"rollout/zero_std_frac": 0.3, "rollout/raw_reward": 0.3 + i / 100, "rollout/reward_range": 1.0}
        for i in range(30)], {"entropy_coef": 0.05}),
    steps("a KL loss with a large weight that holds the policy", "", [
        {"rollout/zero_std_frac": 0.3, "rollout/raw_reward": 0.5, "rollout/reward_range": 1.0, "train/kl_loss": 0.0}
    ] * 20, KL | {"kl_loss_coef": 10.0}),
    steps("solved at last", "", [{"rollout/zero_std_frac": 0.9, "rollout/raw_reward": 0.98,
                                  "rollout/reward_range": 1.0}] * 30),
    steps("one sample per prompt, all wrong twice", "", [FLAT | {"rollout/zero_std_frac": 1.0}] * 2 + GOOD,
          {"n_samples_per_prompt": 1, "rollout_batch_size": 16}),
    steps("demonstrations with a constant reward", "", [FLAT] * 9, {"loss_type": "sft_loss"}),
    steps("one reward call in a thousand times out", "", [{"rollout/reward_timed_out": 1.0}],
          {"rollout_batch_size": 128, "n_samples_per_prompt": 8}),
    steps("one generation in a thousand fails", "", [{"rollout/generate_failed": 1.0}],
          {"rollout_batch_size": 128, "n_samples_per_prompt": 8, "custom_generate_function_path": "own.py:generate"}),
)  # fmt: skip

FAULTY = (*ROLLOUTS, *NUMBERS, *MACHINES)


@pytest.mark.parametrize("case", FAULTY, ids=lambda case: f"{case.row}: {case.name}")
def test_a_faulty_run_gets_its_diagnosis_and_no_other(case: Case) -> None:
    found = [each for each in case.diagnose() if each.severity != "info" or each.id == case.row]
    assert {each.id for each in found} == {case.row}
    said = found[0].cause + found[0].remedy
    assert [word for word in case.remedy.split("|") if word not in found[0].remedy] == []
    assert not case.without or case.without not in said


def test_constant_rewards_come_with_one_of_the_responses() -> None:
    suite = MonitorSuite(MONITORS, RunFacts(config_from_values({})))
    said = {"prompt": "'83+80='", "response": "'163<|im_end|>'", "label": "'1.63'"}
    for number, row in enumerate(_rewards(0.0, 0.0, 0.0), 1):
        suite.event({"event": "equal_rewards", **said})
        found = suite.step(number, row)
    assert "; one of them: prompt '83+80=', response '163<|im_end|>', label '1.63'" in found[0].finding


def test_healthy_runs_get_none() -> None:
    found = {case.name: [d.text() for d in case.diagnose() if d.severity != "info"] for case in HEALTHY + MEASURED}
    assert {name: texts for name, texts in found.items() if texts} == {}


@fault("REW05")
def test_a_reward_that_takes_a_missing_answer_for_a_right_one() -> None:
    def found(rewards: Mapping[str, float]) -> list[str]:
        texts = ["<|im_end|>", "5", "6", "import os\nos._exit(0)"] * 9
        samples = [
            Sample(0, i, i, response=text, response_length=1, reward=rewards[text]) for i, text in enumerate(texts)
        ]
        row = {name: metric.value for name, metric in rollout_metrics([Group(0, samples)]).items()}
        suite = MonitorSuite(MONITORS, RunFacts(config_from_values({})))
        return [each.text() for each in suite.step(1, row) if each.id == "REW05"]

    right = {"5": 1.0, "6": 0.0, "<|im_end|>": 0.0, "import os\nos._exit(0)": 0.0}
    assert found(right) == []
    (empty,) = found(right | {"<|im_end|>": 1.0})
    assert "9 samples have no text, and 9 of them have the highest reward" in empty
    (ends,) = found(right | {"import os\nos._exit(0)": 1.0})
    assert "9 samples call os._exit" in ends
    assert found(dict.fromkeys(right, 1.0)) == []
