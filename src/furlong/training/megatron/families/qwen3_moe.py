"""Qwen3-MoE: Qwen3's attention, and experts in some or all layers."""

from __future__ import annotations

from typing import Any

from furlong.training.megatron.family import Architecture, Family, RoutingRule


def _architecture(hf: Any) -> Architecture:
    bias = bool(getattr(hf, "attention_bias", False))
    dense: set[int] = set(hf.mlp_only_layers or ())
    return Architecture(
        qkv_bias=bias,
        projection_bias=bias,
        qk_norm=True,
        has_experts=tuple(
            layer not in dense and (layer + 1) % hf.decoder_sparse_step == 0 for layer in range(hf.num_hidden_layers)
        ),
        num_experts=hf.num_experts,
        expert_width=hf.moe_intermediate_size,
    )


def _routing(hf: Any) -> RoutingRule:
    return RoutingRule(hf.num_experts_per_tok, "softmax", normalize=hf.norm_topk_prob)


FAMILIES = (Family(("qwen3_moe",), _architecture, _routing),)
