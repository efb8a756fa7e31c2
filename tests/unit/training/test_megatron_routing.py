"""Routing rules of the MoE families equal those of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from furlong.training.megatron.family import RoutingRule, family_of
from furlong.training.megatron.moe_routing import choose_experts, route
from models_zoo import family_config

WIDTH, EXPERTS = 32, 8


def _config(family: str, **changes):
    if family == "deepseek_v3":
        return DeepseekV3Config(hidden_size=WIDTH, n_routed_experts=EXPERTS, num_experts_per_tok=3, **changes)
    config = family_config(family)
    count = "n_routed_experts" if family == "glm4_moe" else "num_experts"
    for name, value in ({count: EXPERTS, "num_experts_per_tok": 3} | changes).items():
        setattr(config, name, value)
    return config


CASES = {
    "qwen3-moe": (Qwen3MoeTopKRouter, _config("qwen3_moe")),
    "qwen3-moe-normed": (Qwen3MoeTopKRouter, _config("qwen3_moe", norm_topk_prob=True)),
    "gpt-oss": (GptOssTopKRouter, _config("gpt_oss")),
    "glm": (Glm4MoeTopkRouter, _config("glm4_moe", routed_scaling_factor=2.5)),
    "glm-not-normed": (Glm4MoeTopkRouter, _config("glm4_moe", norm_topk_prob=False)),
    "deepseek": (DeepseekV3TopkRouter, _config("deepseek_v3", n_group=4, topk_group=2)),
    "deepseek-one-group": (DeepseekV3TopkRouter, _config("deepseek_v3", n_group=2, topk_group=1)),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_and_weights_are_those_of_transformers(name):
    kind, config = CASES[name]
    torch.manual_seed(0)
    theirs = kind(config)
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        torch.nn.init.normal_(tensor)
    logits, weights, experts = theirs(torch.randn(64, WIDTH))
    own_experts, own_weights = route(
        logits, family_of(config.model_type).routing(config), getattr(theirs, "e_score_correction_bias", None)
    )
    empty = torch.zeros_like(logits)
    torch.testing.assert_close(
        empty.scatter(1, own_experts, own_weights), empty.scatter(1, experts, weights), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "rule", [RoutingRule(2, "softmax", normalize=False), RoutingRule(2, "sigmoid", normalize=True)]
)
def test_replayed_experts_are_used_and_weighted_by_the_logits(rule):
    logits = torch.randn(5, EXPERTS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    chosen, weights = route(logits, rule)
    again, same = route(logits, rule, bias_N=torch.arange(8.0), chosen_TK=chosen)
    assert torch.equal(again, chosen)
    assert torch.equal(same, weights)
    same[:, 0].sum().backward()
    assert (logits.grad.gather(1, chosen[:, :1]) > 0).all()


def test_a_token_is_routed_to_the_groups_with_the_largest_sum_of_their_two_best_experts():
    logits = torch.tensor([[9.0, -9.0, 1.0, 1.0, 1.1, 1.1, 0.0, 0.0]])
    rule = RoutingRule(2, "sigmoid", normalize=True, groups=4, top_groups=1)
    assert set(choose_experts(logits, rule).flatten().tolist()) == {4, 5}
