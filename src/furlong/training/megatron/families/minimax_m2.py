"""MiniMax-M2: queries and keys normalized over all heads, sigmoid routing with an expert bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from furlong.training.megatron.family import (
    EXPERT_BIAS,
    FC1,
    FC2,
    ROUTER,
    Architecture,
    Family,
    RoutingRule,
    WeightRule,
)

MOE = (
    replace(ROUTER, theirs=("block_sparse_moe.gate.weight",)),
    replace(EXPERT_BIAS, theirs=("block_sparse_moe.e_score_correction_bias",)),
    WeightRule(
        f"{FC1}.weight",
        ("block_sparse_moe.experts.N.w1.weight", "block_sparse_moe.experts.N.w3.weight"),
        "gate_up",
        axis=0,
        of_expert=True,
    ),
    WeightRule(f"{FC2}.weight", ("block_sparse_moe.experts.N.w2.weight",), axis=1, of_expert=True),
)


def _architecture(hf: Any) -> Architecture:
    return Architecture(
        qk_norm_joint=True,
        has_experts=(True,) * hf.num_hidden_layers,
        num_experts=hf.num_local_experts,
        expert_width=hf.intermediate_size,
        expert_bias=True,
    )


def _routing(hf: Any) -> RoutingRule:
    return RoutingRule(hf.num_experts_per_tok, "sigmoid", normalize=True)


FAMILIES = (Family(("minimax_m2",), _architecture, _routing, moe_rules=lambda _: MOE),)
