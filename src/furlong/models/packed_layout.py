"""Layout of a packed micro-batch: which tokens run, and their positions in padded attention.

Linear layers work on a flat list of tokens without padding. Attention works on sequences: these are bucketed by length
and padded on the right within a bucket, which causal attention ignores without a mask tensor. Samples of one group
share a prompt, whose hidden states are computed once (`share_prompts`) and copied to each sequence's attention. In that
case the last token of a response, which predicts nothing, is not run either.

Axes: T packed tokens of the micro-batch, U tokens that are run, D of them with several positions, C those positions, P
all positions of the padded buckets, R response tokens, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.batch import MicroBatch, TokenArray
from furlong.models.context_parallel import ContextParallel
from furlong.models.delta_rule import PackedSequences

Index = NDArray[np.int64]

# A sequence shorter than this fraction of its bucket's longest opens the next bucket.
MIN_FILL = 0.75
# Sequences that differ by at most this many tokens share a bucket: another kernel call costs more than the padding.
MAX_SLACK = 16
# Below this fraction of saved tokens, sharing prompts is not worth the copies. Without sharing, layers compile again.
MIN_SHARED_FRAC = {"padded": 0.1, "unpadded": 0.05}


@dataclass(frozen=True)
class PackedLayout:
    """Layout of one micro-batch. Index tensors are on the micro-batch's device.

    predict_R: index into U of the token whose hidden state predicts each response token.
    buckets: (sequences, padded length), consecutive in P.
    cu_seqlens_S1, max_seqlen: offsets of the sequences for variable-length kernels; cu_host_S1: on the CPU.
    run_U, run_host_U: index into T of each token that is run; None if all are, in order.
    spread_P: index into U of the token at each padded position; None if P is U.
    collect_U: index into P of the position that computes each token's output.
    shared_D: index into U of each token with several positions; None without any.
    copies_C, first_copy_D: the positions in P of those tokens, token by token, and the start of each token's positions.
    context: context-parallel group that splits U; num_tokens: U, with context parallelism.
    """

    predict_R: Tensor
    buckets: tuple[tuple[int, int], ...]
    cu_seqlens_S1: Tensor
    cu_host_S1: Tensor
    max_seqlen: int
    run_U: Tensor | None = None
    run_host_U: Tensor | None = None
    spread_P: Tensor | None = None
    collect_U: Tensor | None = None
    shared_D: Tensor | None = None
    copies_C: Tensor | None = None
    first_copy_D: Tensor | None = None
    context: ContextParallel | None = None
    num_tokens: int = 0

    @cached_property
    def sequences(self) -> PackedSequences:
        """The sequences as the delta rule reads them: in U, or in P if U lacks the prompts of some.

        In P, the padding after a sequence belongs to it, which changes nothing before the padding.
        """
        cu_host_S1 = self.cu_host_S1
        if self.run_U is not None and self.buckets:
            widths = torch.tensor([0, *(width for count, width in self.buckets for _ in range(count))])
            cu_host_S1 = widths.cumsum(0).to(cu_host_S1.dtype)
        return PackedSequences.of(cu_host_S1, self.cu_seqlens_S1.device)


def plan_layout(micro: MicroBatch, *, share_prompts: bool = True, padded: bool = True) -> PackedLayout:
    """Plan how `micro` runs.

    padded: bucket sequences for dense attention kernels; otherwise P has the order of T, for a variable-length kernel.
    """
    device = micro.tokens_T.device
    host = micro.host_index()
    cu, response_lengths = host.cu_seqlens_S1, host.response_lengths_S
    cu_host_S1 = torch.from_numpy(cu.astype(np.int32))
    lengths = np.diff(cu)
    owner_T = _token_owner(micro, host.tokens_T, cu, lengths - response_lengths, padded) if share_prompts else None

    if padded and owner_T is not None:
        # The last response token predicts nothing; it is dropped where rows are copied anyway.
        is_last_unread = response_lengths > 0
        owner_T[cu[1:][is_last_unread] - 1] = -1
        lengths = lengths - is_last_unread
    order, buckets = bucket_lengths(lengths) if padded else (np.arange(len(lengths)), ())
    place_P = _padded_positions(cu, lengths, order, buckets) if padded else np.arange(cu[-1])

    layout = PackedLayout(micro.response_pos_R - 1, buckets, micro.cu_seqlens_S1, cu_host_S1, micro.max_seqlen)
    if owner_T is None and np.array_equal(place_P, np.arange(cu[-1])):
        return layout

    if owner_T is None:
        owner_T = np.arange(cu[-1])
    run_U = np.flatnonzero(owner_T == np.arange(cu[-1]))
    index_of_T = np.cumsum(owner_T == np.arange(cu[-1])) - 1
    unique_T = index_of_T[owner_T]

    real_P = np.flatnonzero(place_P >= 0)
    spread_P = np.where(place_P >= 0, unique_T[np.maximum(place_P, 0)], 0)
    is_owner_P = owner_T[place_P[real_P]] == place_P[real_P]
    collect_U = np.empty(len(run_U), dtype=np.int64)
    collect_U[unique_T[place_P[real_P[is_owner_P]]]] = real_P[is_owner_P]
    shared_D, copies_C, first_copy_D = _copies(spread_P[real_P], real_P)

    def put(array: Index) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    layout = replace(layout, spread_P=put(spread_P), collect_U=put(collect_U))
    if not len(shared_D):
        return layout
    return replace(
        layout,
        run_U=put(run_U),
        run_host_U=torch.from_numpy(run_U),
        predict_R=put(unique_T[host.response_pos_R - 1]),
        shared_D=put(shared_D),
        copies_C=put(copies_C),
        first_copy_D=put(first_copy_D),
    )


def _copies(token_N: Index, place_N: Index) -> tuple[Index, Index, Index]:
    """Return the tokens with several positions, these positions token by token, and the start of each token's."""
    times_U = np.bincount(token_N)
    order = np.argsort(token_N, kind="stable")
    copies_C = place_N[order][times_U[token_N[order]] > 1]
    shared_D = np.flatnonzero(times_U > 1)
    return shared_D, copies_C, np.cumsum(times_U[shared_D]) - times_U[shared_D]


def bucket_lengths(lengths: Index) -> tuple[Index, tuple[tuple[int, int], ...]]:
    """Group sequences of similar length; returns their order, and (count, padded length) of each bucket.

    Equal lengths keep their order. Sequences fill at least `MIN_FILL` of the bucket or lack up to `MAX_SLACK` tokens.
    """
    if len(lengths) == 0:
        return np.arange(0), ()
    longest, shortest = int(lengths.max()), int(lengths.min())
    if shortest >= longest * MIN_FILL or longest - shortest <= MAX_SLACK:
        return np.arange(len(lengths)), ((len(lengths), longest),)
    order = np.argsort(-lengths, kind="stable")
    buckets: list[tuple[int, int]] = []
    for length in lengths[order].tolist():
        if buckets and (length >= buckets[-1][1] * MIN_FILL or buckets[-1][1] - length <= MAX_SLACK):
            buckets[-1] = (buckets[-1][0] + 1, buckets[-1][1])
        else:
            buckets.append((1, length))
    return order, tuple(buckets)


def _padded_positions(cu: Index, lengths: Index, order: Index, buckets: tuple[tuple[int, int], ...]) -> Index:
    widths_S = np.repeat([width for _, width in buckets], [count for count, _ in buckets]).astype(np.int64)
    ends_S = np.cumsum(widths_S)
    within_P = np.arange(int(ends_S[-1]) if len(ends_S) else 0) - np.repeat(ends_S - widths_S, widths_S)
    start_P, length_P = np.repeat(cu[:-1][order], widths_S), np.repeat(lengths[order], widths_S)
    return np.where(within_P < length_P, start_P + within_P, -1)


def _token_owner(micro: MicroBatch, tokens_T: TokenArray, cu: Index, prompt_lens: Index, padded: bool) -> Index | None:
    """Return [T] the token that computes each token: itself, or its copy in the first sequence with the same prompt.

    None if it would save too little.
    """
    routes_TLK = None if micro.routed_experts_TLK is None else micro.routed_experts_TLK.numpy()
    first: dict[bytes, int] = {}
    owner_T = np.arange(cu[-1])
    num_saved = 0
    for i, (start, size) in enumerate(zip(cu[:-1].tolist(), prompt_lens.tolist(), strict=True)):
        prompt = tokens_T[start : start + size].tobytes()
        if routes_TLK is not None:  # hidden states are equal only with the same experts
            prompt += routes_TLK[start : start + size].tobytes()
        source = int(cu[first.setdefault(prompt, i)])
        if source != start:
            owner_T[start : start + size] = np.arange(source, source + size)
            num_saved += size
    return owner_T if num_saved >= max(1, MIN_SHARED_FRAC["padded" if padded else "unpadded"] * cu[-1]) else None
