"""Routing replay: the source of expert choices in the trainer's forward passes.

- "none": the routers;
- "policy" (R2): the policy's routers in the log-prob pass before the first optimizer step;
- "rollout" (R3): the engine during generation, for log-prob passes and training.

Gating weights always come from the routers, so routers are trained. The reference and a teacher use their own routers.
Choices recorded by the engine are compared with the routers' choices whether they are replayed or not.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from furlong.core.batch import MicroBatch
from furlong.core.metric import Metric, Metrics
from furlong.errors import TrainerError
from furlong.interfaces import Role

Replay = Literal["none", "policy", "rollout"]

REPLAYED: tuple[Role, ...] = ("actor", "old_actor")  # models that the engine serves or has served


def is_replayed(replay: Replay, micro: MicroBatch) -> bool:
    """Return whether a pass over `micro` replays choices. Raises TrainerError if the engine's choices are missing."""
    if replay == "rollout" and micro.routed_experts_TLK is None:
        raise TrainerError(
            "--use-rollout-routing-replay: the batch has no routed experts; the engine must return them, and a custom "
            "generate or rollout function, or a dump, must keep them in Sample.rollout_routed_experts"
        )
    return replay == "rollout" or (replay == "policy" and micro.policy_routes is not None)


def agreement(micro: MicroBatch, rerouted_R: Tensor | None) -> Metrics:
    """Return `routing_agreement`: the share of the engine's expert choices that the trainer's routers also make."""
    if rerouted_R is None:
        return {}
    is_known_R = (micro.mask_R > 0) & ~torch.isnan(rerouted_R)
    weight = is_known_R.sum()
    shared, count = torch.stack([weight - rerouted_R.nan_to_num() @ is_known_R.to(rerouted_R.dtype), weight]).tolist()
    return {"routing_agreement": Metric(shared, count)}
