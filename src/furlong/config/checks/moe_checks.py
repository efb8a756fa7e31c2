"""Rules of expert routing, from the flags and the model's config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from furlong.config.checks.engine_checks import is_served
from furlong.config.checks.value_checks import read_model_config
from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.core.routing import RoutingShape

BIASED_FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")  # as config.json names them
NEED_ENGINE = ("use_rollout_routing_replay", "log_routing_agreement")


def returns_routes(config: Config) -> bool:
    """Whether the engine returns its expert choices; never for a dense model."""
    if routing_of(config) is None or config.algo.loss_type == "sft_loss":
        return False
    if config.moe.log_routing_agreement is None:
        is_at_hand = config.cluster.engine == "embedded" and not is_served(config)
        return config.moe.use_rollout_routing_replay or is_at_hand
    return config.moe.use_rollout_routing_replay or config.moe.log_routing_agreement


def routing_of(config: Config) -> RoutingShape | None:
    """Return the routing shape from config.json; None for a dense model or without the file."""
    values = _model_config(config)
    return RoutingShape.of(values) if values else None


def _family(config: Config) -> str:
    return str(_model_config(config).get("model_type"))


def _model_config(config: Config) -> dict[str, Any]:
    return read_model_config(config.rollout.hf_checkpoint)[1]


def moe_problems(config: Config) -> Iterator[str]:
    """Yield one message per problem. `config` includes derived values."""
    specs = flag_specs(Config)
    given = [name for name in vars(config.moe) if getattr(config.moe, name) != specs[name].default]
    if not given:
        return
    if routing_of(config) is None and _model_config(config):
        for name in given:
            yield f"{specs[name].flag} has no effect: {config.rollout.hf_checkpoint} has no experts; remove it"
        return
    if config.moe.moe_router_load_balancing_type == "none" and config.moe.moe_aux_loss_coeff:
        yield "--moe-aux-loss-coeff has no effect with --moe-router-load-balancing-type none; remove one of them"
    if config.moe.moe_router_enable_expert_bias and (family := _family(config)) not in BIASED_FAMILIES:
        yield (
            f"--moe-router-enable-expert-bias: routers of {family} have no selection bias, so transformers and "
            "engines would ignore it; remove it, or use --moe-aux-loss-coeff"
        )
    if config.algo.loss_type == "sft_loss":
        for name in given:
            if name in (*NEED_ENGINE, "use_routing_replay"):
                yield f"{specs[name].flag} has no effect with --loss-type sft_loss, which has no rollouts; remove it"
    if config.moe.use_rollout_routing_replay and config.moe.log_routing_agreement is not None:
        no = "" if config.moe.log_routing_agreement else "no-"
        yield f"--{no}log-routing-agreement has no effect: --use-rollout-routing-replay logs it; remove one of them"
