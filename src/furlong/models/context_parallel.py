"""Ulysses context parallelism (arXiv:2309.14509) and the collectives it needs.

Every context-parallel rank has the same micro-batch and runs an equal share of its tokens. Before attention an
all-to-all exchanges tokens for heads, so each rank has all tokens of its share of the heads; afterwards another one
restores all heads of the rank's tokens. Attention kernels and sequence layout are the same as on one rank. Per-token
results of the output layer are gathered, and every rank computes the loss of the whole micro-batch.

Axes: U tokens that are run, L this rank's share of them (padded at the end), H heads of a tensor, h this rank's share
of them, E head width, R response tokens, C ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from furlong.errors import ConfigError
from furlong.models.model_facts import ATTENTION_LAYERS, layer_kinds
from furlong.models.varlen_attention import pad_rows

# torch < 2.13 has only the older name
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]


def all_gather(part: Tensor, group: Any) -> Tensor:
    """Concatenate equally long parts along the first axis, in rank order; any dtype."""
    part = part.contiguous()
    whole = part.new_empty((dist.get_world_size(group) * len(part), *part.shape[1:]))
    _all_gather_single(_as_bytes(whole), _as_bytes(part), group=group)
    return whole


def all_to_all(parts_C: Tensor, group: Any) -> Tensor:
    """Send part c to rank c of a group; returns the received parts in rank order; any dtype."""
    parts_C = parts_C.contiguous()
    received_C = torch.empty_like(parts_C)
    dist.all_to_all_single(_as_bytes(received_C), _as_bytes(parts_C), group=group)
    return received_C


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class _AllToAll(torch.autograd.Function):
    """Differentiable all-to-all, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts_C: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_to_all(parts_C, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grads[0], ctx.group), None


class _GatherRows(torch.autograd.Function):
    """Gather rows that are split over ranks. Every rank has the same loss, so the gradient is a slice."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, own_R: Tensor, where_R: Tensor, size: int, group: Any) -> Tensor:
        ctx.save_for_backward(own_R)
        return all_gather(pad_rows(mine, size), group).index_select(0, where_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (own_R,) = ctx.saved_tensors
        return grads[0].index_select(0, own_R), None, None, None, None


@dataclass(frozen=True)
class ContextParallel:
    """The context-parallel group, from the view of rank `index` of `count`."""

    index: int
    count: int
    group: Any = field(repr=False)

    @staticmethod
    def of(group: Any) -> ContextParallel:
        """Return the context-parallel group of a process group."""
        return ContextParallel(dist.get_rank(group), dist.get_world_size(group), group)

    def check(self, config: Any) -> None:
        """Raise ConfigError for a model that does not support context parallelism of this size."""
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        if heads % self.count or (kv_heads % self.count and self.count % kv_heads):
            raise ConfigError(
                f"--context-parallel-size {self.count} does not fit {heads} attention heads and {kv_heads} key/value "
                "heads: it must divide the first, and be a divisor or a multiple of the second; change it"
            )
        if kinds := layer_kinds(config) - ATTENTION_LAYERS:
            raise ConfigError(
                f"--context-parallel-size {self.count}: the model has {', '.join(sorted(kinds))} layers, which mix "
                "tokens outside of attention; remove the flag"
            )

    def share(self, num_tokens: int) -> int:
        """Return L, the tokens that each rank runs of U."""
        return -(-num_tokens // self.count)

    def local(self, rows_U: Tensor) -> Tensor:
        """Return this rank's rows, padded with zeros: [U, ...] -> [L, ...]."""
        size = self.share(len(rows_U))
        return pad_rows(rows_U[self.index * size : (self.index + 1) * size], size)

    def heads(self, rows_LHE: Tensor, num_tokens: int) -> Tensor:
        """Exchange tokens for heads: [L, H, E] of this rank -> [U, h, E]. Fewer heads than ranks are repeated first."""
        heads = rows_LHE.shape[1]
        if heads < self.count:
            rows_LHE = rows_LHE.repeat_interleave(self.count // heads, dim=1)
        parts_CLhE = rows_LHE.unflatten(1, (self.count, -1)).transpose(0, 1)
        return cast("Tensor", _AllToAll.apply(parts_CLhE, self.group)).flatten(0, 1)[:num_tokens]

    def tokens(self, rows_UhE: Tensor) -> Tensor:
        """Exchange heads for tokens: [U, h, E] -> [L, H, E] of this rank."""
        size = self.share(len(rows_UhE))
        missing = size * self.count - len(rows_UhE)
        if missing:
            rows_UhE = torch.cat([rows_UhE, rows_UhE.new_zeros((missing, *rows_UhE.shape[1:]))])
        parts_CLhE = cast("Tensor", _AllToAll.apply(rows_UhE.unflatten(0, (self.count, size)), self.group))
        return parts_CLhE.transpose(0, 1).flatten(1, 2)

    def local_heads(self, values_H: Tensor) -> Tensor:
        """Return this rank's share of a per-query-head tensor."""
        return values_H.chunk(self.count)[self.index]

    def shard(self, index_R: Tensor, num_tokens: int) -> TokenShard:
        """Return the rank's shard of the given rows of U."""
        size = self.share(num_tokens)
        owner_R = index_R.cpu().numpy() // size
        counts_C = np.bincount(owner_R, minlength=self.count)
        order_R = np.argsort(owner_R, kind="stable")
        within_R = np.empty(len(owner_R), dtype=np.int64)
        starts_C = np.cumsum(counts_C) - counts_C
        within_R[order_R] = np.arange(len(owner_R)) - np.repeat(starts_C, counts_C)
        largest = int(counts_C.max(initial=0))

        def put(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(index_R.device)

        own_R = put(np.flatnonzero(owner_R == self.index))
        return TokenShard(self, own_R, put(owner_R * largest + within_R), largest, self.index * size)


@dataclass(frozen=True)
class TokenShard:
    """A rank's shard of R rows. own_R: indices of its rows; start: index of its first token in U."""

    context: ContextParallel
    own_R: Tensor
    where_R: Tensor
    size: int
    start: int

    def gather(self, mine: Tensor) -> Tensor:
        """Gather the rows of all ranks: [len(own_R), ...] -> [R, ...]."""
        return cast("Tensor", _GatherRows.apply(mine, self.own_R, self.where_R, self.size, self.context.group))
