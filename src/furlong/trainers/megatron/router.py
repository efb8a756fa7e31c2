"""Megatron-core's router, with the rules of the families.

Legend: T tokens, N experts, K experts of a token.
"""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
# pyright: reportIncompatibleMethodOverride=false
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from furlong.trainers.megatron.replay import RouterTap
from furlong.trainers.megatron.routing import Routing, chosen_experts, route


class Router(TopKRouter):
    """Chooses and weighs by `rule`. `expert_bias` stays in float32, whatever the model is cast to."""

    def __init__(self, *args: Any, rule: Routing, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rule = rule
        self.tap: RouterTap | None = None

    def routing(self, logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Weights of all experts, zero for those that were not chosen, and which were, both [T, N]."""
        logits_TN = logits.flatten(0, -2)
        chosen_TK, weights_TK = route(logits_TN, self.rule, self.expert_bias, self._chosen(logits_TN))
        is_chosen_TN = torch.zeros_like(logits_TN, dtype=torch.bool).scatter(1, chosen_TK, True)
        self._apply_expert_bias(is_chosen_TN)
        return torch.zeros_like(logits_TN).scatter(1, chosen_TK, weights_TK), is_chosen_TN

    def _chosen(self, logits_TN: Tensor) -> Tensor | None:
        """The experts to take, where somebody records or replays them; None leaves the choice to the rule."""
        assert self.layer_number is not None
        layer = self.layer_number - 1
        now = None if self.tap is None else self.tap.pass_of(layer)
        if now is None:
            return None
        with torch.no_grad():
            own_TK = chosen_experts(logits_TN, self.rule, self.expert_bias)
        now.own[layer] = own_TK
        if layer not in now.given:
            return own_TK
        given_TK = now.given[layer].to(torch.int64)
        return torch.where(given_TK < 0, own_TK, given_TK)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = self.expert_bias
        super()._apply(fn, recurse)
        if exact is not None:
            self.expert_bias = exact.to(self.expert_bias.device)
        return self
