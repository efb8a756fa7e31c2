"""The tile sums of `transfer.device_checksum` as a Triton kernel: one launch for many tensors, one program per tile."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportCallIssue=false
# Triton is only installed with torch for CUDA, and its kernels are untyped.

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 512


def add_tile_sums(
    sums: Tensor, rows: Sequence[tuple[int, int, int, int, int]], programs: int, constants: Mapping[str, int]
) -> None:
    """Add the tile sums of the parts in `rows` (see `_Table.rows`) to `sums`, int32 [tiles, 2] on a GPU.

    `programs` is the number of (part, tile) pairs that share words; `constants` are those of the hash.
    """
    pinned = torch.tensor(rows, dtype=torch.int64, pin_memory=True)  # a pageable copy would block
    table = pinned.to(sums.device, non_blocking=True)
    with torch.cuda.device(sums.device):
        _tile_sums[(programs,)](
            table, len(rows), sums, BLOCK=BLOCK_WORDS, num_warps=4, **constants,
        )  # fmt: skip


@triton.jit
def _hashed(
    word, index, STEP: tl.constexpr, SEED: tl.constexpr, TURN: tl.constexpr, FMIX_A: tl.constexpr, FMIX_B: tl.constexpr
):
    place = index * tl.full((), STEP, tl.uint32) + tl.full((), SEED, tl.uint32)
    place = place ^ ((index << TURN) | (index >> (32 - TURN)))
    word = word ^ place
    word = word ^ (word >> 16)
    word = word * tl.full((), FMIX_A, tl.uint32)
    word = word ^ (word >> 13)
    word = word * tl.full((), FMIX_B, tl.uint32)
    return word ^ (word >> 16)


@triton.jit(do_not_specialize=["rows"])
def _tile_sums(
    table, rows, out, TILE: tl.constexpr, BLOCK: tl.constexpr, FMIX_A: tl.constexpr, FMIX_B: tl.constexpr,
    SEED_A: tl.constexpr, SEED_B: tl.constexpr, STEP_A: tl.constexpr, STEP_B: tl.constexpr, TURN_A: tl.constexpr,
    TURN_B: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    part, end = 0, rows  # binary search for the last row whose first program is <= this one
    while end - part > 1:
        middle = (part + end) // 2
        is_later = tl.load(table + middle * 5 + 4) <= program
        part = tl.where(is_later, middle, part)
        end = tl.where(is_later, end, middle)
    address = tl.load(table + part * 5)
    first = tl.load(table + part * 5 + 1)
    last = first + tl.load(table + part * 5 + 2)
    row = tl.load(table + part * 5 + 3)
    tile = first // TILE + program - tl.load(table + part * 5 + 4)
    base = tile * TILE
    # 32 bits suffice within a tile, and halve the work
    start = tl.maximum(first - base, 0).to(tl.int32)
    stop = tl.minimum(last - base, TILE).to(tl.int32)
    words = address.to(tl.pointer_type(tl.int32)) + (base - first)
    index = base.to(tl.uint32)
    sum_a = tl.zeros((BLOCK,), dtype=tl.uint32)
    sum_b = tl.zeros((BLOCK,), dtype=tl.uint32)
    if (start == 0) & (stop == TILE):
        for block in tl.static_range(0, TILE, BLOCK):
            at = block + tl.arange(0, BLOCK)
            word = tl.load(words + at).to(tl.uint32, bitcast=True)
            place = index + at.to(tl.uint32)
            sum_a += _hashed(word, place, STEP_A, SEED_A, TURN_A, FMIX_A, FMIX_B)
            sum_b += _hashed(word, place, STEP_B, SEED_B, TURN_B, FMIX_A, FMIX_B)
    else:
        none = tl.zeros((BLOCK,), dtype=tl.uint32)
        for block in tl.static_range(0, TILE, BLOCK):
            at = block + tl.arange(0, BLOCK)
            inside = (at >= start) & (at < stop)
            word = tl.load(words + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
            place = index + at.to(tl.uint32)
            sum_a += tl.where(inside, _hashed(word, place, STEP_A, SEED_A, TURN_A, FMIX_A, FMIX_B), none)
            sum_b += tl.where(inside, _hashed(word, place, STEP_B, SEED_B, TURN_B, FMIX_A, FMIX_B), none)
    # two parts may share a tile; sums modulo 2^32 do not depend on the order
    tl.atomic_add(out + (row + tile) * 2, tl.sum(sum_a, axis=0).to(tl.int32, bitcast=True))
    tl.atomic_add(out + (row + tile) * 2 + 1, tl.sum(sum_b, axis=0).to(tl.int32, bitcast=True))
