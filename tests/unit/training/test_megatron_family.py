"""The registry of Megatron families, and what each reads from a config."""

from __future__ import annotations

import pytest

from furlong.errors import ConfigError
from furlong.training.megatron.family import architecture_of, family_of, known_families
from models_zoo import family_config

DENSE = ("llama", "mistral", "qwen2", "qwen3", "glm4", "mimo", "qwen3_5_text")
MOE = (
    *("qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "glm4_moe_lite", "kimi_k2", "minimax_m2"),
    *("qwen3_next", "qwen3_5_moe_text"),
)


def test_every_family_is_found_by_its_model_types():
    assert known_families().keys() == {*DENSE, *MOE}
    for model_type, family in known_families().items():
        assert model_type in family.model_types


def test_an_unknown_model_type_is_an_error_with_the_known_ones():
    for model_type in ("gemma2", None):
        with pytest.raises(ConfigError) as caught:
            family_of(model_type)
        for name in (*DENSE, *MOE, str(model_type), "--train-backend fsdp"):
            assert name in str(caught.value)


def test_a_family_with_sparse_attention_is_not_sent_to_another_backend():
    for model_type in ("glm_moe_dsa", "deepseek_v32"):
        with pytest.raises(ConfigError, match=f"{model_type} has sparse-attention indexers, which no training backend"):
            family_of(model_type)


def test_only_layers_with_experts_have_a_router_and_only_families_with_experts_a_routing_rule():
    for model_type in (*DENSE, *MOE):
        hf, family = family_config(model_type), family_of(model_type)
        has_experts = architecture_of(hf).has_experts
        assert any(has_experts) == (model_type in MOE)
        if model_type in DENSE:
            with pytest.raises(ConfigError, match=model_type):
                family.routing(hf)
            continue
        assert len(has_experts) == hf.num_hidden_layers
        for layer, has_router in enumerate(has_experts):
            names = [rule.ours for rule in family.layer_rules(hf, layer)]
            assert ("mlp.router.weight" in names) == has_router == ("mlp.linear_fc1.weight" not in names)
            assert len(names) == len(set(names))
