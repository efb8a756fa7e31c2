"""Evaluation sets: generation, scoring and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from furlong.core.event_loop import gather_or_cancel
from furlong.core.metric import Metrics, merge, total
from furlong.core.sample import Group, Sample
from furlong.rollout.episode_load import RewardWait
from furlong.rollout.generate import Generation, run_group
from furlong.rollout.sample_metrics import SampleReport, eval_metrics, evaluation_data


@dataclass(frozen=True)
class EvalSet:
    """One evaluation set. `groups` builds its groups, so that every evaluation starts from clean samples."""

    name: str
    groups: Callable[[], list[Group]]
    generation: Generation
    reward_key: str | None = None
    pass_k: bool | tuple[int, ...] = True
    on_samples: Callable[[int, str, list[Sample]], None] | None = None


async def evaluate(sets: Sequence[EvalSet], rollout_id: int, *, report: SampleReport) -> Metrics:
    """Generate and score every set. Returns `eval/<name>` with lengths, truncation and pass@k."""
    started, wait = monotonic(), RewardWait()
    groups_of_sets = await gather_or_cancel(_evaluate_set(each, rollout_id, wait) for each in sets)
    parts: list[Metrics] = []
    data: dict[str, dict[str, Any]] = {}
    for each, groups in zip(sets, groups_of_sets, strict=True):
        parts.append(eval_metrics(each.name, groups, reward_key=each.reward_key, pass_k=each.pass_k))
        data[each.name] = evaluation_data([s for g in groups for s in g.samples], each.reward_key)
    extra = {
        "perf/eval_time": total(monotonic() - started),
        "perf/eval_reward_wait_time": total(wait.seconds),
    }
    return report.of_evaluation(rollout_id, data, merge(parts), extra)


async def _evaluate_set(each: EvalSet, rollout_id: int, wait: RewardWait) -> list[Group]:
    groups = await gather_or_cancel(
        run_group(group, each.generation, rollout_id=rollout_id, continues=lambda: True, wait=wait)
        for group in each.groups()
    )
    if each.on_samples is not None:
        each.on_samples(rollout_id, each.name, [s for g in groups for s in g.samples])
    return groups
