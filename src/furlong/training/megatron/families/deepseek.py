"""DeepSeek-V3 and GLM-4-MoE: sigmoid routing in groups of experts, an expert bias, a shared expert.

GLM-4-MoE (GLM-4.5) has grouped-query attention; DeepSeek-V3 and GLM-4-MoE-Lite (GLM-4.7-Flash) have multi-head latent
attention (MLA). Moonlight and Kimi-K2 have DeepSeek-V3's architecture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from furlong.training.megatron.family import Architecture, Family, RoutingRule, WeightRule

MLA = (
    WeightRule("self_attention.linear_kv_down_proj.weight", ("self_attn.kv_a_proj_with_mqa.weight",)),
    WeightRule("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",)),
    WeightRule("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight",), axis=0),
    WeightRule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), axis=1),
)
QUERIES = (WeightRule("self_attention.linear_q_proj.weight", ("self_attn.q_proj.weight",), axis=0),)
COMPRESSED_QUERIES = (
    WeightRule("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",)),
    WeightRule("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",)),
    WeightRule("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",), axis=0),
)


def _glm(hf: Any) -> Architecture:
    return Architecture(
        qkv_bias=bool(getattr(hf, "attention_bias", False)),
        qk_norm=bool(getattr(hf, "use_qk_norm", False)),
        has_experts=tuple(_has_experts(hf, layer) for layer in range(hf.num_hidden_layers)),
        num_experts=hf.n_routed_experts,
        expert_width=hf.moe_intermediate_size,
        shared_width=hf.moe_intermediate_size * (hf.n_shared_experts or 0),
        expert_bias=True,
    )


def _has_experts(hf: Any, layer: int) -> bool:
    if (kinds := getattr(hf, "mlp_layer_types", None)) is not None:
        return kinds[layer] == "sparse"
    return layer >= hf.first_k_dense_replace


def _routing(hf: Any) -> RoutingRule:
    return RoutingRule(
        hf.num_experts_per_tok,
        "sigmoid",
        normalize=hf.norm_topk_prob,
        scale=hf.routed_scaling_factor,
        groups=hf.n_group,
        top_groups=hf.topk_group,
    )


FAMILIES = (
    Family(("glm4_moe",), _glm, _routing),
    Family(
        ("deepseek_v3", "glm4_moe_lite", "kimi_k2"),
        lambda hf: replace(_glm(hf), is_mla=True),
        _routing,
        attention_rules=lambda hf, _: (*(QUERIES if hf.q_lora_rank is None else COMPRESSED_QUERIES), *MLA),
        required={"attention_bias": False},
        partial_yarn=True,
    ),
)
