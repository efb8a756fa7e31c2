"""Dense families: Llama, Mistral, Qwen2, Qwen3, MiMo. They differ in biases and in normalized queries and keys.

MiMo is Qwen2 with layers for multi-token prediction, which are not trained (see `models.untrained_tensors`).
"""

from __future__ import annotations

from typing import Any

from furlong.training.megatron.family import Architecture, Family


def _llama(hf: Any) -> Architecture:
    bias = bool(getattr(hf, "attention_bias", False))
    return Architecture(qkv_bias=bias, projection_bias=bias, has_experts=(False,) * hf.num_hidden_layers)


def _qwen2(hf: Any) -> Architecture:
    return Architecture(qkv_bias=True, has_experts=(False,) * hf.num_hidden_layers)


def _qwen3(hf: Any) -> Architecture:
    bias = bool(getattr(hf, "attention_bias", False))
    return Architecture(qkv_bias=bias, projection_bias=bias, qk_norm=True, has_experts=(False,) * hf.num_hidden_layers)


FAMILIES = (Family(("llama", "mistral"), _llama), Family(("qwen2", "mimo"), _qwen2), Family(("qwen3",), _qwen3))
