"""How fast the ranks of a trainer were in one rollout, as an event that monitors read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from furlong.core.batch import FlopsModel, IntArray
from furlong.core.metric import Metrics

LAYERS = "perf/layers_time"  # seconds of a rank's own layers (`training.profiling.LayerTimes`)


def cost_of(lengths: IntArray, flops: FlopsModel | None) -> float:
    """TFLOPs of a forward pass of sequences of these lengths; their tokens, where no model of it is given."""
    return float(lengths.sum() if flops is None else flops.cost(lengths).sum() / 1e12)


def paces(found: Sequence[Metrics], costs: Sequence[float], places: Sequence[str]) -> dict[str, Any] | None:
    """Fields of the event `ranks_timed`; None if a rank has not timed its layers.

    Args:
        found: What each rank measured.
        costs: What each was given to do (`cost_of`).
        places: How each is called, with its machine.
    """
    if not all(LAYERS in metrics for metrics in found):
        return None
    layers_s = [metrics[LAYERS].value for metrics in found]
    paces_s = [seconds / cost if cost else 0.0 for seconds, cost in zip(layers_s, costs, strict=True)]
    slowest = max(range(len(paces_s)), key=paces_s.__getitem__)
    return {
        "layers_s": [float(f"{seconds:.4g}") for seconds in layers_s],
        "per_cost_s": [float(f"{seconds:.4g}") for seconds in paces_s],
        "slowest": slowest,
        "place": places[slowest],
    }
