"""How long a rank's own layers take, without what it waits for other ranks.

Ranks that train one model wait for each other in every layer, so the wall time of a step is the same on all of them,
and that of the slowest. What runs between the gathering of a layer's parameters and its end is a rank's own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

TIMED_LAYERS = 8  # of a model, spread over it: a pair of CUDA events takes some 10 us


class LayerTimes:
    """Times forward passes of some of a rank's layers, by CUDA events or the clock; nothing without layers.

    Make it after the layers were sharded: its hooks run within those that gather and free parameters. Collectives of
    context, tensor and expert parallelism are within layers and are counted: ranks that share those look alike.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        timed = layers[:: -(-len(layers) // TIMED_LAYERS)] if layers else []
        self._on_gpu = device.type == "cuda"
        self._scale = len(layers) / len(timed) if timed else 0.0
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []
        for layer in timed:
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end, prepend=True)

    def _begin(self, *_: Any) -> None:
        self._began = self._now()

    def _end(self, *_: Any) -> None:
        if self._began is not None:  # a recomputed layer may begin without coming to its end
            self._spans.append((self._began, self._now()))
        self._began = None

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> float | None:
        """Seconds of all forward passes of all layers since the last call; those not timed are taken as the others."""
        if not self._scale:
            return None
        spans, self._spans, self._began = self._spans, [], None
        if self._on_gpu:
            torch.cuda.synchronize()
            return self._scale * sum(start.elapsed_time(end) for start, end in spans) / 1e3
        return self._scale * sum(end - start for start, end in spans)
