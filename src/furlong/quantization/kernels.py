"""FP8 in blocks and INT4 in groups as Triton kernels, which read a weight once and write its parts.

The results are those of the torch operations on a CPU, bit for bit. On a GPU, torch divides by a constant with its
reciprocal, so its own results differ in the last bit of some scales.
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

GROUPS = 64  # of a program
HALVES = 1.5 * 2**23  # float32 values near it are integers


def fp8_blocks(
    weight: Tensor, block: tuple[int, int], *, smallest: float, largest: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values in E4M3, float32 scales and largest magnitudes of the blocks of a contiguous weight."""
    rows, columns = weight.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    values = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(grid, dtype=torch.float32, device=weight.device)
    magnitudes = torch.empty_like(scales)
    with torch.cuda.device(weight.device):
        _fp8_block[grid](
            weight, values, scales, magnitudes, rows, columns, smallest, largest,
            HEIGHT=block[0], WIDTH=block[1], num_warps=8,
        )  # fmt: skip
    return values, scales, magnitudes


def int4_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return packed values, int32 [rows, columns / 8], and scales [rows, groups] of a contiguous weight."""
    rows, columns = weight.shape
    words = torch.empty((rows, columns // 8), dtype=torch.int32, device=weight.device)
    scales = torch.empty((rows, columns // group_size), dtype=weight.dtype, device=weight.device)
    eps = torch.finfo(weight.dtype).eps
    with torch.cuda.device(weight.device):
        _int4_groups[(triton.cdiv(scales.numel(), GROUPS),)](
            weight, words, scales, scales.numel(), eps, ROUNDS=HALVES, GROUPS=GROUPS, SIZE=group_size, num_warps=4
        )
    return words, scales


@triton.jit
def _fp8_block(
    weight, values, scales, magnitudes, rows, columns, smallest, largest, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    has_nan = tl.max(tl.max((value != value).to(tl.int32), axis=1), axis=0)
    magnitude = tl.max(tl.max(tl.abs(value), axis=1), axis=0)
    magnitude = tl.where(has_nan > 0, float("nan"), magnitude)
    scale = tl.math.div_rn(tl.maximum(magnitude, smallest), largest)
    quotient = tl.math.div_rn(value, tl.zeros_like(value) + scale)
    quotient = tl.minimum(tl.maximum(quotient, -largest), largest)
    tl.store(values + at, quotient.to(tl.float8e4nv), mask=inside)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scales + place, scale)
    tl.store(magnitudes + place, magnitude)


@triton.jit
def _int4_groups(weight, words, scales, count, eps, ROUNDS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = group < count
    at = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    value = tl.load(weight + at, mask=inside[:, None], other=0.0)
    kind = value.dtype
    value = value.to(tl.float32)
    has_nan = tl.max((value != value).to(tl.int32), axis=1)
    magnitude = tl.max(tl.abs(value), axis=1)
    scale = tl.math.div_rn(magnitude, tl.zeros_like(magnitude) + 7.5).to(kind).to(tl.float32)
    scale = tl.where(scale == 0.0, eps, scale)
    scale = tl.where(has_nan > 0, float("nan"), scale)
    tl.store(scales + group, scale.to(kind), mask=inside)
    quotient = tl.math.div_rn(value, tl.zeros_like(value) + scale[:, None]).to(kind).to(tl.float32)
    quotient = tl.minimum(tl.maximum(quotient, -8.0), 7.0)
    nibble = ((quotient + ROUNDS) - ROUNDS).to(tl.int32) + 8  # to the nearest integer, ties to even
    nibble = tl.reshape(nibble, (GROUPS * SIZE // 8, 8)) << (4 * tl.arange(0, 8))[None, :]
    word = tl.program_id(0).to(tl.int64) * (GROUPS * SIZE // 8) + tl.arange(0, GROUPS * SIZE // 8)
    tl.store(words + word, tl.sum(nibble, axis=1), mask=word < count.to(tl.int64) * (SIZE // 8))
