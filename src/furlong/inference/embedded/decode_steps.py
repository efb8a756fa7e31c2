"""Buffers and cache views of decode steps with one shape.

Axes: N decoding slots, H query heads, K key/value heads, G = H / K, D head width, E model width, L cached positions.

A step of a small model has a hundred small operations. Between matmuls, which evict the CPU caches, each takes 2-4
times as long as alone, and so do allocations and views. So buffers and views are made once for all steps until the
number of slots or the cache length changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from furlong.inference.embedded.slot_cache import SlotCache, attend_rows, attend_slots, decode_mask, row_parts

NORM_PADDING = 16  # columns that keep rows aligned

_torch: Any = torch  # undeclared: operators with `out`, and a fused one
_silu = _torch._C._nn.silu
_scaled_to_length = _torch._weight_norm_interface


@dataclass(frozen=True)
class StepShape:
    """Sizes and dtypes of a model.

    `wide` is the dtype of sums and rotations, `eps` that of RMSNorm, `scale` that of attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int
    inner: int
    eps: float
    scale: float
    dtype: torch.dtype
    wide: torch.dtype
    device: torch.device


class DecodeSteps:
    """Decode steps of `n` slots over the first `length` positions of `cache` in its current layout.

    A returned tensor is valid until the same method is called again.
    """

    def __init__(self, shape: StepShape, cache: SlotCache, n: int, length: int) -> None:
        self.shape, self.n, self.length = shape, n, length
        self._norms = RowNorms(shape, n)
        self._gated = self._new(n, shape.inner)
        self._make_positions(cache.length)
        self._make_heads()
        self._make_attention(cache)

    def _new(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self.shape.dtype, device=self.shape.device)

    def _make_positions(self, cache_length: int) -> None:
        s, n = self.shape, self.n
        self._at = np.full(n, -2, np.int64)
        self._mask = torch.empty(n * s.num_kv_heads, 1, cache_length, dtype=s.dtype, device=s.device)
        self._mask_flat, self._seen = self._mask.view(-1), self._mask[:, :, : self.length]
        ends = torch.arange(n * s.num_kv_heads, device=s.device) * cache_length
        self._first_NK = ends.view(n, s.num_kv_heads)
        self._where_NK = torch.empty_like(self._first_NK)
        self._where = self._where_NK.view(-1)
        self._rotation = torch.empty(n, s.head_dim // 2, dtype=s.wide.to_complex(), device=s.device)
        self._rotation_N1 = self._rotation[:, None]

    def _make_heads(self) -> None:
        s, n = self.shape, self.n
        rotated, all_heads = s.num_heads + s.num_kv_heads, s.num_heads + 2 * s.num_kv_heads
        heads = torch.empty(n, all_heads, s.head_dim, dtype=s.wide, device=s.device)
        self._fused = heads.view(n, -1)
        self._normed_heads = heads[:, :rotated]
        self._pairs = torch.view_as_complex(heads.view(n, all_heads, -1, 2))[:, :rotated]
        self._wide_q = heads[:, : s.num_heads]
        self._wide_kv = heads[:, s.num_heads :].view(n, 2, s.num_kv_heads, s.head_dim).transpose(0, 1)
        self._q = self._new(n, s.num_heads, s.head_dim)
        self._kv = self._new(2, n, s.num_kv_heads, s.head_dim)
        self._new_keys, self._new_values = self._kv.view(2, -1, s.head_dim)

    def _make_attention(self, cache: SlotCache) -> None:
        s, n = self.shape, self.n
        self._rows = [(keys.view(-1, s.head_dim), values.view(-1, s.head_dim)) for keys, values in cache.layers]
        seen = (slice(n), slice(None), slice(self.length))
        self._cached = [(keys[seen], values[seen]) for keys, values in cache.layers]
        self._flat = [(keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)) for keys, values in self._cached]
        self._grouped_q = self._q.view(n * s.num_kv_heads, -1, s.head_dim)
        group = self._grouped_q.shape[1]
        self._out = self._new(n, s.num_heads * s.head_dim)
        out = self._out.view(n * s.num_kv_heads, group, s.head_dim)
        self._parts: list[_Part] | None = None
        if (sizes := row_parts(self._q, group)) is not None:
            queries, outs = self._grouped_q.split(sizes, 1), out.split(sizes, 1)
            self._parts = [
                _Part(
                    q,
                    self._new(len(q), q.shape[1], self.length),
                    self._new(len(q), q.shape[1], self.length),
                    part if len(sizes) == 1 else self._new(*part.shape),
                    part,
                )
                for q, part in zip(queries, outs, strict=True)
            ]

    def move_to(self, positions_N: NDArray[np.int64], rotations_LD: Tensor) -> None:
        """Move to the positions of the next step, for the mask and for writing keys and values."""
        moved = positions_N - self._at
        positions = torch.from_numpy(positions_N).to(self.shape.device)
        torch.add(self._first_NK, positions[:, None], out=self._where_NK)
        if moved.view(np.uint64).max() <= 1:  # each one stays or advances by one
            self._mask_flat.index_fill_(0, self._where, 0.0)
        else:
            kv_heads, length = self.shape.num_kv_heads, self._mask.shape[2]
            self._mask.copy_(decode_mask(positions, length, self.shape.dtype, kv_heads))
        torch.index_select(rotations_LD, 0, positions, out=self._rotation)
        self._at[:] = positions_N

    def norm(self, x: Tensor, gain_E: Tensor) -> Tensor:
        """RMSNorm of rows [N, E]; `gain_E` in the wide dtype."""
        return self._norms(x, gain_E)

    def write_heads(self, index: int, fused: Tensor, qk_gain: Tensor | None) -> None:
        """Rotate queries and keys of a layer's QKV [N, (H + 2K) D] and write keys and values to the cache."""
        self._fused.copy_(fused)
        if qk_gain is not None:
            normed = functional.rms_norm(self._normed_heads, (self.shape.head_dim,), None, self.shape.eps)
            torch.mul(normed, qk_gain, out=self._normed_heads)
        self._pairs.mul_(self._rotation_N1)
        self._q.copy_(self._wide_q)
        self._kv.copy_(self._wide_kv)
        keys, values = self._rows[index]
        keys.index_copy_(0, self._where, self._new_keys)
        values.index_copy_(0, self._where, self._new_values)

    def attend(self, index: int) -> Tensor:
        """Attention of the last written queries over a layer's cache, [N, H D]."""
        if self._parts is None:
            out = attend_slots(self._grouped_q, *self._cached[index], self._seen, self.shape.scale)
            return out.reshape(self._out.shape)
        keys, values = self._flat[index]
        for part in self._parts:
            attend_rows(part.q, keys, values, self._seen, self.shape.scale, (part.scores, part.weights, part.out))
            if part.out is not part.place:
                part.place.copy_(part.out)
        return self._out

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU of [N, inner] each."""
        _silu(gate, out=self._gated)
        return self._gated.mul_(up)


@dataclass(frozen=True)
class _Part:
    """Queries of one matmul, with buffers for scores, weights and output, and the place of the output."""

    q: Tensor
    scores: Tensor
    weights: Tensor
    out: Tensor
    place: Tensor


class RowNorms:
    """RMSNorm of `n` rows.

    On the CPU, PyTorch's implementation takes nine operations. Normalizing rows takes one, the kernel of weight
    normalization, and equals RMSNorm if a row has one more column of sqrt(E eps).
    """

    def __init__(self, shape: StepShape, n: int) -> None:
        self._width, self._eps = shape.width, shape.eps
        self._is_fused = shape.device.type != "cpu"
        rows = torch.zeros(n, shape.width + NORM_PADDING, dtype=shape.wide, device=shape.device)
        rows[:, shape.width] = (shape.width * shape.eps) ** 0.5
        self._rows, self._inside = rows, rows[:, : shape.width]
        self._length = rows.new_full((n, 1), shape.width**0.5)
        self._product = rows.new_empty(n, shape.width)
        self._result = self._product if shape.dtype == shape.wide else self._product.to(shape.dtype)

    def __call__(self, x: Tensor, gain_E: Tensor) -> Tensor:
        """RMSNorm of `x` [n, E] times `gain_E`; valid until the next call."""
        if self._is_fused:
            return functional.rms_norm(x, (self._width,), gain_E, self._eps)
        self._inside.copy_(x)
        normed = _scaled_to_length(self._rows, self._length, 0)[0].narrow(1, 0, self._width)
        torch.mul(normed, gain_E, out=self._product)
        return self._product if self._result is self._product else self._result.copy_(self._product)
