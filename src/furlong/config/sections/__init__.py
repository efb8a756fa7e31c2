"""The configuration: one attribute per section, one field per flag. Flat names are slime's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from furlong.config.sections.algo import AlgoFlags
from furlong.config.sections.cluster import ClusterFlags, EnginesFlags, SyncFlags
from furlong.config.sections.megatron import ArchitectureFlags, MegatronFlags, MoeFlags
from furlong.config.sections.opd import OpdFlags
from furlong.config.sections.rollout import DataFlags, EvalFlags, RewardFlags, RolloutFlags
from furlong.config.sections.run import CheckpointFlags, DebugFlags, FaultFlags, TrackFlags
from furlong.config.sections.sessions import SessionFlags
from furlong.config.sections.train import OptimFlags, TrainFlags


@dataclass(frozen=True)
class Config:
    """The configuration of a run, frozen.

    >>> Config().rollout.rollout_temperature
    1.0
    """

    rollout: RolloutFlags = field(default_factory=RolloutFlags)
    data: DataFlags = field(default_factory=DataFlags)
    reward: RewardFlags = field(default_factory=RewardFlags)
    eval: EvalFlags = field(default_factory=EvalFlags)
    session: SessionFlags = field(default_factory=SessionFlags)
    algo: AlgoFlags = field(default_factory=AlgoFlags)
    opd: OpdFlags = field(default_factory=OpdFlags)
    train: TrainFlags = field(default_factory=TrainFlags)
    megatron: MegatronFlags = field(default_factory=MegatronFlags)
    moe: MoeFlags = field(default_factory=MoeFlags)
    architecture: ArchitectureFlags = field(default_factory=ArchitectureFlags)
    optim: OptimFlags = field(default_factory=OptimFlags)
    checkpoint: CheckpointFlags = field(default_factory=CheckpointFlags)
    track: TrackFlags = field(default_factory=TrackFlags)
    cluster: ClusterFlags = field(default_factory=ClusterFlags)
    engines: EnginesFlags = field(default_factory=EnginesFlags)
    sync: SyncFlags = field(default_factory=SyncFlags)
    fault: FaultFlags = field(default_factory=FaultFlags)
    debug: DebugFlags = field(default_factory=DebugFlags)


def by_field(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values of section -> field -> value, as `config.json` has them, by field alone: no two sections share one."""
    return {field: value for flags in sections.values() for field, value in flags.items()}


__all__ = [
    "AlgoFlags",
    "ArchitectureFlags",
    "CheckpointFlags",
    "ClusterFlags",
    "Config",
    "DataFlags",
    "DebugFlags",
    "EnginesFlags",
    "EvalFlags",
    "FaultFlags",
    "MegatronFlags",
    "MoeFlags",
    "OpdFlags",
    "OptimFlags",
    "RewardFlags",
    "RolloutFlags",
    "SessionFlags",
    "SyncFlags",
    "TrackFlags",
    "TrainFlags",
    "by_field",
]
