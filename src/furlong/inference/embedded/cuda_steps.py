"""Decode steps of fused models on CUDA: one CUDA graph for each number of slots, captured at its first use.

A graph contains addresses. Weight loads write in place, so they do not affect it. The graphs of a cache are dropped
when its tensors move, and when released weights are allocated again.
Axes: N decoding slots, S slots of the cache, H query heads, K key/value heads, D head width, E model width,
V vocabulary.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from furlong.inference.embedded.decode_steps import DenseLayer, SlotCache, StepShape

MIN_CAPABILITY = (8, 0)
STEP_ROWS = [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]


def missing(device: torch.device) -> str:
    """Return why decode steps on `device` cannot be graphs of these kernels, "" if they can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is SM {capability[0]}.{capability[1]}, the kernels need SM 8.0"
    return ""


def step_rows(n: int) -> int:
    """`n` slots rounded up to a number for which a graph is captured."""
    if n > STEP_ROWS[-1]:
        return -(-n // STEP_ROWS[-1]) * STEP_ROWS[-1]
    return STEP_ROWS[bisect_left(STEP_ROWS, n)]


@dataclass(frozen=True)
class StepWeights:
    """The weights of decode steps. `qk_gains` [H + K, D] are in pair order, `rotations_LD` is complex64.

    Their storage is fixed: values are written in place.
    """

    embedding_VE: Tensor
    layers: Sequence[DenseLayer]
    qk_gains: Sequence[Tensor | None]
    final_norm_E: Tensor
    head: Any
    rotations_LD: Tensor


class CudaSteps:
    """Decode steps over the slots of `cache` in its current layout.

    `graphed`: capture steps as CUDA graphs; without, every step launches its kernels, which runs on any device.
    """

    def __init__(self, shape: StepShape, weights: StepWeights, cache: SlotCache, *, graphed: bool = True) -> None:
        from furlong.inference.embedded import decode_kernels

        self._kernels: Any = decode_kernels
        self.shape, self.weights, self._graphed = shape, weights, graphed
        self._layers = cache.layers
        n, device = cache.num_slots, shape.device
        self._tokens = torch.zeros(n, dtype=torch.int64, device=device)
        self._positions = torch.zeros(n, dtype=torch.int64, device=device)
        self._queries = self._new(n, shape.num_heads, shape.head_dim)
        self._attended = self._new(n, shape.num_heads * shape.head_dim)
        self._gated = self._new(n, shape.inner)
        self._logits = torch.empty(n, len(weights.embedding_VE), dtype=torch.float32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphed else None
        self._stream = torch.cuda.Stream(device) if graphed else None

    def _new(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self.shape.dtype, device=self.shape.device)

    def logits(self, tokens_N: Tensor, positions_N: NDArray[np.int64]) -> Tensor:
        """Process one token per slot; returns float32 logits [N, V], valid until the next call."""
        n = len(positions_N)
        self._tokens[:n].copy_(tokens_N)
        self._positions[:n].copy_(torch.from_numpy(positions_N))
        if not self._graphed:
            self._compute(n)
        else:
            if n not in self._graphs:
                self._graphs[n] = self._captured(n)
            self._graphs[n].replay()
        return self._logits[:n]

    def _captured(self, n: int) -> torch.cuda.CUDAGraph:
        """Run a step on another stream, which compiles kernels and allocates workspaces, and capture a second one."""
        assert self._stream is not None
        current = torch.cuda.current_stream(self.shape.device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._compute(n)
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # the trainer's thread may allocate
            try:
                self._compute(n)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph

    def _compute(self, n: int) -> None:
        """Launch the kernels of a step of `n` slots."""
        shape, weights, kernels = self.shape, self.weights, self._kernels
        positions, queries, attended = self._positions[:n], self._queries[:n], self._attended[:n]
        gated = self._gated[:n]
        x = functional.embedding(self._tokens[:n], weights.embedding_VE)
        for layer, gains, (keys, values) in zip(weights.layers, weights.qk_gains, self._layers, strict=True):
            fused = functional.linear(self._norm(x, layer.input_norm_E), layer.qkv.weight, layer.qkv.bias)
            kernels.write_heads(fused, gains, weights.rotations_LD, positions, keys, values, shape.eps, queries)
            kernels.attend(queries, keys, values, positions, shape.scale, attended)
            x = layer.out.added_to(x, attended)
            kernels.gate(layer.gate_up(self._norm(x, layer.post_norm_E)), gated)
            x = layer.down.added_to(x, gated)
        self._logits[:n].copy_(weights.head(self._norm(x, weights.final_norm_E)))

    def _norm(self, x: Tensor, gain_E: Tensor) -> Tensor:
        return functional.rms_norm(x, (self.shape.width,), gain_E, self.shape.eps)
