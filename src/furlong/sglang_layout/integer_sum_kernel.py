"""The sums of `quantized_loading.integer_sums` as a Triton kernel: one launch for many tensors."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false, reportCallIssue=false
# Triton is only installed with torch for CUDA, and its kernels are untyped.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_BYTES = 4
CHUNK_WORDS = 16384  # of a program
BLOCK_WORDS = 1024


def can_sum(tensor: Tensor) -> bool:
    """Whether the kernel can read a tensor: contiguous, in whole aligned words, of elements that are not larger."""
    is_whole = tensor.nbytes % WORD_BYTES == 0 and tensor.data_ptr() % WORD_BYTES == 0
    return is_whole and tensor.is_contiguous() and tensor.itemsize <= WORD_BYTES


def add_sums(sums: Tensor, tensors: Sequence[Tensor], places: Sequence[int]) -> None:
    """Add the sum of each tensor to `sums`, int64, at its place. All are on one GPU, with elements of one size."""
    rows: list[tuple[int, int, int, int]] = []  # address, words, programs of earlier tensors, place
    programs = 0
    for tensor, place in zip(tensors, places, strict=True):
        words = tensor.nbytes // WORD_BYTES
        rows.append((tensor.data_ptr(), words, programs, place))
        programs += -(-words // CHUNK_WORDS)
    if not programs:
        return
    pinned = torch.tensor(rows, dtype=torch.int64, pin_memory=True)  # a pageable copy would block
    table = pinned.to(sums.device, non_blocking=True)
    with torch.cuda.device(sums.device):
        _sums[(programs,)](
            table, len(rows), sums, SIZE=tensors[0].itemsize, CHUNK=CHUNK_WORDS, BLOCK=BLOCK_WORDS, num_warps=4
        )


@triton.jit(do_not_specialize=["rows"])
def _sums(table, rows, out, SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    part, end = 0, rows  # binary search for the last row whose first program is <= this one
    while end - part > 1:
        middle = (part + end) // 2
        is_later = tl.load(table + middle * 4 + 2) <= program
        part = tl.where(is_later, middle, part)
        end = tl.where(is_later, end, middle)
    words = tl.load(table + part * 4).to(tl.pointer_type(tl.int32))
    count = tl.load(table + part * 4 + 1)
    first = (program - tl.load(table + part * 4 + 2)) * CHUNK
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in tl.static_range(0, CHUNK, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        word = tl.load(words + at, mask=at < count, other=0)
        if SIZE == 1:  # four integers with sign
            word = ((word << 24) >> 24) + ((word << 16) >> 24) + ((word << 8) >> 24) + (word >> 24)
        if SIZE == 2:
            word = ((word << 16) >> 16) + (word >> 16)
        total += word.to(tl.int64)
    tl.atomic_add(out + tl.load(table + part * 4 + 3), tl.sum(total, axis=0))
