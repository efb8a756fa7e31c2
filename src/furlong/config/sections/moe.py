"""Mixtures of experts: which experts tokens go to, and what keeps these evenly used."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.flag import flag


@dataclass(frozen=True)
class MoeFlags:
    """Routing of tokens to experts in training."""

    use_routing_replay: bool = flag(
        False,
        "Train with the experts that the policy chose in the log-prob pass before the first optimizer step, which is "
        "then always run; gating weights are computed anew.",
    )
    use_rollout_routing_replay: bool = flag(
        False,
        "Train, and compute log-probs of the policy, with the experts that the engine chose when it generated; goes "
        "before --use-routing-replay.",
    )
    log_routing_agreement: bool | None = flag(
        None,
        "Have the engine say which experts it chose, and log the share of them that the trainer chooses, too "
        "(`train/routing_agreement`). Without it: with --use-rollout-routing-replay, and with an embedded engine in "
        "this process.",
    )
