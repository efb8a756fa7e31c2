"""How many GPUs a run takes, and which part of them trains or generates: slime's arithmetic, without any cluster.

On machines without GPUs a GPU is a slot for one process on a CPU, so that the same flags run there.
"""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.checks.engine_checks import is_started
from furlong.config.engine_groups import engine_groups, engine_parts
from furlong.config.sections import Config
from furlong.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """Counts in GPUs. `split`: (first GPU, GPUs) of each engine where they are not all alike.

    `num_engine_gpus` 0: engines are in the driver's process, outside the cluster, or not needed.

    >>> Topology(num_nodes=4, gpus_per_node=8, num_engine_gpus=16, gpus_per_engine=2, is_colocated=False).num_gpus
    48
    """

    num_nodes: int = 1
    gpus_per_node: int = 1
    num_engine_gpus: int = 0
    gpus_per_engine: int = 1
    is_colocated: bool = False
    engine_node_gpus: int = 8
    split: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(config: Config) -> Topology:
        """The topology that the flags ask for. `config` has its derived values."""
        cluster, debug = config.cluster, config.debug
        trains = not debug.debug_rollout_only
        return Topology(
            num_nodes=cluster.actor_num_nodes if trains else 0,
            gpus_per_node=cluster.actor_num_gpus_per_node,
            num_engine_gpus=int(config.engines.rollout_num_gpus or 0) if is_started(config) else 0,
            gpus_per_engine=config.engines.rollout_num_gpus_per_engine,
            is_colocated=cluster.colocate,
            engine_node_gpus=cluster.num_gpus_per_node,
            split=_split(config),
        )

    @property
    def num_ranks(self) -> int:
        """Training processes, one a GPU."""
        return self.num_nodes * self.gpus_per_node

    @property
    def num_engines(self) -> int:
        """Inference engines that are placed."""
        return len(self.engine_parts)

    @property
    def engine_parts(self) -> tuple[tuple[int, int], ...]:
        """First GPU, counted over those of engines, and number of GPUs of each engine."""
        each = self.gpus_per_engine
        return self.split or tuple((i * each, each) for i in range(self.num_engine_gpus // each))

    @property
    def engine_offset(self) -> int:
        """The first GPU of the engines, counted over all of the run."""
        return 0 if self.is_colocated else self.num_ranks

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole run."""
        return max(self.num_ranks, self.engine_offset + self.num_engine_gpus)

    @property
    def sum(self) -> str:
        """The arithmetic, to show: `2 x 8 + 16 = 32`."""
        trainers = f"{self.num_nodes} x {self.gpus_per_node}" if self.num_nodes > 1 else str(self.num_ranks)
        if not self.num_engine_gpus:
            return trainers if self.num_nodes <= 1 else f"{trainers} = {self.num_ranks}"
        if not self.num_ranks:
            return f"{self.num_engine_gpus}"
        if self.is_colocated:
            return f"max({trainers}, {self.num_engine_gpus}) = {self.num_gpus}"
        return f"{trainers} + {self.num_engine_gpus} = {self.num_gpus}"

    def shortage(self, available: int) -> str:
        """Why `available` GPUs are too few, with the sum and what would fit; "" if they are enough."""
        if available >= self.num_gpus:
            return ""
        message = f"the run needs {self.sum} GPUs, the cluster has {available}"
        ways: list[str] = []
        if not self.is_colocated and self.num_ranks and self.num_engine_gpus:
            shared = max(self.num_ranks, self.num_engine_gpus)
            if shared <= available:
                ways.append(f"--colocate would need {shared}")
            left = (available - self.num_ranks) // self.gpus_per_engine * self.gpus_per_engine
            if left > 0:
                ways.append(f"--rollout-num-gpus {left} would fit beside the trainer")
        if not ways:
            ways.append("lower --actor-num-nodes, --actor-num-gpus-per-node or --rollout-num-gpus, or add machines")
        return f"{message}; {', '.join(ways)}"


def _split(config: Config) -> tuple[tuple[int, int], ...]:
    if config.engines.sglang_config is None or not is_started(config):
        return ()
    try:
        groups = engine_groups(config)
    except ConfigError:  # validate says what is wrong with the file
        return ()
    return tuple((part.first_gpu, part.num_gpus) for part in engine_parts(groups))


def uses_ray(config: Config) -> bool:
    """Whether the run has processes that Ray places: several training ranks, or --ray-address.

    One trainer with engines on the same machine needs none.
    """
    return config.cluster.ray_address is not None or Topology.of(config).num_ranks > 1
