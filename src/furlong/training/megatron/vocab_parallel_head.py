"""Log-probs and entropies with a vocabulary that is split over tensor-parallel ranks, without the [R, V] logits.

R response tokens, V vocabulary of this rank, D width, C rows of one chunk. Every rank computes the logits of its
vocabulary chunk by chunk; maxima, sums and target logits of all rows are reduced over the ranks once. The backward pass
recomputes the logits. Kernels are those of `algo.logprob_compiled`.
"""

from __future__ import annotations

# torch leaves autograd functions untyped
# pyright: reportIncompatibleMethodOverride=false
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the usual name
from megatron.core import tensor_parallel
from torch import Tensor
from torch.autograd.function import once_differentiable

from furlong.algo.distillation import VocabShard
from furlong.algo.logprob_compiled import Head, accumulator, chunk_grad, head_gradients, kernel_if_large, scaled
from furlong.interfaces import TokenStats

OTHER_RANK = -1  # a target in another rank's vocabulary


def vocab_parallel_token_stats(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    *,
    first_token: int,
    group: Any,
    temperature: float,
    chunk_size: int,
    entropy: bool,
    entropy_grad: bool,
) -> TokenStats:
    """Compute `algo.logprob.token_stats` with a vocabulary-sharded head; this rank's rows start at `first_token`.

    `hidden_RD` is the same on all ranks of `group`; its gradient is this rank's part, to be summed over them. Sums are
    in float32, or float64 for float64 inputs. chunk_size: rows at a time, -1 for all.
    """
    head = Head(temperature, None, chunk_size, entropy or entropy_grad, entropy_grad)
    local_R = targets_R - first_token
    local_R = torch.where((local_R >= 0) & (local_R < len(weight_VD)), local_R, OTHER_RANK)
    log_probs_R, entropy_R = _VocabParallelHead.apply(hidden_RD, weight_VD, local_R, group, head)  # pyright: ignore[reportGeneralTypeIssues]  torch leaves apply untyped
    return TokenStats(log_probs_R, entropy_R if head.entropy else None)


def chunk_sums(logits_CV: Tensor, local_C: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return maxima, sums of exp, target logits, and sums of exp times logits over this rank's vocabulary, each [C].

    exp is of logits minus the maximum. The target logit is 0 if another rank has it; the last sum is 0 unless entropies
    are requested.
    """
    scaled_CV, _ = scaled(logits_CV, head)
    top_C = scaled_CV.amax(-1)
    powers_CV = (scaled_CV - top_C[:, None]).exp()
    is_here_C = local_C != OTHER_RANK
    target_C = scaled_CV.gather(1, local_C.clamp_min(0)[:, None]).squeeze(1)
    weighted_C = (powers_CV * scaled_CV).sum(-1) if head.entropy else torch.zeros_like(top_C)
    return top_C, powers_CV.sum(-1), torch.where(is_here_C, target_C, 0.0), weighted_C


def gathered_logits(hidden_RD: Tensor, weight_VD: Tensor, *, group: Any, temperature: float) -> Tensor:
    """Return all logits divided by the temperature, [R, vocabulary], the same on all ranks of `group`."""
    logits_RV = tensor_parallel.gather_from_tensor_model_parallel_region(hidden_RD @ weight_VD.T, group=group)
    return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)) / temperature


def vocab_shard(num_rows: int, group: Any) -> VocabShard:
    """Return this rank's part of a vocabulary that is split over `group`, for `algo.distillation`."""
    if group.size() == 1:
        return VocabShard()

    def reduced(tensor: Tensor, operation: Any) -> Tensor:
        whole = tensor.clone()
        dist.all_reduce(whole, operation, group=group)
        return whole

    def joined(tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, -1)

    return VocabShard(
        group.rank() * num_rows,
        highest=lambda tensor: reduced(tensor, dist.ReduceOp.MAX),
        total=lambda tensor: reduced(tensor, dist.ReduceOp.SUM),
        joined=joined,
    )


class _VocabParallelHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, weight_VD: Tensor, local_R: Tensor, group: Any, head: Head
    ) -> tuple[Tensor, Tensor]:
        run = kernel_if_large(chunk_sums, head, hidden_RD, weight_VD)
        columns_4R = hidden_RD.new_empty((4, len(hidden_RD)), dtype=accumulator(hidden_RD))
        for rows in head.chunks(len(hidden_RD)):
            columns = run(F.linear(hidden_RD[rows], weight_VD), local_R[rows])
            for whole_R, column_C in zip(columns_4R, columns, strict=True):
                whole_R[rows] = column_C
        local_top_R = columns_4R[0]
        top_R = local_top_R.clone()
        dist.all_reduce(top_R, dist.ReduceOp.MAX, group=group)
        factor_R = (local_top_R - top_R).exp()
        sums_3R = torch.stack([columns_4R[1] * factor_R, columns_4R[2], columns_4R[3] * factor_R])
        dist.all_reduce(sums_3R, group=group)
        lse_R = top_R + sums_3R[0].log()
        entropy_R = lse_R - sums_3R[2] / sums_3R[0]
        ctx.save_for_backward(hidden_RD, weight_VD, local_R, lse_R, entropy_R)
        ctx.head = head
        if not head.entropy_grad:
            ctx.mark_non_differentiable(entropy_R)
        ctx.set_materialize_grads(False)
        return sums_3R[1] - lse_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RD, weight_VD, local_R, lse_R, entropy_R = ctx.saved_tensors
        head: Head = ctx.head
        run = kernel_if_large(chunk_grad, head, hidden_RD, weight_VD)
        columns = (local_R, lse_R, entropy_R.detach() if head.entropy_grad else None, *grads)

        def logits_grad(rows: slice) -> Tensor:
            logits_CV = F.linear(hidden_RD[rows], weight_VD)
            return run(logits_CV, *(None if column is None else column[rows] for column in columns))

        inputs, needed = (hidden_RD, weight_VD, None), (True, True, False)
        return (*head_gradients(head, inputs, needed, logits_grad)[:2], None, None, None)


class GatherTokens(torch.autograd.Function):
    """Gather per-token values of context-parallel ranks on all of them.

    Every rank computes the whole loss from them, so the gradient of its own values needs no sum over ranks.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, index: Tensor, size: int, group: Any) -> Tensor:
        """`local[i]` is the value or row of token `index[i]` of `size`; every token is on exactly one rank."""
        ctx.save_for_backward(index)
        whole = local.new_zeros(size, *local.shape[1:])
        whole[index] = local
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of this rank's tokens."""
        (index,) = ctx.saved_tensors
        return grads[0][index], None, None, None
