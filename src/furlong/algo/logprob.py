"""Log-probabilities and entropies of response tokens, without materializing all fp32 logits.

R response tokens, V vocabulary, D width. The policy that samples at temperature `tau` has
log pi = log_softmax(softcap(hidden @ weight.T + bias) / tau), which is computed here with the same `tau`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor
from torch.autograd.function import once_differentiable

from furlong.algo import logprob_compiled
from furlong.algo.logprob_compiled import Head, accumulator
from furlong.interfaces import TokenStats


def token_stats(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    targets_R: Tensor,
    *,
    temperature: float,
    chunk_size: int = -1,
    entropy: bool,
    entropy_grad: bool,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> TokenStats:
    """Fuse the output layer with log-softmax, gather and entropy.

    Row r of `hidden_RD` is the hidden state that predicts `targets_R[r]`, that of the previous token. With
    `chunk_size` > 0 at most [chunk_size, V] logits exist at a time and are recomputed in the backward pass; -1 is one
    chunk whose probabilities are saved. Logits are computed in the inputs' dtype, as in engines; sums over V are
    float32 (float64 for float64 inputs). Without `entropy_grad` the entropy is detached. First-order gradients w.r.t.
    hidden, weight and bias.

    >>> stats = token_stats(torch.zeros(1, 4), torch.ones(8, 4), torch.tensor([3]),
    ...                     temperature=1.0, entropy=True, entropy_grad=False)
    >>> round(stats.log_probs_R.item(), 4), round(stats.entropy_R.item(), 4)
    (-2.0794, 2.0794)
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; the policy's log-probs need a temperature above 0")
    head = Head(temperature, softcap, chunk_size, entropy or entropy_grad, entropy_grad)
    tensors = (hidden_RD, weight_VD, bias_V)
    is_large = logprob_compiled.is_large(hidden_RD, weight_VD)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        function = logprob_compiled.CompiledHead if is_large else _FusedHead
        log_probs_R, entropy_R = function.apply(hidden_RD, weight_VD, bias_V, targets_R, head)  # pyright: ignore[reportGeneralTypeIssues]  torch leaves apply untyped
    elif is_large:
        log_probs_R, _, entropy_R, _ = logprob_compiled.stats(hidden_RD, weight_VD, bias_V, targets_R, head)
    else:
        log_probs_R, entropy_R, _ = _forward(hidden_RD, weight_VD, bias_V, targets_R, head, keep=False)
    return TokenStats(log_probs_R, entropy_R if head.entropy else None)


def stats_from_logits(
    logits_RV: Tensor, targets_R: Tensor, *, temperature: float, entropy: bool, entropy_grad: bool = False
) -> TokenStats:
    """Compute log-probs (and entropies) from full logits with plain autograd.

    Logits of -inf (padding or banned tokens) have probability 0.
    """
    scaled_RV = logits_RV.to(accumulator(logits_RV)) / temperature
    logp_RV = torch.log_softmax(scaled_RV, dim=-1)
    log_probs_R = logp_RV.gather(1, targets_R[:, None]).squeeze(1)
    if not entropy:
        return TokenStats(log_probs_R)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
        finite_RV = logp_RV.clamp_min(torch.finfo(logp_RV.dtype).min)  # avoids 0 * -inf = nan
        entropy_R = -(logp_RV.exp() * finite_RV).sum(-1)
    return TokenStats(log_probs_R, entropy_R)


def _scaled_logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, head: Head) -> Tensor:
    """Return softcap(logits) / temperature of one chunk in the accumulation dtype, as a new tensor."""
    logits_CV = F.linear(hidden_CD, weight_VD, bias_V).to(accumulator(hidden_CD))
    if head.softcap is not None:
        logits_CV.div_(head.softcap).tanh_().mul_(head.softcap)
    if head.temperature != 1.0:
        logits_CV.div_(head.temperature)
    return logits_CV


def _forward(
    hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_R: Tensor, head: Head, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probs [R], entropies [R] or [0], and with `keep` and a single chunk the input of backward.

    This is the probabilities [R, V] of a plain head, otherwise the log-probabilities.
    """
    num_rows, dtype = hidden_RD.shape[0], accumulator(hidden_RD)
    log_probs_R = torch.empty(num_rows, dtype=dtype, device=hidden_RD.device)
    entropy_R = torch.empty(num_rows if head.entropy else 0, dtype=dtype, device=hidden_RD.device)
    kept: Tensor | None = None
    for rows in head.chunks(num_rows):
        logp_CV = torch.log_softmax(_scaled_logits(hidden_RD[rows], weight_VD, bias_V, head), dim=-1)
        torch.gather(logp_CV, 1, targets_R[rows, None], out=log_probs_R[rows, None])
        keep_chunk = keep and rows == slice(0, num_rows)
        prob_CV: Tensor | None = None
        if head.entropy:
            prob_CV = logp_CV.exp()
            entropy_R[rows] = -torch.linalg.vecdot(prob_CV, logp_CV)
        if keep_chunk:
            kept = logp_CV if not head.is_plain else logp_CV.exp_() if prob_CV is None else prob_CV
    return log_probs_R, entropy_R, kept


class _FusedHead(torch.autograd.Function):
    """Autograd function of `_forward`, with a chunked backward pass.

    With p the probabilities, H the entropy, g and h the gradients of log-prob and entropy, and tau the temperature:
    d log p_target / dz = onehot - p; dH / dz = -p (log p + H); dz / dlogits = (1 - tanh^2) / tau.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_R: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        log_probs_R, entropy_R, ctx.kept_RV = _forward(hidden_RD, weight_VD, bias_V, targets_R, head, keep=True)
        ctx.head = head
        ctx.save_for_backward(hidden_RD, weight_VD, bias_V, targets_R, entropy_R if head.entropy_grad else None)
        if not head.entropy_grad:
            ctx.mark_non_differentiable(entropy_R)
        ctx.set_materialize_grads(False)
        return log_probs_R, entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  once_differentiable is untyped
        hidden_RD, weight_VD, bias_V, targets_R, entropy_R = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        kept_RV, ctx.kept_RV = ctx.kept_RV, None  # overwritten below; a second backward recomputes it
        chunks = list(ctx.head.chunks(hidden_RD.shape[0]))
        # Several chunks are summed in float32.
        total = weight_VD.dtype if len(chunks) == 1 else accumulator(weight_VD)
        grad_hidden = torch.empty_like(hidden_RD) if need_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=total) if need_weight and len(chunks) != 1 else None
        grad_bias = torch.zeros_like(bias_V, dtype=total) if need_bias else None
        for rows in chunks:
            logit_grad = _LogitGrad(
                ctx.head,
                targets_R[rows, None],
                *(None if column is None else column[rows, None] for column in (*grads, entropy_R)),
            )
            grad_CV, scale_C1 = logit_grad(hidden_RD[rows], weight_VD, bias_V, kept_RV)
            grad_CV = grad_CV.to(hidden_RD.dtype)
            if grad_hidden is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden[rows])
                if scale_C1 is not None:
                    grad_hidden[rows] *= scale_C1
            if need_weight:
                hidden_CD = hidden_RD[rows] if scale_C1 is None else (hidden_RD[rows] * scale_C1).to(hidden_RD.dtype)
                part_VD = grad_CV.t() @ hidden_CD
                grad_weight = part_VD if grad_weight is None else grad_weight.add_(part_VD)
            if grad_bias is not None:
                grad_bias += (grad_CV if scale_C1 is None else grad_CV * scale_C1).sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            None,
            None,
        )


@dataclass(frozen=True)
class _LogitGrad:
    """Computes the gradient w.r.t. the logits of one chunk, as a [C, V] matrix and a factor per row (None is 1)."""

    head: Head
    targets_C1: Tensor
    grad_lp_C1: Tensor | None
    grad_entropy_C1: Tensor | None
    entropy_C1: Tensor | None

    def __call__(
        self, hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, kept_CV: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Use `kept_CV` (probabilities of a plain head, otherwise log-probs), or recompute it from hidden states."""
        scaled_CV: Tensor | None = None
        if kept_CV is None or self.head.softcap is not None:
            scaled_CV = _scaled_logits(hidden_CD, weight_VD, bias_V, self.head)
        if kept_CV is None and scaled_CV is not None:
            kept_CV = torch.log_softmax(scaled_CV, dim=-1)
            kept_CV = kept_CV.exp_() if self.head.is_plain else kept_CV
        assert kept_CV is not None
        if self.head.is_plain and self.grad_lp_C1 is not None:
            grad_CV = kept_CV.scatter_add_(1, self.targets_C1, kept_CV.new_full(self.targets_C1.shape, -1.0))
            return grad_CV, self.grad_lp_C1 / -self.head.temperature
        return self._general(kept_CV, scaled_CV), None

    def _general(self, logp_CV: Tensor, scaled_CV: Tensor | None) -> Tensor:
        prob_CV = logp_CV.exp()
        grad_CV = torch.zeros_like(prob_CV)
        if self.grad_entropy_C1 is not None and self.entropy_C1 is not None:
            grad_CV = (logp_CV + self.entropy_C1).mul_(prob_CV).mul_(-self.grad_entropy_C1)
        if self.grad_lp_C1 is not None:
            grad_CV.addcmul_(prob_CV, self.grad_lp_C1, value=-1.0).scatter_add_(1, self.targets_C1, self.grad_lp_C1)
        if scaled_CV is not None and self.head.softcap is not None:
            tanh_CV = scaled_CV.mul_(self.head.temperature / self.head.softcap)
            grad_CV.mul_(1.0 - tanh_CV.square_())
        return grad_CV.div_(self.head.temperature)
