"""Megatron-core's MoE layer: the router with the families' routing rules, and experts with a grouped GEMM.

Legend: T tokens, N experts, K experts per token.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false, reportOptionalOperand=false
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the usual name
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from furlong.training.megatron.family import RoutingRule
from furlong.training.megatron.moe_routing import (
    AttachLoss,
    LoadBalancing,
    TokenSets,
    choose_experts,
    load_balancing_loss,
    route,
    z_loss,
)
from furlong.training.megatron.router_replay import RouterPass, RouterReplay


class MoeRouter(TopKRouter):
    """Routes tokens by `rule`. `expert_bias` stays in float32 when the model is cast."""

    def __init__(self, *args: Any, rule: RoutingRule, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rule = rule
        self.replay: RouterReplay | None = None
        self.balancing = LoadBalancing()

    @property
    def layer(self) -> int:
        """Index of its layer in the whole model."""
        assert self.layer_number is not None  # set when the layer is built
        return self.layer_number - 1

    def routing(self, logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the weights of all experts, zero where not chosen, and the mask of chosen ones, both [T, N]."""
        logits_TN = logits.flatten(0, -2)
        current = None if self.replay is None else self.replay.pass_of(self.layer)
        chosen_TK = None if current is None else self._choose(current, logits_TN)
        chosen_TK, weights_TK = route(logits_TN, self.rule, self.expert_bias, chosen_TK)
        is_chosen_TN = torch.zeros_like(logits_TN, dtype=torch.bool).scatter(1, chosen_TK, True)
        if current is not None and current.counted is not None and torch.is_grad_enabled():
            self._apply_expert_bias(is_chosen_TN & (current.counted.set_T >= 0)[:, None])
            if self.balancing.has_loss:
                weights_TK = AttachLoss.apply(weights_TK, self._balancing_loss(current, current.counted, logits_TN))
        return torch.zeros_like(logits_TN).scatter(1, chosen_TK, weights_TK), is_chosen_TN

    def _choose(self, current: RouterPass, logits_TN: Tensor) -> Tensor:
        """Return the experts to use; records the router's own choice."""
        layer = self.layer
        with torch.no_grad():
            own_TK = choose_experts(logits_TN, self.rule, self.expert_bias)
        current.chosen[layer] = own_TK
        if layer not in current.replayed:
            return own_TK
        replayed_TK = current.replayed[layer].to(torch.int64)
        return torch.where(replayed_TK < 0, own_TK, replayed_TK)

    def _balancing_loss(self, current: RouterPass, counted: TokenSets, logits_TN: Tensor) -> Tensor:
        """Return this rank's part of the layer's load-balancing and z-loss."""
        loss = logits_TN.new_zeros(())
        parts = [loss, loss]
        balancing = self.balancing
        if balancing.kind != "none" and balancing.coeff > 0:
            is_sigmoid = self.rule.scores == "sigmoid"
            parts[0] = load_balancing_loss(
                logits_TN, counted, top_k=self.rule.top_k, is_sigmoid=is_sigmoid, reduce=self._sum_over_ranks
            )
        if balancing.z_coeff > 0:
            parts[1] = z_loss(logits_TN, counted)
        current.losses[self.layer] = torch.stack([part.detach().float() for part in parts])
        return balancing.coeff * parts[0] + balancing.z_coeff * parts[1]

    def _sum_over_ranks(self, counts: Tensor) -> Tensor:
        """Sum over the ranks that share a micro-batch's tokens (TP x CP)."""
        dist.all_reduce(counts, group=self.tp_cp_group)
        return counts

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = self.expert_bias
        super()._apply(fn, recurse)
        if exact is not None:
            self.expert_bias = exact.to(self.expert_bias.device)
        return self


class Experts(SequentialMLP):
    """The experts of a rank as one grouped GEMM in bfloat16, with the parameters of SequentialMLP."""

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor) -> Any:
        """Run each expert on its tokens, which are sorted by expert; outputs are weighted by routing probabilities."""
        x, probs_T1 = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if parallel_state.get_expert_tensor_parallel_world_size() > 1:
            return super().forward(x, tokens_per_expert, permuted_probs)
        counts = tokens_per_expert.tolist()
        gate, up = self._linear("linear_fc1", x, counts).chunk(2, dim=-1)
        hidden = (gated_activation(gate, up, self.config) * probs_T1).to(x.dtype)
        return self._linear("linear_fc2", hidden, counts, probs_T1), None

    def _linear(self, name: str, x: Tensor, counts: list[int], weight_T1: Tensor | None = None) -> Tensor:
        """Apply the linear layer of each token's expert; biases are multiplied by `weight_T1`."""
        layers: list[Any] = [getattr(expert, name) for expert in self.local_experts]
        sizes = torch.tensor(counts, device=x.device)
        if self.config.moe_grouped_gemm and len(x):
            weights = torch.stack([layer.weight for layer in layers]).transpose(1, 2)
            out = F.grouped_mm(x, weights, offs=sizes.cumsum(0).to(torch.int32))
        else:
            parts = zip(layers, x.split(counts), strict=True)
            out = torch.cat([F.linear(part, layer.weight) for layer, part in parts])
        if layers[0].bias is None:
            return out
        bias = torch.stack([layer.bias for layer in layers]).repeat_interleave(sizes, dim=0)
        return out + (bias if weight_T1 is None else (bias * weight_T1).to(out.dtype))


def gated_activation(gate: Tensor, up: Tensor, config: TransformerConfig) -> Tensor:
    """Gated activation of Megatron-core's MLP: SwiGLU, for gpt-oss clamped and with an offset of the linear part."""
    if (limit := config.activation_func_clamp_value) is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return config.activation_func(gate) * (up + config.glu_linear_offset)
