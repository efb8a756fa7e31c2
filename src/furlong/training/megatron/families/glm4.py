"""GLM-4 (9B, 32B): norms around attention and MLP, rotary embeddings of neighboring channels, a fused gate_up_proj."""

from __future__ import annotations

from typing import Any

from furlong.training.megatron.family import FUSED_MLP, Architecture, Family


def _architecture(hf: Any) -> Architecture:
    return Architecture(
        qkv_bias=bool(hf.attention_bias),
        post_norms=True,
        pairs_neighbors=True,
        has_experts=(False,) * hf.num_hidden_layers,
    )


FAMILIES = (Family(("glm4",), _architecture, dense_rules=FUSED_MLP),)
