"""Accuracies over problems and seeds with their intervals, and their comparison with `published.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import pvariance
from statistics import variance as variance_of
from typing import Any

from furlong.evals.eval_summary import Estimate, wilson
from furlong.reproduce.rows import PACKAGE

PUBLISHED = PACKAGE / "published.json"


@dataclass(frozen=True)
class Comparison:
    """How a result compares with the published one. agrees: None if they cannot be compared."""

    agrees: bool | None
    text: str


@cache
def read_published() -> dict[str, dict[str, Any]]:
    """Return the published results by row; empty without the file."""
    return json.loads(PUBLISHED.read_text(encoding="utf-8")) if PUBLISHED.exists() else {}


def comparison(result: Mapping[str, Any], published: Mapping[str, Any] | None) -> Comparison:
    """Compare the accuracy after training with the published one: they agree if the 95 % intervals overlap."""
    if result["status"] == "failed":
        return Comparison(None, "not compared: the row failed")
    if published is None:
        return Comparison(None, "not compared: no result of this row is published")
    if published["status"] == "failed":
        return Comparison(None, "not compared: the published row failed")
    if result["steps"] != published["steps"]:
        return Comparison(None, f"not compared: {result['steps']} steps, published with {published['steps']}")
    measured, other = Estimate(**result["after"]), Estimate(**published["after"])
    missed = gap(measured, other)
    against = f"published: {other.value:.1%} ({other.low:.1%}-{other.high:.1%})"
    if missed == 0:
        return Comparison(True, f"within the interval; {against}")
    side = "below" if missed < 0 else "above"
    return Comparison(False, f"{side} the published interval by {abs(missed):.1%}; {against}")


def accuracy_interval(right_SP: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean accuracy with a 95 % Wilson interval.

    right_SP: for each of S seeds, whether each of the same P problems was answered correctly (1 or 0). The number of
    trials of the interval is the one that gives the variance of the mean: that between problems, of the mean over
    seeds, divided by P, plus that between seeds, of the mean over problems, divided by S. Noise of single answers is
    in both, so the interval is a little wide. With one seed, it is the plain Wilson interval of P trials.

    >>> estimate = accuracy_interval([[1, 1, 0, 0], [1, 1, 0, 0]])
    >>> estimate.value, round(estimate.low, 2), round(estimate.high, 2)
    (0.5, 0.15, 0.85)
    """
    num_problems = {len(right) for right in right_SP}
    if len(num_problems) != 1 or num_problems == {0}:
        raise ValueError(f"every seed needs answers to the same problems; their numbers are {sorted(num_problems)}")
    by_problem = [sum(column) / len(column) for column in zip(*right_SP, strict=True)]
    by_seed = [sum(row) / len(row) for row in right_SP]
    mean = sum(by_seed) / len(by_seed)
    variance = pvariance(by_problem) / len(by_problem)
    if len(by_seed) > 1:
        variance += variance_of(by_seed) / len(by_seed)
    trials = mean * (1 - mean) / variance if variance > 0 else float(len(by_problem))
    return wilson(mean, trials)


def gap(measured: Estimate, published: Estimate) -> float:
    """Return by how much an interval misses another one: 0 if they overlap, negative if it is below.

    >>> round(gap(Estimate(0.5, 0.4, 0.6), Estimate(0.8, 0.7, 0.9)), 3)
    -0.1
    """
    if measured.high < published.low:
        return measured.high - published.low
    return max(measured.low - published.high, 0.0)
