"""Distillation of a teacher on the policy's own samples: the reverse KL, as a penalty of advantages and as a loss.

Policy p, teacher q, both at the temperature of the rollout. Only the KL of the next token is minimized, as in Tinker
with a discount of 0: what a token changes for later ones is left out.

| --opd-loss | value | gradient |
|---|---|---|
| sampled | log p(y) - log q(y) of the sampled token y | that of the policy loss, with the negative value as advantage |
| topk | sum over the policy's k likeliest tokens of p (log p - log q) - p + q (arXiv:2606.30406 eq. 5) | through p |
| full | sum over the vocabulary of p (log p - log q) | through p |

R response tokens, V vocabulary (of this rank, if it is split), D width, K tokens per position, M = 1 + K targets, C
rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor
from torch.autograd.function import once_differentiable

from furlong.algo.logprob_compiled import Head, accumulator, head_gradients, kernel_if_large, scaled

ELSEWHERE = -1  # a token of another rank's vocabulary


def reverse_kl(log_probs_R: Tensor, teacher_log_probs_R: Tensor, kept_R: Tensor) -> Tensor:
    """Return log p - log q of the sampled tokens where `kept_R`, 0 elsewhere, [R]."""
    return torch.where(kept_R, log_probs_R - teacher_log_probs_R, 0.0)


def top_k_kl(log_probs_RK: Tensor, teacher_log_probs_RK: Tensor, kept_R: Tensor) -> Tensor:
    """Return the generalized KL over K tokens where `kept_R`, 0 elsewhere, [R]; never negative.

    Its gradient is that of the full KL without the other tokens. The part that a teacher excludes (log q of -inf) is an
    infinite loss.
    """
    log_p_RK = torch.where(kept_R[:, None], log_probs_RK, 0.0)
    log_q_RK = torch.where(kept_R[:, None], teacher_log_probs_RK, 0.0)
    p_RK = log_p_RK.exp()
    return (p_RK * (log_p_RK - log_q_RK) - p_RK + log_q_RK.exp()).sum(-1)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of heads whose vocabulary is split over ranks; by default the whole vocabulary.

    first_token: the id of the first row. highest, total, joined: elementwise maximum and sum over the ranks, and
    concatenation along the last axis.
    """

    first_token: int = 0
    highest: Callable[[Tensor], Tensor] = _itself
    total: Callable[[Tensor], Tensor] = _itself
    joined: Callable[[Tensor], Tensor] = _itself


@dataclass(frozen=True)
class TeacherHead:
    """The teacher's output layer and its hidden states of the same response tokens; the soft cap is the policy's."""

    hidden_RD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None = None

    def logits(self, rows: slice) -> Tensor:
        """Return the logits of one chunk, [C, V]."""
        return F.linear(self.hidden_RD[rows], self.weight_VD, self.bias_V)


@dataclass(frozen=True)
class TargetStats:
    """log-probs [R, M] of the targets; entropies and KL to the teacher [R], and the K likeliest tokens, if asked."""

    log_probs_RM: Tensor
    entropy_R: Tensor | None
    kl_R: Tensor | None
    top_ids_RK: Tensor | None


def target_stats(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    targets_RM: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    entropy: bool,
    entropy_grad: bool,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    teacher: TeacherHead | None = None,
    top_k: int = 0,
    shard: VocabShard | None = None,
) -> TargetStats:
    """Compute `logprob.token_stats` for M tokens per position, and the full KL to a teacher, chunk by chunk.

    The tokens of a position are different, except for the first one. With a shard, `hidden_RD` is the same on all its
    ranks, and its gradient is this rank's part. Logits exist for `chunk_size` rows at a time and are recomputed in the
    backward pass.
    """
    head = Head(temperature, softcap, chunk_size, entropy or entropy_grad, entropy_grad)
    shard = shard or VocabShard()
    local_RM = targets_RM - shard.first_token
    local_RM = torch.where((local_RM >= 0) & (local_RM < len(weight_VD)), local_RM, ELSEWHERE)
    outputs: Any = _TargetHead.apply(hidden_RD, weight_VD, bias_V, local_RM, teacher, top_k, head, shard)  # pyright: ignore[reportGeneralTypeIssues]  torch leaves apply untyped
    log_probs_RM, entropy_R, kl_R, top_ids_RK = outputs
    return TargetStats(
        log_probs_RM, entropy_R if head.entropy else None, kl_R if teacher else None, top_ids_RK if top_k else None
    )


def chunk_sums(
    logits_CV: Tensor, teacher_CV: Tensor | None, local_CM: Tensor, head: Head
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return maxima [C], sums [C, 3], the targets' logits [C, M], and the teacher's maxima and sums of exp [C].

    The sums over this rank's vocabulary are of exp, of exp * z, and of exp * (z - the teacher's z), where exp is of
    logits z minus their maximum; 0 if not needed. A target logit is 0 if another rank has it.
    """
    z_CV, _ = scaled(logits_CV, head)
    top_C = z_CV.amax(-1)
    powers_CV = (z_CV - top_C[:, None]).exp()
    targets_CM = torch.where(local_CM == ELSEWHERE, 0.0, z_CV.gather(1, local_CM.clamp_min(0)))
    zero_C = torch.zeros_like(top_C)
    weighted_C = (powers_CV * z_CV).sum(-1) if head.entropy else zero_C
    moved_C = teacher_top_C = teacher_sum_C = zero_C
    if teacher_CV is not None:
        t_CV, _ = scaled(teacher_CV, head)
        moved_C = (powers_CV * (z_CV - t_CV)).sum(-1)
        teacher_top_C = t_CV.amax(-1)
        teacher_sum_C = (t_CV - teacher_top_C[:, None]).exp().sum(-1)
    return top_C, torch.stack([powers_CV.sum(-1), weighted_C, moved_C], -1), targets_CM, teacher_top_C, teacher_sum_C


def chunk_grad(
    logits_CV: Tensor,
    teacher_CV: Tensor | None,
    local_CM: Tensor,
    lse_C: Tensor,
    teacher_lse_C: Tensor,
    entropy_C: Tensor,
    kl_C: Tensor,
    grad_targets_CM: Tensor | None,
    grad_entropy_C: Tensor | None,
    grad_kl_C: Tensor | None,
    head: Head,
) -> Tensor:
    """Return the gradient w.r.t. the logits [C, V], in their dtype.

    For z = logits / temperature: d log p_i / dz = onehot_i - p; dH / dz = -p (log p + H); dKL / dz = p (log p - log q -
    KL).
    """
    z_CV, tanh_CV = scaled(logits_CV, head)
    logp_CV = z_CV - lse_C[:, None]
    prob_CV = logp_CV.exp()
    grad_CV = torch.zeros_like(prob_CV)
    if grad_targets_CM is not None:
        here_CM = torch.where(local_CM == ELSEWHERE, 0.0, grad_targets_CM)
        grad_CV = -prob_CV * grad_targets_CM.sum(-1, keepdim=True)
        index_CM = local_CM.clamp_min(0)
        # the sampled token may be among the others: two sums, each in a fixed order
        grad_CV = grad_CV.scatter_add(1, index_CM[:, :1], here_CM[:, :1])
        grad_CV = grad_CV.scatter_add(1, index_CM[:, 1:], here_CM[:, 1:])
    if grad_entropy_C is not None:
        grad_CV = grad_CV - prob_CV * (logp_CV + entropy_C[:, None]) * grad_entropy_C[:, None]
    if grad_kl_C is not None and teacher_CV is not None:
        t_CV, _ = scaled(teacher_CV, head)
        ratio_CV = logp_CV - (t_CV - teacher_lse_C[:, None])
        grad_CV = grad_CV + prob_CV * (ratio_CV - kl_C[:, None]) * grad_kl_C[:, None]
    if tanh_CV is not None:
        grad_CV = grad_CV * (1.0 - tanh_CV * tanh_CV)
    return (grad_CV / head.temperature).to(logits_CV.dtype)


class _TargetHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        local_RM: Tensor,
        teacher: TeacherHead | None,
        top_k: int,
        head: Head,
        shard: VocabShard,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = kernel_if_large(chunk_sums, head, hidden_RD, weight_VD)
        num_rows, num_targets = local_RM.shape
        new: dict[str, Any] = {"dtype": accumulator(hidden_RD), "device": hidden_RD.device}
        top_R, sums_R3 = torch.empty(num_rows, **new), torch.empty(num_rows, 3, **new)
        targets_RM = torch.empty(num_rows, num_targets, **new)
        teacher_top_R, teacher_sum_R = torch.empty(num_rows, **new), torch.empty(num_rows, **new)
        num_top = min(top_k, len(weight_VD))
        best_RK = torch.empty(num_rows, num_top, **new)
        ids_RK = torch.empty(num_rows, num_top, dtype=torch.int64, device=hidden_RD.device)
        for rows in head.chunks(num_rows):
            logits_CV = F.linear(hidden_RD[rows], weight_VD, bias_V)
            teacher_CV = None if teacher is None else teacher.logits(rows)
            sums = run(logits_CV, teacher_CV, local_RM[rows])
            columns = (top_R, sums_R3, targets_RM, teacher_top_R, teacher_sum_R)
            for column, part in zip(columns, sums, strict=True):
                column[rows] = part
            if top_k:
                best_CK, ids_CK = logits_CV.topk(num_top)
                best_RK[rows], ids_RK[rows] = best_CK.to(best_RK.dtype), ids_CK + shard.first_token
        highest_R = shard.highest(top_R)
        sums_R3 *= (top_R - highest_R).exp()[:, None]
        teacher_highest_R = shard.highest(teacher_top_R)
        teacher_sum_R *= (teacher_top_R - teacher_highest_R).exp()
        whole = shard.total(torch.cat([sums_R3, teacher_sum_R[:, None], targets_RM], -1))
        sum_R, weighted_R, moved_R, teacher_sum_R = whole[:, :4].unbind(-1)
        lse_R = highest_R + sum_R.log()
        entropy_R = lse_R - weighted_R / sum_R
        teacher_lse_R = teacher_highest_R + teacher_sum_R.log() if teacher is not None else torch.zeros_like(lse_R)
        kl_R = moved_R / sum_R - (lse_R - teacher_lse_R)
        if top_k:
            all_ids, all_best = shard.joined(ids_RK), shard.joined(best_RK)
            ids_RK = all_ids.gather(1, all_best.topk(min(top_k, all_best.shape[1])).indices)
        ctx.head, ctx.teacher = head, teacher
        ctx.save_for_backward(hidden_RD, weight_VD, bias_V, local_RM, lse_R, teacher_lse_R, entropy_R, kl_R)
        ctx.mark_non_differentiable(ids_RK, *([] if head.entropy_grad else [entropy_R]))
        ctx.set_materialize_grads(False)
        return whole[:, 4:] - lse_R[:, None], entropy_R, kl_R, ids_RK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  once_differentiable is untyped
        hidden_RD, weight_VD, bias_V, local_RM, *columns = ctx.saved_tensors
        head: Head = ctx.head
        teacher: TeacherHead | None = ctx.teacher
        run = kernel_if_large(chunk_grad, head, hidden_RD, weight_VD)

        def logits_grad(rows: slice) -> Tensor:
            logits_CV = F.linear(hidden_RD[rows], weight_VD, bias_V)
            teacher_CV = None if teacher is None else teacher.logits(rows)
            each = [column[rows] for column in (local_RM, *columns)]
            return run(logits_CV, teacher_CV, *each, *(None if g is None else g[rows] for g in grads[:3]))

        inputs = hidden_RD, weight_VD, bias_V
        return (*head_gradients(head, inputs, ctx.needs_input_grad[:3], logits_grad), *[None] * 5)
