"""gpt-oss: attention sinks, sliding windows, and experts with biases and a clamped quick GELU, stored packed."""

from __future__ import annotations

from typing import Any

from furlong.training.megatron.family import FC1, FC2, Architecture, Family, RoutingRule, WeightRule

MOE = (
    WeightRule("mlp.router.weight", ("mlp.router.weight",)),
    WeightRule("mlp.router.bias", ("mlp.router.bias",)),
    WeightRule(f"{FC1}.weight", ("mlp.experts.gate_up_proj",), "packed_gate_up", axis=0, of_expert=True),
    WeightRule(f"{FC1}.bias", ("mlp.experts.gate_up_proj_bias",), "packed_gate_up", axis=0, of_expert=True),
    WeightRule(f"{FC2}.weight", ("mlp.experts.down_proj",), "packed", axis=1, of_expert=True),
    WeightRule(f"{FC2}.bias", ("mlp.experts.down_proj_bias",), "packed", of_expert=True),
)


def _architecture(hf: Any) -> Architecture:
    bias = bool(getattr(hf, "attention_bias", False))
    return Architecture(
        qkv_bias=bias,
        projection_bias=bias,
        sinks=True,
        has_experts=(True,) * hf.num_hidden_layers,
        num_experts=hf.num_local_experts,
        expert_width=hf.intermediate_size,
        moe_bias=True,
    )


def _mlp_values(hf: Any) -> dict[str, Any]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu  # not at the top: families do without Megatron-core

    return {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": getattr(hf, "swiglu_limit", 7.0),
        "glu_linear_offset": 1.0,
    }


FAMILIES = (
    Family(
        ("gpt_oss",),
        _architecture,
        lambda hf: RoutingRule(hf.num_experts_per_tok, "softmax", normalize=True),
        moe_rules=lambda _: MOE,
        required={"attention_bias": True, "swiglu_alpha": 1.702},
        mlp_values=_mlp_values,
        splits_experts=False,
    ),
)
