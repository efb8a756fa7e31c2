"""Pack a micro-batch for Megatron-core: aligned, and split over context-parallel ranks.

T tokens of the micro-batch, R response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from furlong.core.batch import MicroBatch


@dataclass(frozen=True)
class PackedMicroBatch:
    """This rank's part of a micro-batch.

    tokens: [1, T of this rank]. params: offsets of the whole micro-batch, on the host. predict: rows of this rank's
    hidden states that predict response tokens; response: the indices of those among the R tokens. targets_R: all R
    tokens. source: the micro-batch token of each row, -1 for padding.
    """

    tokens: Tensor
    params: PackedSeqParams
    predict: Tensor
    response: Tensor
    targets_R: Tensor
    source: Tensor


def pack(micro: MicroBatch, *, align: int, context: int, context_rank: int) -> PackedMicroBatch:
    """Pad every sequence to a multiple of 2 * context, and each rank's tokens in total to a multiple of `align`."""
    device = micro.tokens_T.device
    cu = micro.cu_seqlens_S1.tolist()
    lengths = [end - start for start, end in pairwise(cu)]
    unit = 2 * context if context > 1 else 1
    padded = [-(-length // unit) * unit for length in lengths]
    total = sum(padded)
    if rest := -total % math.lcm(unit, align * context):
        padded.append(rest)  # a sequence of padding
        lengths.append(0)
    starts = torch.tensor([0, *padded]).cumsum(0)
    offsets = torch.tensor(cu)
    moved = torch.repeat_interleave(starts[: len(cu) - 1] - offsets[:-1], torch.tensor(lengths[: len(cu) - 1]))
    where_T = (torch.arange(cu[-1]) + moved).to(device)
    tokens = micro.tokens_T.new_zeros(int(starts[-1]))
    tokens[where_T] = micro.tokens_T
    source = torch.full_like(tokens, -1)
    source[where_T] = torch.arange(cu[-1], device=device)
    predict_R = where_T[micro.response_pos_R - 1]
    response = torch.arange(len(predict_R), device=device)
    if context > 1:
        rows = _rows_of_rank(starts.tolist(), context, context_rank).to(device)
        place = torch.full((len(tokens),), -1, device=device)
        place[rows] = torch.arange(len(rows), device=device)
        tokens, source = tokens[rows], source[rows]
        response = response[place[predict_R] >= 0]
        predict_R = place[predict_R[response]]
    params = sequence_params(starts.to(torch.int32), max(padded))
    return PackedMicroBatch(tokens[None], params, predict_R, response, micro.tokens_T[micro.response_pos_R], source)


def sequence_params(cu_S1: Tensor, longest: int) -> PackedSeqParams:
    """Return Megatron-core's description of packed sequences; `cu_S1` is on the host."""
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_S1, cu_seqlens_kv=cu_S1, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _rows_of_rank(starts: list[int], context: int, rank: int) -> Tensor:
    """Return the rows of a context-parallel rank: two chunks of every sequence, one from each end."""
    rows: list[Tensor] = []
    for start, end in pairwise(starts):
        size = (end - start) // (2 * context)
        for chunk in (rank, 2 * context - 1 - rank):
            rows.append(torch.arange(start + chunk * size, start + (chunk + 1) * size))
    return torch.cat(rows)
