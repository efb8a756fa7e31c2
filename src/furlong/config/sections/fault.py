"""Flags of the section `fault`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class FaultFlags:
    """Reactions to bad data, timeouts, failing engines, hangs and diagnoses."""

    use_fault_tolerance: bool = flag(
        False,
        "Restart an engine that died or hangs, update its weights and send its requests to the others meanwhile. "
        "Without this flag a failed engine ends the run.",
        needs="rollout_num_gpus",
    )
    rollout_health_check_interval: float = flag(
        30.0, "Seconds between health checks of an engine.", within="(0, inf)", needs="use_fault_tolerance"
    )
    rollout_health_check_timeout: float = flag(
        30.0, "Timeout of a health check, in seconds.", within="(0, inf)", needs="use_fault_tolerance"
    )
    rollout_health_check_first_wait: float = flag(
        0.0,
        "Seconds between the start of an engine and its first health check.",
        within="[0, inf)",
        needs="use_fault_tolerance",
    )
    rollout_max_engine_restarts: int = flag(
        10, "Maximum number of engine restarts per run.", within="[0, inf)", needs="use_fault_tolerance"
    )
    skip_bad_rows: bool = flag(False, "Skip and count rows that cannot be used. Without this flag they are an error.")
    reward_timeout: float = flag(30.0, "Timeout of a reward call, in seconds.", within="(0, inf)")
    generate_timeout: float | None = flag(
        None, "Timeout of the generation of one sample, in seconds. Default: no timeout.", within="(0, inf)"
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "Skip and count optimizer steps with a non-finite gradient. Without this flag such a step is an error.",
        name="--no-check-for-nan-in-loss-and-grad",
    )
    skip_self_test: bool = flag(False, "Do not compare the log-probs of engine and trainer on the first batches.")
    hang_timeout: float = flag(
        3600.0,
        "Seconds without progress (a step, group, micro-batch or updated tensor) after which the stacks of all "
        "processes are written to the run directory; 0 disables the check. Choose more than the longest step on your "
        "machines.",
        within="[0, inf)",
    )
    on_hang: Literal["warn", "stop"] = flag(
        "warn",
        "Action on a hang: `warn` logs it; `stop` also ends the run, with a checkpoint of the last step if --save is "
        "given and no rollout is in flight ahead of training.",
        needs="hang_timeout",
    )
    on_diagnosis: Literal["warn", "stop", "strict"] = flag(
        "warn",
        "Action on a diagnosis during the run: `warn` logs it; `stop` ends the run after the current step on an "
        "error, `strict` on a warning too.",
    )
