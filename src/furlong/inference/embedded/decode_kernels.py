"""Decode steps on CUDA as Triton kernels: rotation and cache writes, attention over the slot cache, SwiGLU.

A program reads the rows of one slot only and loops over its positions in blocks of fixed size, so its result depends
neither on other slots nor on the length of the cache. Positions are read on the device, so a step can be a CUDA graph.
Axes: N decoding slots, S slots of the cache, H query heads, K key/value heads, D head width, L cached positions.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportCallIssue=false
# Triton is only installed with torch for CUDA, and its kernels are untyped.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_POSITIONS = 64
BLOCK_COLUMNS = 1024
MIN_DOT = 16  # rows of the smallest tl.dot


def write_heads(
    fused_NF: Tensor, gains: Tensor | None, rotations_LD: Tensor, positions_N: Tensor, keys: Tensor, values: Tensor,
    eps: float, into: Tensor,
) -> None:  # fmt: skip
    """Normalize and rotate queries and keys, and write keys and values at each slot's position.

    `fused_NF` has the rows (H + 2K) D of the QKV projection in checkpoint order. Queries go to `into` [N, H, D] and
    keys to `keys` [S, K, L, D], both in pair order, values to `values`. `gains` [H + K, D] are in pair order and
    float32, `rotations_LD` is complex64.
    """
    n, num_heads, width = into.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    rotations = torch.view_as_real(rotations_LD)
    _write_heads[(n, num_heads + 2 * kv_heads)](
        fused_NF, rotations if gains is None else gains, rotations, positions_N, into, keys, values, length, eps,
        H=num_heads, K=kv_heads, D=width, HALF=triton.next_power_of_2(width // 2), HAS_GAIN=gains is not None,
        num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length"])
def _write_heads(
    fused, gains, rotations, positions, queries, keys, values, length, eps, H: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HAS_GAIN: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HALF)
    inside = i < D // 2
    row = fused + (slot * (H + 2 * K) + head) * D
    first = tl.load(row + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row + D // 2 + i, mask=inside, other=0.0).to(tl.float32)
    position = tl.load(positions + slot).to(tl.int64)
    if head < H + K:
        if HAS_GAIN:
            scale = 1.0 / tl.sqrt((tl.sum(first * first) + tl.sum(second * second)) / D + eps)
            gain = gains + head * D + 2 * i
            first = first * scale * tl.load(gain, mask=inside, other=0.0)
            second = second * scale * tl.load(gain + 1, mask=inside, other=0.0)
        rotation = rotations + position * D + 2 * i
        cos = tl.load(rotation, mask=inside, other=0.0)
        sin = tl.load(rotation + 1, mask=inside, other=0.0)
        real = first * cos - second * sin
        imaginary = first * sin + second * cos
        if head < H:
            out = queries + (slot * H + head) * D + 2 * i
        else:
            out = keys + ((slot * K + head - H) * length + position) * D + 2 * i
        tl.store(out, real.to(out.dtype.element_ty), mask=inside)
        tl.store(out + 1, imaginary.to(out.dtype.element_ty), mask=inside)
    else:
        out = values + ((slot * K + head - H - K) * length + position) * D + i
        tl.store(out, first.to(out.dtype.element_ty), mask=inside)
        tl.store(out + D // 2, second.to(out.dtype.element_ty), mask=inside)


def attend(queries: Tensor, keys: Tensor, values: Tensor, positions_N: Tensor, scale: float, into: Tensor) -> None:
    """Attention of `queries` [N, H, D] over the positions of `keys`, `values` [S, K, L, D] up to each slot's own.

    The result goes to `into` [N, H D]. Scores and sums are float32.
    """
    n, num_heads, width = queries.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    group = num_heads // kv_heads
    _attend[(n, kv_heads)](
        queries, keys, values, positions_N, into, length, scale,
        K=kv_heads, G=group, G_ROWS=max(MIN_DOT, triton.next_power_of_2(group)), D=width,
        D_COLUMNS=max(MIN_DOT, triton.next_power_of_2(width)), BLOCK=BLOCK_POSITIONS,
        num_warps=4, num_stages=3 if queries.dtype.itemsize == 2 else 1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length"])
def _attend(
    queries, keys, values, positions, out, length, scale, K: tl.constexpr, G: tl.constexpr, G_ROWS: tl.constexpr,
    D: tl.constexpr, D_COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d, block = tl.arange(0, G_ROWS), tl.arange(0, D_COLUMNS), tl.arange(0, BLOCK)
    rows = (slot * K * G + head * G + g)[:, None] * D + d[None, :]
    is_query = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(queries + rows, mask=is_query, other=0.0)
    count = tl.load(positions + slot) + 1
    start = (slot * K + head) * length * D
    peak = tl.full((G_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((G_ROWS,), tl.float32)
    mixed = tl.zeros((G_ROWS, D_COLUMNS), tl.float32)
    for at in range(0, count, BLOCK):
        seen = at + block < count
        cells = start + (at + block)[:, None] * D + d[None, :]
        is_cell = seen[:, None] & (d < D)[None, :]
        k = tl.load(keys + cells, mask=is_cell, other=0.0)
        v = tl.load(values + cells, mask=is_cell, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - new_peak[:, None])
        shrink = tl.exp(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak
    mixed = mixed / total[:, None]
    tl.store(out + rows, mixed.to(out.dtype.element_ty), mask=is_query)


def gate(fused_NI: Tensor, into: Tensor) -> None:
    """Write silu(gate) * up to `into` [N, I], where `fused_NI` is [N, 2 I], gates first; rounded once."""
    n, inner = into.shape
    _gate[(n, triton.cdiv(inner, BLOCK_COLUMNS))](fused_NI, into, I=inner, BLOCK=BLOCK_COLUMNS, num_warps=4)


@triton.jit
def _gate(fused, out, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < I
    opened = tl.load(fused + row * 2 * I + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + row * 2 * I + I + columns, mask=inside, other=0.0).to(tl.float32)
    silu = (opened / (1.0 + tl.exp(-opened))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * I + columns, (silu * up).to(out.dtype.element_ty), mask=inside)
