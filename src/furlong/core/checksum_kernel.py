"""`core.device_checksum`'s tile sums as a Triton kernel: one launch for many tensors, a program for each tile."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false
# Triton comes with torch for CUDA only, and its kernels carry no types.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from furlong.core.device_checksum import FMIX, SEEDS, STEPS, TILE_WORDS, TURNS

BLOCK_WORDS = 1024


def add_tile_sums(sums: Tensor, rows: Sequence[tuple[int, int, int, int, int]]) -> None:
    """Add to int32 [tiles, 2] on a GPU the sums of parts of tensors there, which `_Table.rows` describes."""
    device = sums.device
    table = torch.tensor(rows, dtype=torch.int64).pin_memory().to(device, non_blocking=True)  # waits for nothing
    programs = sum(row[4] for row in rows)
    with torch.cuda.device(device):
        owner = torch.repeat_interleave(torch.arange(len(rows), device=device), table[:, 4], output_size=programs)
        begins = table[:, 4].cumsum(0) - table[:, 4]
        _tile_sums[(programs,)](
            table, owner, begins, sums,
            TILE=TILE_WORDS, BLOCK=BLOCK_WORDS, FMIX_A=FMIX[0], FMIX_B=FMIX[1], SEED_A=SEEDS[0], SEED_B=SEEDS[1],
            STEP_A=STEPS[0], STEP_B=STEPS[1], TURN_A=TURNS[0], TURN_B=TURNS[1], num_warps=4,
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


@triton.jit
def _tile_sums(
    table, owner, begins, out, TILE: tl.constexpr, BLOCK: tl.constexpr, FMIX_A: tl.constexpr, FMIX_B: tl.constexpr,
    SEED_A: tl.constexpr, SEED_B: tl.constexpr, STEP_A: tl.constexpr, STEP_B: tl.constexpr, TURN_A: tl.constexpr,
    TURN_B: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    part = tl.load(owner + program)
    address = tl.load(table + part * 5)
    first = tl.load(table + part * 5 + 1)
    end = first + tl.load(table + part * 5 + 2)
    row = tl.load(table + part * 5 + 3)
    tile = first // TILE + program - tl.load(begins + part)
    words = address.to(tl.pointer_type(tl.int32))
    sum_a = tl.zeros((BLOCK,), dtype=tl.uint32)
    sum_b = tl.zeros((BLOCK,), dtype=tl.uint32)
    none = tl.zeros((BLOCK,), dtype=tl.uint32)
    for start in tl.static_range(0, TILE, BLOCK):
        at = tile * TILE + start + tl.arange(0, BLOCK)
        inside = (at >= first) & (at < end)
        word = tl.load(words + (at - first), mask=inside, other=0).to(tl.uint32)
        index = at.to(tl.uint32)
        sum_a += tl.where(inside, _hashed(word, index, STEP_A, SEED_A, TURN_A, FMIX_A, FMIX_B), none)
        sum_b += tl.where(inside, _hashed(word, index, STEP_B, SEED_B, TURN_B, FMIX_A, FMIX_B), none)
    # two parts may have words of one tile, in any order: sums modulo 2^32 are the same
    tl.atomic_add(out + (row + tile) * 2, tl.sum(sum_a, axis=0).to(tl.int32))
    tl.atomic_add(out + (row + tile) * 2 + 1, tl.sum(sum_b, axis=0).to(tl.int32))
