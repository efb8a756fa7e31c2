"""Top-k routing of mixture-of-experts layers, and router losses. Imports no Megatron-core.

Load-balancing loss (Switch Transformer, arXiv:2101.03961 eq. 4, with Megatron-LM's normalization) over one token set:

    N / (K T^2) * sum over experts of (tokens routed to it) * (sum of its scores)

Scores are the softmax of the router logits, or sigmoids normalized to sum to one. This equals K^-1 N sum f_i P_i, which
is 1 for uniformly used experts. The token set is

- "aux_loss": a micro-batch, as in Megatron-LM, so the loss depends on packing. Micro-batches are weighted by tokens.
- "seq_aux_loss": a sample (DeepSeek-V3, arXiv:2412.19437 eq. 17); the loss is the mean over the samples of the step.

The z-loss (ST-MoE, arXiv:2202.08906 eq. 5) is the mean of logsumexp(logits)^2 over the tokens of the step. Each layer
has one of each. Prompt and response tokens count alike. Routing counts use the top K by score: without bias, groups or
replay.

Legend: T tokens of a router, N experts, K experts per token, G groups of experts, or token sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from furlong.config.sections import MoeFlags
from furlong.core.batch import sum_rows
from furlong.training.megatron.family import RoutingRule

EPSILON = 1e-20  # DeepSeek-V3 adds it to the sum of weights


def choose_experts(logits_TN: Tensor, rule: RoutingRule, bias_N: Tensor | None = None) -> Tensor:
    """Return the [T, K] experts of each token. `bias_N` is added to the scores for this choice only."""
    scores_TN = logits_TN.sigmoid() if rule.scores == "sigmoid" else logits_TN
    if bias_N is not None:
        scores_TN = scores_TN + bias_N
    if rule.groups > rule.top_groups:
        scores_TGn = scores_TN.unflatten(1, (rule.groups, -1))
        best_TG = scores_TGn.topk(2, dim=-1).values.sum(-1)
        is_kept_TG = torch.zeros_like(best_TG, dtype=torch.bool)
        is_kept_TG.scatter_(1, best_TG.topk(rule.top_groups, dim=-1).indices, True)
        scores_TN = scores_TGn.masked_fill(~is_kept_TG[..., None], float("-inf")).flatten(1)
    return scores_TN.topk(rule.top_k, dim=-1).indices


def route(
    logits_TN: Tensor, rule: RoutingRule, bias_N: Tensor | None = None, chosen_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their weights, both [T, K].

    `chosen_TK` overrides the router's own choice (routing replay). Weights are always computed from the logits and have
    a gradient.
    """
    if chosen_TK is None:
        with torch.no_grad():
            chosen_TK = choose_experts(logits_TN, rule, bias_N)
    if rule.scores == "sigmoid":
        weights_TK = logits_TN.gather(1, chosen_TK).sigmoid()
        if rule.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + EPSILON)
    elif rule.normalize:
        weights_TK = logits_TN.gather(1, chosen_TK).softmax(-1)
    else:
        weights_TK = logits_TN.softmax(-1).gather(1, chosen_TK)
    return chosen_TK, weights_TK * rule.scale


Kind = Literal["none", "aux_loss", "seq_aux_loss"]


@dataclass(frozen=True)
class LoadBalancing:
    """Kinds and coefficients of the router losses. `bias_rate` is the update of an expert's bias in each step."""

    kind: Kind = "none"
    coeff: float = 0.0
    z_coeff: float = 0.0
    bias_rate: float = 0.0

    @staticmethod
    def of(flags: MoeFlags) -> LoadBalancing:
        """Return the losses that the flags ask for."""
        return LoadBalancing(
            kind=flags.moe_router_load_balancing_type,
            coeff=flags.moe_aux_loss_coeff,
            z_coeff=flags.moe_z_loss_coeff or 0.0,
            bias_rate=flags.moe_router_bias_update_rate if flags.moe_router_enable_expert_bias else 0.0,
        )

    @property
    def has_loss(self) -> bool:
        """Whether any coefficient is above 0."""
        return (self.kind != "none" and self.coeff > 0) or self.z_coeff > 0

    @property
    def is_on(self) -> bool:
        """Whether routers have to count tokens: for a loss or for a bias update."""
        return self.has_loss or self.bias_rate > 0


@dataclass(frozen=True)
class TokenSets:
    """Assignment of a router's tokens to the sets that are balanced: `set_T` is the set's index, -1 for padding.

    weight_G: each set's weight in the loss of the step; num_tokens: of the whole step.
    """

    set_T: Tensor
    weight_G: Tensor
    num_tokens: int


def load_balancing_loss(
    logits_TN: Tensor, sets: TokenSets, *, top_k: int, is_sigmoid: bool, reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return this rank's part of the load-balancing loss; `reduce` sums over the ranks that share the token sets.

    The parts of those ranks add up to the loss.
    """
    is_real_T = sets.set_T >= 0
    logits_TN, set_T = logits_TN[is_real_T].float(), sets.set_T[is_real_T]
    if is_sigmoid:
        scores_TN = logits_TN.sigmoid()
        scores_TN = scores_TN / (scores_TN.sum(-1, keepdim=True) + 1e-20)
    else:
        scores_TN = logits_TN.softmax(-1)
    num_sets = len(sets.weight_G)
    with torch.no_grad():
        is_chosen_TN = torch.zeros_like(scores_TN).scatter(1, scores_TN.topk(top_k, -1).indices, 1.0)
        counts_GN = reduce(sum_rows(is_chosen_TN, set_T, num_sets))
        tokens_G = counts_GN.sum(1) / top_k
    sums_GN = sum_rows(scores_TN, set_T, num_sets)
    factor_G = sets.weight_G * logits_TN.shape[1] / (top_k * tokens_G.clamp(min=1) ** 2)
    return ((counts_GN * sums_GN).sum(1) * factor_G).sum()


def z_loss(logits_TN: Tensor, sets: TokenSets) -> Tensor:
    """Return this rank's part of the z-loss."""
    return logits_TN[sets.set_T >= 0].float().logsumexp(-1).square().sum() / sets.num_tokens


class AttachLoss(torch.autograd.Function):
    """Identity on `output` whose backward pass also backpropagates `loss` with gradient 1."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        """Return `output`."""
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of `output` unchanged, and 1 for the loss."""
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)
