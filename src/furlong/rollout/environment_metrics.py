"""Metrics of environments, of the parts of rewards, and of the roles of an episode."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from furlong.core.metric import Metrics, mean, total
from furlong.core.sample import Sample, Status, metadata_keys, scalar_reward
from furlong.environments.sample_keys import ENVIRONMENT, FAILED_PARTS, INFO, PARTS
from furlong.sessions.samples import LEAF, TURNS


def environment_metrics(samples: Sequence[Sample], reward_key: str | None = None) -> Metrics:
    """Measure episodes by environment: {} without any.

    `env/NAME/episodes`, `env/NAME/failed`, and means over the others: `env/NAME/reward`, `env/NAME/turns`,
    `env/NAME/truncated_ratio`, the parts of the reward as `env/NAME/reward/PART`, and the numbers that its steps
    recorded as `env/NAME/info/KEY`. Parts are also reported over all environments, as `reward/PART`.
    """
    if metadata_keys(samples).isdisjoint((ENVIRONMENT, PARTS, FAILED_PARTS)):
        return {}
    episodes = [sample for sample in samples if LEAF not in sample.metadata]
    by_name: dict[str, list[Sample]] = defaultdict(list)
    for sample in episodes:
        if (name := sample.metadata.get(ENVIRONMENT)) is not None:
            by_name[str(name)].append(sample)
    metrics = part_metrics(episodes)
    for name, group in sorted(by_name.items()):
        metrics |= {f"env/{name}/{key}": value for key, value in _of_environment(group, reward_key).items()}
    return metrics


def _of_environment(samples: Sequence[Sample], reward_key: str | None) -> Metrics:
    ended = [sample for sample in samples if sample.status is not Status.FAILED]
    metrics: Metrics = {"episodes": total(len(samples)), "failed": total(len(samples) - len(ended))}
    if ended:
        count = len(ended)
        metrics["truncated_ratio"] = mean(sum(s.status is Status.TRUNCATED for s in ended) / count, count)
    metrics |= _means({"reward": scalar_reward(s, reward_key)} for s in ended if s.reward is not None)
    metrics |= _means({"turns": s.metadata[TURNS]} for s in ended if TURNS in s.metadata)
    metrics |= part_metrics(samples)
    return metrics | _means(
        {f"info/{key}": value for key, value in (s.metadata.get(INFO) or {}).items()} for s in ended
    )


def part_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return the mean of each part of the rewards as `reward/NAME`, and failures as `reward/NAME_failed`."""
    metrics = _means(
        {f"reward/{name}": value for name, value in (s.metadata.get(PARTS) or {}).items()} for s in samples
    )
    failed = Counter(name for s in samples for name in s.metadata.get(FAILED_PARTS) or ())
    return metrics | {f"reward/{name}_failed": total(count) for name, count in sorted(failed.items())}


def _means(rows: Iterable[dict[str, Any]]) -> Metrics:
    """Return the mean of each key over the rows that have it as a number."""
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            if isinstance(value, bool | int | float):
                columns[key].append(float(value))
    return {key: mean(sum(column) / len(column), len(column)) for key, column in columns.items()}
