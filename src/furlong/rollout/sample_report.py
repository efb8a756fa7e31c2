"""What a run records of the samples of a rollout or an evaluation; slime's logging hooks may take that over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.core.metric import Metrics, values
from furlong.core.sample import Group, Sample, Status, scalar_reward
from furlong.rollout.sample_metrics import rollout_metrics


@dataclass(frozen=True)
class SampleReport:
    """Measures samples. A hook that returns True has logged by itself, and the standard metrics are left out.

    `measure` gives the metrics of a rollout's groups. `log_rollout(rollout_id, args, samples, extra_metrics,
    rollout_time)` and `log_evaluation(rollout_id, args, data, extra_metrics)` are slime's; `data` maps the name of each
    set to its `rewards`, `truncated` and `samples`, lists with one entry per sample.
    """

    measure: Callable[[Sequence[Group]], Metrics] = rollout_metrics
    log_rollout: Callable[..., Any] | None = None
    log_evaluation: Callable[..., Any] | None = None
    args: Any = None

    def of_rollout(self, rollout_id: int, groups: Sequence[Group], extra: Metrics, seconds: float) -> Metrics:
        """Return the metrics of a training rollout, `extra` among them; those win over the measured ones."""
        if self.log_rollout is not None:
            samples = [sample for group in groups for sample in group.samples]
            if self.log_rollout(rollout_id, self.args, samples, values(extra), seconds):
                return extra
        return self.measure(groups) | extra

    def of_evaluation(
        self, rollout_id: int, data: dict[str, dict[str, Any]], measured: Metrics, extra: Metrics
    ) -> Metrics:
        """Return the metrics of an evaluation: what was `measured` unless the hook has logged it, and `extra`."""
        if self.log_evaluation is not None and self.log_evaluation(rollout_id, self.args, data, values(extra)):
            return extra
        return measured | extra


def evaluation_data(samples: Sequence[Sample], reward_key: str | None) -> dict[str, Any]:
    """Render the samples of one set as evaluation hooks get them. A sample without a reward has None there."""
    return {
        "rewards": [None if s.reward is None else scalar_reward(s, reward_key) for s in samples],
        "truncated": [s.status is Status.TRUNCATED for s in samples],
        "samples": list(samples),
    }
