"""Metrics that can be merged over micro-batches, ranks and samples.

A metric is a pair (total, weight) and a rule. Merging adds pairs and only `value` divides, so a mean over micro-batches
of different sizes is the mean over their tokens, not a mean of means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Rule = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number to report: total / weight for `mean`, `total` for the other rules.

    >>> (mean(1.0, weight=1) + mean(4.0, weight=2)).value
    3.0
    """

    total: float
    weight: float = 1.0
    rule: Rule = "mean"

    @property
    def value(self) -> float:
        """The number to show; nan for a mean of nothing."""
        if self.rule != "mean":
            return self.total
        return self.total / self.weight if self.weight else float("nan")

    def __add__(self, other: Metric) -> Metric:
        if self.rule != other.rule:
            raise ValueError(f"cannot merge a {self.rule} metric with a {other.rule} metric of the same name")
        match self.rule:
            case "max":
                return Metric(max(self.total, other.total), 1.0, "max")
            case "min":
                return Metric(min(self.total, other.total), 1.0, "min")
            case _:
                return Metric(self.total + other.total, self.weight + other.weight, self.rule)


Metrics = dict[str, Metric]


def mean(value: float, weight: float = 1.0) -> Metric:
    """Make a metric from a `value` that is already a mean over `weight` items (tokens, samples, seconds)."""
    return Metric(value * weight, weight, "mean")


def total(value: float) -> Metric:
    """Make a metric from a count or an amount that is summed over parts."""
    return Metric(value, 1.0, "sum")


def maximum(value: float) -> Metric:
    """Make a metric that merges to the largest value."""
    return Metric(value, 1.0, "max")


def minimum(value: float) -> Metric:
    """Make a metric that merges to the smallest value."""
    return Metric(value, 1.0, "min")


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merge metrics by name. Names may be missing in some parts."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return plain numbers for trackers, without means of nothing: what was not measured is absent, not 0."""
    return {name: m.value for name, m in metrics.items() if m.weight or m.rule != "mean"}
