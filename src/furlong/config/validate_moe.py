"""What can be wrong with the routing of experts, by the flags and the model's config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from furlong.config.flag import flag_specs
from furlong.config.sections import Config
from furlong.config.validate_engine import is_served
from furlong.core.routing import RoutingShape

NEED_ENGINE = ("use_rollout_routing_replay", "log_routing_agreement")


def returns_routes(config: Config) -> bool:
    """Whether the engine is asked which experts it chose; never for a model without."""
    if routing_of(config) is None or config.algo.loss_type == "sft_loss":
        return False
    if config.moe.log_routing_agreement is None:
        is_at_hand = config.cluster.engine == "embedded" and not is_served(config)
        return config.moe.use_rollout_routing_replay or is_at_hand
    return config.moe.use_rollout_routing_replay or config.moe.log_routing_agreement


def routing_of(config: Config) -> RoutingShape | None:
    """How the model sends tokens to experts, by its config.json; None for one without, or where there is no file."""
    path = Path(str(config.rollout.hf_checkpoint)) / "config.json"
    if not path.is_file():
        return None
    values: dict[str, Any] = json.loads(path.read_text())
    return RoutingShape.of(values)


def moe_problems(config: Config) -> Iterator[str]:
    """Yield every problem as one message. `config` has its derived values."""
    specs = flag_specs(Config)
    given = [name for name in vars(config.moe) if getattr(config.moe, name) != specs[name].default]
    if not given:
        return
    if routing_of(config) is None and (Path(str(config.rollout.hf_checkpoint)) / "config.json").is_file():
        for name in given:
            yield f"{specs[name].flag} has no effect: config.json of {config.rollout.hf_checkpoint} names no experts"
        return
    if config.algo.loss_type == "sft_loss":
        for name in given:
            if name in (*NEED_ENGINE, "use_routing_replay"):
                yield f"{specs[name].flag} has no effect with --loss-type sft_loss, which has no rollout; remove it"
    if config.debug.debug_rollout_only and config.moe.use_routing_replay:
        yield "--use-routing-replay has no effect with --debug-rollout-only, which trains nothing; remove it"
    if config.moe.use_rollout_routing_replay and config.moe.log_routing_agreement is not None:
        no = "" if config.moe.log_routing_agreement else "no-"
        yield f"--{no}log-routing-agreement has no effect: --use-rollout-routing-replay logs it; remove one of them"
    if not config.algo.compute_advantages_and_returns and config.moe.use_routing_replay:
        yield (
            "--use-routing-replay has no effect with --disable-compute-advantages-and-returns: no log-prob pass is "
            "run; remove one of them"
        )
