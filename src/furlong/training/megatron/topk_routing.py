"""Top-k routing: which experts each token is routed to, with which weights. Imports no Megatron-core.

Legend: T tokens, N experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
