"""Routing replay: which experts a trainer's forward passes use.

- "none": those that its routers choose;
- "policy" (R2): those that the policy's routers chose in the log-prob pass before the first optimizer step;
- "rollout" (R3): those that the engine chose when it generated, in the log-prob passes and in training.

The gating weights of the experts are always the routers' own, so these are trained. The reference and a teacher are
models of their own, and choose for themselves. What the engine recorded is compared with what the routers would choose
whether it is replayed or not.
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

REPLAYED: tuple[Role, ...] = ("actor", "old_actor")  # models that the engine had, or has


def is_replayed(replay: Replay, micro: MicroBatch) -> bool:
    """Whether a pass over `micro` uses a record. Raises TrainerError if the engine's is wanted and is not there."""
    if replay == "rollout" and micro.routed_experts_TLK is None:
        raise TrainerError(
            "--use-rollout-routing-replay: the batch has no routed experts; the engine must return them, and a custom "
            "generate or rollout function, or a dump, must hand them on in Sample.rollout_routed_experts"
        )
    return replay == "rollout" or (replay == "policy" and micro.policy_routes is not None)


def agreement(micro: MicroBatch, rerouted_R: Tensor | None) -> Metrics:
    """`routing_agreement`: share of the engine's choices that are the trainer's too, over the trained tokens."""
    if rerouted_R is None:
        return {}
    is_known_R = (micro.mask_R > 0) & ~torch.isnan(rerouted_R)
    weight = is_known_R.sum()
    shared, count = torch.stack([weight - rerouted_R.nan_to_num() @ is_known_R.to(rerouted_R.dtype), weight]).tolist()
    return {"routing_agreement": Metric(shared, count)}
