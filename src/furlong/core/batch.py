"""One rollout as columns, and the packed micro-batches that a trainer runs.

Axes: N samples of a rollout, S sequences of a micro-batch, T packed tokens, R packed response tokens, L layers, K
experts per token. The sequences of a batch are concatenated without padding; `starts[i]:starts[i+1]` bounds sequence i.
Everything that a loss uses is on axis R: the response tokens of all sequences, one after the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.metric import Metric, Metrics
from furlong.core.routing import Routes
from furlong.errors import DataError

IntArray = NDArray[np.int64]
TokenArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
MaskArray = NDArray[np.uint8]
Costs = NDArray[np.float64]


@dataclass(frozen=True)
class RolloutBatch:
    """One rollout, ready to train on. A column is present for all samples or for none.

    tokens [sum of lengths]: prompt + response of each sample; lengths [N]; response_lengths [N].
    loss_masks [sum of response lengths]: 1 for trained tokens.
    rewards [N]: after group normalization, the input of advantages; raw_rewards [N]: before.
    group_ids [N]: the prompt; rollout_ids [N]: shared by samples fanned out from one completion.
    sample_ids [N]: the sample (may be shared by fanned-out samples); truncated [N]: 1 if the response hit a length
    limit.
    columns: per response token, any of `rollout_log_probs`, `teacher_log_probs`, `token_versions`, or a custom name.
    metadata: `train_metadata` of each sample, or None.
    routed_experts int16 [sum of lengths, layers, experts per token]: the engine's routing of each token, -1 if unknown;
    or None (see `core.routing`).
    """

    rollout_id: int
    tokens: TokenArray
    lengths: IntArray
    response_lengths: IntArray
    loss_masks: MaskArray
    rewards: FloatArray
    raw_rewards: FloatArray
    group_ids: IntArray
    rollout_ids: IntArray
    sample_ids: IntArray
    truncated: MaskArray
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    metadata: Sequence[dict[str, Any] | None] | None = None
    metrics: Metrics = field(default_factory=dict[str, Metric])
    routed_experts: Routes | None = None

    def __post_init__(self) -> None:
        n, num_tokens, num_response = len(self.lengths), int(self.lengths.sum()), int(self.response_lengths.sum())
        expected = {"tokens": num_tokens, "loss_masks": num_response}
        expected |= dict.fromkeys(
            ("response_lengths", "rewards", "raw_rewards", "group_ids", "rollout_ids", "sample_ids", "truncated"), n
        )
        for name, size in expected.items():
            if len(getattr(self, name)) != size:
                raise DataError(
                    f"rollout {self.rollout_id}: column {name} has {len(getattr(self, name))} entries, expected {size}"
                )
        for name, column in self.columns.items():
            if len(column) != num_response:
                raise DataError(
                    f"rollout {self.rollout_id}: per-token column {name} has {len(column)} entries, "
                    f"expected one per response token, {num_response}"
                )
        if self.routed_experts is not None and len(self.routed_experts) != num_tokens:
            raise DataError(
                f"rollout {self.rollout_id}: routed_experts has {len(self.routed_experts)} rows, expected one per "
                f"token, {num_tokens}"
            )
        if self.metadata is not None and len(self.metadata) != n:
            raise DataError(f"rollout {self.rollout_id}: metadata has {len(self.metadata)} entries, expected {n}")
        if n and ((self.response_lengths < 0).any() or (self.lengths <= self.response_lengths).any()):
            bad = int(np.flatnonzero((self.response_lengths < 0) | (self.lengths <= self.response_lengths))[0])
            raise DataError(
                f"rollout {self.rollout_id}: sample {int(self.sample_ids[bad])} has {int(self.lengths[bad])} tokens, "
                f"{int(self.response_lengths[bad])} of them response; a prompt needs at least one token"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> IntArray:
        """[N+1] offsets of the sequences in `tokens`."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def response_starts(self) -> IntArray:
        """[N+1] offsets of the responses in `loss_masks` and the per-token columns."""
        return np.concatenate([[0], np.cumsum(self.response_lengths)])

    def response_positions(self, rows: IntArray) -> IntArray:
        """Return the indices of the response tokens of `rows` in the per-token columns, one sample after the other."""
        return _gather_index(self.response_starts, rows)

    def with_columns(self, **columns: NDArray[Any]) -> RolloutBatch:
        """Return a batch with these per-token columns added."""
        return dataclasses.replace(self, columns={**self.columns, **columns})

    def select(self, rows: Sequence[int] | IntArray) -> RolloutBatch:
        """Return a batch of the given samples, in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        tok = _gather_index(self.starts, rows)
        res = _gather_index(self.response_starts, rows)
        return dataclasses.replace(
            self,
            tokens=self.tokens[tok],
            loss_masks=self.loss_masks[res],
            columns={k: v[res] for k, v in self.columns.items()},
            metadata=None if self.metadata is None else [self.metadata[int(i)] for i in rows],
            routed_experts=None if self.routed_experts is None else self.routed_experts[tok],
            **{
                k: getattr(self, k)[rows]
                for k in (
                    "lengths",
                    "response_lengths",
                    "rewards",
                    "raw_rewards",
                    "group_ids",
                    "rollout_ids",
                    "sample_ids",
                    "truncated",
                )
            },
        )


def _gather_index(starts: IntArray, rows: IntArray) -> IntArray:
    sizes = starts[rows + 1] - starts[rows]
    ends = np.cumsum(sizes)
    return np.arange(int(sizes.sum())) + np.repeat(starts[rows] - (ends - sizes), sizes)


@dataclass(frozen=True)
class HostIndex:
    """The indices of a micro-batch on the host, which layouts are planned from without waiting for the device."""

    tokens_T: TokenArray
    cu_seqlens_S1: IntArray
    response_lengths_S: IntArray
    response_pos_R: IntArray


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed without padding, as tensors on the training device.

    tokens_T, position_ids_T (restart at 0 in every sequence), cu_seqlens_S1 int32 [S+1], max_seqlen.
    response_pos_R: index into T of each response token (its logits are at index - 1).
    seq_of_R: the sequence, 0..S-1; mask_R float32: 1 for trained tokens.
    weight_R float32: mask over the global denominator. A loss is `(per_token_R * weight_R).sum()`, so losses of
    micro-batches and ranks add up to the loss of the step (see algo.reduce).
    columns: float32 [R] each, e.g. `old_log_probs`, `ref_log_probs`, `rollout_log_probs`, `advantages`; [R, K] for the
    tokens that a teacher scored, `teacher_top_ids` and `teacher_top_log_probs`.
    rows [S]: the samples of the batch.
    routed_experts_TLK: int16 on the host, the engine's routing of each token in each layer, -1 if unknown.
    policy_routes: the routing of this rank's tokens in an earlier pass, in the backend's format.
    teacher_hidden_RD: the input of the teacher's head, on the host, if the loss compares the whole vocabulary.
    step_tokens, step_samples: totals of the optimizer step over all ranks; 0 if unknown.
    host: what `host_index` returns, if it was kept.
    """

    tokens_T: Tensor
    position_ids_T: Tensor
    cu_seqlens_S1: Tensor
    max_seqlen: int
    response_pos_R: Tensor
    seq_of_R: Tensor
    mask_R: Tensor
    weight_R: Tensor
    rows: IntArray
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    routed_experts_TLK: Tensor | None = None
    policy_routes: Tensor | None = None
    teacher_hidden_RD: Tensor | None = None
    step_tokens: int = 0
    step_samples: int = 0
    host: HostIndex | None = None

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.cu_seqlens_S1) - 1

    def host_index(self) -> HostIndex:
        """Return the indices on the host. Waits for the device only if they were not kept when packing."""
        if self.host is not None:
            return self.host
        seq_of_R = self.seq_of_R.cpu().numpy()
        return HostIndex(
            tokens_T=self.tokens_T.cpu().numpy(),
            cu_seqlens_S1=self.cu_seqlens_S1.cpu().numpy().astype(np.int64),
            response_lengths_S=np.bincount(seq_of_R, minlength=self.num_sequences),
            response_pos_R=self.response_pos_R.cpu().numpy(),
        )

    def with_columns(self, **columns: Tensor) -> MicroBatch:
        """Return a micro-batch with these per-response-token columns added."""
        return dataclasses.replace(self, columns={**self.columns, **columns})


def pack_micro_batch(
    batch: RolloutBatch,
    rows: Sequence[int] | IntArray,
    weights: FloatArray | None = None,
    *,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pack the given samples of `batch`. `weights` [response tokens of `batch`] become `weight_R`; None gives zeros."""
    rows = np.asarray(rows, dtype=np.int64)
    tok, res = _gather_index(batch.starts, rows), _gather_index(batch.response_starts, rows)
    lengths, response_lengths = batch.lengths[rows], batch.response_lengths[rows]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    seq_of_R = np.repeat(np.arange(len(rows)), response_lengths)
    within_R = np.arange(len(res)) - np.repeat(np.cumsum(response_lengths) - response_lengths, response_lengths)
    response_pos_R = (cu[1:] - response_lengths)[seq_of_R] + within_R
    tokens_T = batch.tokens[tok]

    def put(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype, non_blocking=True)

    return MicroBatch(
        tokens_T=put(tokens_T, torch.int64),
        position_ids_T=put(np.arange(len(tok)) - np.repeat(cu[:-1], lengths), torch.int64),
        cu_seqlens_S1=put(cu, torch.int32),
        max_seqlen=int(lengths.max()) if len(rows) else 0,
        response_pos_R=put(response_pos_R, torch.int64),
        seq_of_R=put(seq_of_R, torch.int64),
        mask_R=put(batch.loss_masks[res], torch.float32),
        weight_R=put(weights[res] if weights is not None else np.zeros(len(res)), torch.float32),
        rows=rows,
        columns={name: put(column[res], torch.float32) for name, column in batch.columns.items()},
        routed_experts_TLK=None if batch.routed_experts is None else torch.from_numpy(batch.routed_experts[tok]),
        host=HostIndex(tokens_T, cu, response_lengths, response_pos_R),
    )


def sum_rows(values_N: Tensor, row_of_N: Tensor, num_rows: int) -> Tensor:
    """Sum `values_N` [N, ...] by row index, deterministically: [num_rows, ...].

    On a GPU `index_add_` adds in an arbitrary order, so `sorted_sums` is used there.
    """
    if num_rows == 1:
        return values_N.sum(0, keepdim=True)
    if values_N.is_cuda:
        return sorted_sums(values_N, row_of_N, num_rows)
    return values_N.new_zeros((num_rows, *values_N.shape[1:])).index_add_(0, row_of_N, values_N)


def sorted_sums(values_N: Tensor, row_of_N: Tensor, num_rows: int) -> Tensor:
    """Compute `sum_rows` as an embedding gradient, whose kernel sorts by row before it sums."""
    shape = values_N.shape[1:]
    values_NW = values_N.reshape(len(values_N), math.prod(shape))
    return torch.ops.aten.embedding_dense_backward(values_NW, row_of_N, num_rows, -1, False).reshape(num_rows, *shape)


@dataclass(frozen=True)
class FlopsModel:
    """Forward FLOPs of a sequence of L tokens: per_token * L + per_pair * L^2.

    For a dense decoder per_token is about 2 * (parameters without embeddings) + 2 * D * V, and per_pair about
    2 * layers * heads * head_dim (causal attention). windows: layers with sliding-window attention, as (window W, their
    per_pair without the window); for L > W they count W * (2 L - W) instead of L^2.
    """

    per_token: float
    per_pair: float
    windows: tuple[tuple[int, float], ...] = ()

    def cost(self, lengths: IntArray) -> Costs:
        """Return the FLOPs of each sequence."""
        lengths_f = lengths.astype(np.float64)
        flops = self.per_token * lengths_f + self.per_pair * lengths_f**2
        for window, per_pair in self.windows:
            visible = np.minimum(lengths_f, window)
            flops = flops + per_pair * visible * (2 * lengths_f - visible)
        return flops
