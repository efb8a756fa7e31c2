"""What happens when a part fails, hangs or is diagnosed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class FaultFlags:
    """What happens when data, a reward, an engine or a step fails."""

    use_fault_tolerance: bool = flag(
        False,
        "Start an engine that died or hangs again, give it the current weights, and send its requests to the others "
        "meanwhile; without it such an engine ends the run.",
        needs="rollout_num_gpus",
    )
    rollout_health_check_interval: float = flag(
        30.0, "Seconds between two health checks of an engine.", within="(0, inf)", needs="use_fault_tolerance"
    )
    rollout_health_check_timeout: float = flag(
        30.0, "Seconds within which an engine must answer one.", within="(0, inf)", needs="use_fault_tolerance"
    )
    rollout_health_check_first_wait: float = flag(
        0.0, "Seconds before the first one, once an engine is up.", within="[0, inf)", needs="use_fault_tolerance"
    )
    rollout_max_engine_restarts: int = flag(
        10, "Engines that a run starts again before it gives up.", within="[0, inf)", needs="use_fault_tolerance"
    )
    skip_bad_rows: bool = flag(False, "Count and skip unusable rows of the data; without it they are an error.")
    reward_timeout: float = flag(
        30.0, "Seconds that one reward call may take; then it counts as timed out.", within="(0, inf)"
    )
    generate_timeout: float | None = flag(
        None, "Seconds that one sample's generation may take. Without it: no limit.", within="(0, inf)"
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "Skip and count optimizer steps whose gradient is not finite; without the flag such a step is an error.",
        name="--no-check-for-nan-in-loss-and-grad",
    )
    skip_self_test: bool = flag(
        False, "Do not compare log-probs of engine and trainer on the first batches before training on them."
    )
    hang_timeout: float = flag(
        3600.0,
        "Seconds without any progress (a step, group, micro-batch or published tensor) after which the stacks of all "
        "processes are written into the run's folder; 0 never. Longer than the longest step on other machines.",
        within="[0, inf)",
    )
    on_hang: Literal["warn", "stop"] = flag(
        "warn",
        "What happens then: `warn` tells it; `stop` also ends the run, with a checkpoint of the last step where --save "
        "is given and no rollout runs ahead.",
        needs="hang_timeout",
    )
    on_diagnosis: Literal["warn", "stop", "strict"] = flag(
        "warn",
        "What a diagnosis of the running doctor does: `warn` tells it; `stop` ends the run in good order after the "
        "step if it is an error, `strict` if it is a warning too.",
    )
