"""Which experts a token is sent to, and with which weights: one rule for training, for scoring and for replay.

It needs no Megatron-core.

Legend: T tokens, N experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

EPSILON = 1e-20  # what DeepSeek-V3 adds to a sum of weights


@dataclass(frozen=True)
class Routing:
    """How a router's logits become experts and weights.

    num_chosen: experts of a token. scores: what a logit is turned into. normalize: the weights of a token sum to one.
    scale: what the weights are multiplied with then. groups, groups_kept: a token is sent to experts of the
    `groups_kept` groups whose two best experts have the largest sums (DeepSeek-V3, arXiv:2412.19437 sec. 2.1.2).
    """

    num_chosen: int
    scores: Literal["softmax", "sigmoid"]
    normalize: bool
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1

    @staticmethod
    def of(hf: Any) -> Routing:
        """That of a Hugging Face config."""
        if hf.model_type == "gpt_oss":
            return Routing(hf.num_experts_per_tok, "softmax", normalize=True)
        if hasattr(hf, "routed_scaling_factor"):
            return Routing(
                hf.num_experts_per_tok,
                "sigmoid",
                normalize=hf.norm_topk_prob,
                scale=hf.routed_scaling_factor,
                groups=hf.n_group,
                groups_kept=hf.topk_group,
            )
        return Routing(hf.num_experts_per_tok, "softmax", normalize=hf.norm_topk_prob)


def chosen_experts(logits_TN: Tensor, rule: Routing, bias_N: Tensor | None = None) -> Tensor:
    """[T, K] experts of each token. `bias_N` is added to the scores that choose, and only to them."""
    scores_TN = logits_TN.sigmoid() if rule.scores == "sigmoid" else logits_TN
    if bias_N is not None:
        scores_TN = scores_TN + bias_N
    if rule.groups > rule.groups_kept:
        scores_TGn = scores_TN.unflatten(1, (rule.groups, -1))
        best_TG = scores_TGn.topk(2, dim=-1).values.sum(-1)
        is_kept_TG = torch.zeros_like(best_TG, dtype=torch.bool)
        is_kept_TG.scatter_(1, best_TG.topk(rule.groups_kept, dim=-1).indices, True)
        scores_TN = scores_TGn.masked_fill(~is_kept_TG[..., None], float("-inf")).flatten(1)
    return scores_TN.topk(rule.num_chosen, dim=-1).indices


def route(
    logits_TN: Tensor, rule: Routing, bias_N: Tensor | None = None, chosen_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their weights, both [T, K].

    `chosen_TK` are experts to take instead of the router's own choice (routing replay); weights are computed from the
    logits in any case, and have a gradient.
    """
    if chosen_TK is None:
        with torch.no_grad():
            chosen_TK = chosen_experts(logits_TN, rule, bias_N)
    if rule.scores == "sigmoid":
        weights_TK = logits_TN.gather(1, chosen_TK).sigmoid()
        if rule.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + EPSILON)
    elif rule.normalize:
        weights_TK = logits_TN.gather(1, chosen_TK).softmax(-1)
    else:
        weights_TK = logits_TN.softmax(-1).gather(1, chosen_TK)
    return chosen_TK, weights_TK * rule.scale
