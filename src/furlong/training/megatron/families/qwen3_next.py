"""Qwen3-Next and Qwen3.5: gated delta nets in most layers, attention with an output gate in the others.

They store the projections of the delta nets in different forms, which become the same parameters. Some have experts
with a gated shared expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from furlong.training.megatron.family import SHARED_EXPERT, Architecture, Family, RoutingRule, WeightRule, moe_rules

KEY = ("linear_num_key_heads", "linear_key_head_dim")
VALUE = ("linear_num_value_heads", "linear_value_head_dim")
GATE = ("linear_num_value_heads",)
IN, NET = "self_attention.in_proj_", "linear_attn"
DELTA = (
    WeightRule(
        "self_attention.conv1d.weight", (f"{NET}.conv1d.weight",), "by_key_head", axis=0, parts=((KEY, KEY, VALUE),)
    ),
    WeightRule("self_attention.A_log", (f"{NET}.A_log",), axis=0),
    WeightRule("self_attention.dt_bias", (f"{NET}.dt_bias",), axis=0),
    WeightRule("self_attention.norm.weight", (f"{NET}.norm.weight",)),
    WeightRule("self_attention.out_proj.weight", (f"{NET}.out_proj.weight",), axis=1),
)
NEXT = (
    WeightRule(f"{IN}qkvz.weight", (f"{NET}.in_proj_qkvz.weight",), axis=0),
    WeightRule(f"{IN}ba.weight", (f"{NET}.in_proj_ba.weight",), axis=0),
    *DELTA,
)
QWEN35 = (
    WeightRule(
        f"{IN}qkvz.weight",
        (f"{NET}.in_proj_qkv.weight", f"{NET}.in_proj_z.weight"),
        "by_key_head",
        axis=0,
        parts=((KEY, KEY, VALUE), (VALUE,)),
    ),
    WeightRule(
        f"{IN}ba.weight",
        (f"{NET}.in_proj_b.weight", f"{NET}.in_proj_a.weight"),
        "by_key_head",
        axis=0,
        parts=((GATE,), (GATE,)),
    ),
    *DELTA,
)
SHARED = (
    *(
        replace(rule, theirs=tuple(name.replace(".shared_experts.", ".shared_expert.") for name in rule.theirs))
        for rule in SHARED_EXPERT
    ),
    WeightRule("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",)),
)


def _dense(hf: Any) -> Architecture:
    return Architecture(
        qk_norm=True,
        output_gate=True,
        norms_add_one=True,
        is_delta=tuple(kind == "linear_attention" for kind in hf.layer_types),
        has_experts=(False,) * hf.num_hidden_layers,
    )


def _moe(hf: Any) -> Architecture:
    return replace(
        _dense(hf),
        has_experts=(True,) * hf.num_hidden_layers,
        num_experts=hf.num_experts,
        expert_width=hf.moe_intermediate_size,
        shared_width=hf.shared_expert_intermediate_size,
        shared_gate=True,
    )


def _next(hf: Any) -> Architecture:
    dense: set[int] = set(hf.mlp_only_layers or ())
    layers = range(hf.num_hidden_layers)
    has = tuple(layer not in dense and (layer + 1) % hf.decoder_sparse_step == 0 for layer in layers)
    return replace(_moe(hf), has_experts=has)


def _routing(hf: Any) -> RoutingRule:
    normalize = hf.norm_topk_prob if hf.model_type == "qwen3_next" else True
    return RoutingRule(hf.num_experts_per_tok, "softmax", normalize=normalize)


def _moe_rules(architecture: Architecture) -> tuple[WeightRule, ...]:
    return (*moe_rules(replace(architecture, shared_width=0)), *SHARED)


SHAPE: dict[str, Any] = {"layer_kinds": ("full_attention", "linear_attention"), "required": {"attention_bias": False}}
FAMILIES = (
    Family(("qwen3_next",), _next, _routing, moe_rules=_moe_rules, delta_rules=NEXT, **SHAPE),
    Family(("qwen3_5_text",), _dense, delta_rules=QWEN35, **SHAPE),
    Family(("qwen3_5_moe_text",), _moe, _routing, moe_rules=_moe_rules, delta_rules=QWEN35, **SHAPE),
)
