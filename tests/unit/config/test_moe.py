"""Problems reported for router flags that do not fit the model, the trainer or each other."""

from __future__ import annotations

import json

import pytest

from furlong.config.checks.training_checks import model_problems
from furlong.config.checks.validate import declared_problems
from furlong.config.command_line import config_from_values
from furlong.config.facts import returns_routes
from furlong.core.routing import RoutingShape
from models_zoo import family_config


@pytest.fixture
def configured(tmp_path):
    """A configuration of a run with a model of a family."""

    def build(family: str, **values):
        (tmp_path / "config.json").write_text(json.dumps(family_config(family).to_dict()))
        return config_from_values({"hf_checkpoint": str(tmp_path), "engine": "embedded", **values})

    return build


MEGATRON = {"train_backend": "megatron"}


def test_a_flag_that_would_do_nothing_is_refused(configured):
    for family, values, said in [
        ("qwen3", {"use_routing_replay": True}, "no experts"),
        ("qwen3", {"use_rollout_routing_replay": True}, "no experts"),
        ("qwen3_moe", {"use_routing_replay": True, "loss_type": "sft_loss"}, "--loss-type sft_loss"),
        ("qwen3_moe", {"use_routing_replay": True, "debug_rollout_only": True}, "--debug-rollout-only"),
        ("qwen3_moe", {"use_rollout_routing_replay": True, "log_routing_agreement": True}, "--log-routing"),
        ("qwen3_moe", {"moe_aux_loss_coeff": 0.1}, "--train-backend megatron"),
        ("qwen3_moe", {"moe_grouped_gemm": True, "fp32": True, **MEGATRON}, "--fp32"),
        ("qwen3_moe", {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1, **MEGATRON}, "no effect"),
        ("qwen3_moe", {"moe_router_enable_expert_bias": True, **MEGATRON}, "routers of qwen3_moe"),
    ]:
        config = configured(family, **values)
        (problem,) = [*declared_problems(config), *model_problems(config)]
        assert said in problem
        assert "--" in problem


def test_flags_that_fit_are_no_problem(configured):
    for family, values in [
        ("qwen3", {}),
        ("qwen3_moe", {"use_routing_replay": True, "use_rollout_routing_replay": True}),
        ("gpt_oss", {"log_routing_agreement": True}),
        ("qwen3_moe", {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-3, **MEGATRON}),
        ("glm4_moe", {"moe_router_enable_expert_bias": True, "moe_z_loss_coeff": 1e-3, **MEGATRON}),
    ]:
        assert list(model_problems(configured(family, **values))) == []


def test_engines_return_routed_experts_only_if_they_are_used(configured):
    for family, values, expected in [
        ("qwen3", {}, False),
        ("qwen3_moe", {}, True),  # it costs the engine of this process next to nothing
        ("qwen3_moe", {"log_routing_agreement": False}, False),
        ("qwen3_moe", {"rollout_num_gpus": 1}, False),
        ("qwen3_moe", {"rollout_num_gpus": 1, "log_routing_agreement": True}, True),
        ("qwen3_moe", {"rollout_num_gpus": 1, "use_rollout_routing_replay": True}, True),
        ("qwen3_moe", {"loss_type": "sft_loss"}, False),
    ]:
        assert returns_routes(configured(family, **values)) is expected


def test_the_shape_of_routing_is_read_from_every_familys_config():
    for family in ["qwen3_moe", "glm4_moe", "gpt_oss"]:
        assert RoutingShape.of(family_config(family).to_dict()) == RoutingShape(2, 2, 4)
        assert RoutingShape.of(family_config(family).to_dict() | {"num_hidden_layers": None}) is None
