"""GPU counts of a run and their split between training and inference, as in slime; needs no cluster.

On machines without GPUs, a GPU is a CPU slot for one process, so that the same flags work there.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from furlong.config.engine_groups import EnginePart, engine_groups, engine_parts
from furlong.config.facts import is_started
from furlong.config.sections import Config
from furlong.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """Numbers of GPUs. `split` is (first GPU, number of GPUs) of each engine, if they differ.

    `num_engine_gpus` is 0 if engines are in the driver process, outside the cluster, or not needed.

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
        """Return the topology of a configuration with derived values."""
        cluster, debug = config.cluster, config.debug
        trains = not debug.debug_rollout_only
        split: list[EnginePart] = []
        if config.engines.sglang_config is not None and is_started(config):
            with contextlib.suppress(ConfigError):  # validate reports the problems of the file
                split = engine_parts(engine_groups(config))
        return Topology(
            num_nodes=cluster.actor_num_nodes if trains else 0,
            gpus_per_node=cluster.actor_num_gpus_per_node,
            num_engine_gpus=int(config.engines.rollout_num_gpus or 0) if is_started(config) else 0,
            gpus_per_engine=config.engines.rollout_num_gpus_per_engine,
            is_colocated=cluster.colocate,
            engine_node_gpus=cluster.num_gpus_per_node,
            split=tuple((part.first_gpu, part.num_gpus) for part in split),
        )

    @property
    def num_ranks(self) -> int:
        """Number of training processes, one per GPU."""
        return self.num_nodes * self.gpus_per_node

    @property
    def num_engines(self) -> int:
        """Number of inference engines with GPUs."""
        return len(self.engine_parts)

    @property
    def engine_parts(self) -> tuple[tuple[int, int], ...]:
        """First GPU, counted over the engines' GPUs, and number of GPUs of each engine."""
        each = self.gpus_per_engine
        return self.split or tuple((i * each, each) for i in range(self.num_engine_gpus // max(each, 1)))

    @property
    def engine_offset(self) -> int:
        """First GPU of the engines, counted over all GPUs of the run."""
        return 0 if self.is_colocated else self.num_ranks

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the run."""
        return max(self.num_ranks, self.engine_offset + self.num_engine_gpus)

    @property
    def sum(self) -> str:
        """The sum for messages: `2 x 8 + 16 = 32`."""
        trainers = f"{self.num_nodes} x {self.gpus_per_node}" if self.num_nodes > 1 else str(self.num_ranks)
        if not self.num_engine_gpus:
            return trainers if self.num_nodes <= 1 else f"{trainers} = {self.num_ranks}"
        if not self.num_ranks:
            return f"{self.num_engine_gpus}"
        if self.is_colocated:
            return f"max({trainers}, {self.num_engine_gpus}) = {self.num_gpus}"
        return f"{trainers} + {self.num_engine_gpus} = {self.num_gpus}"

    def shortage(self, available: int) -> str:
        """Return why `available` GPUs are too few, with the sum and what would fit; "" if they suffice."""
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
                ways.append(f"--rollout-num-gpus {left} would fit next to the trainer")
        if not ways:
            ways.append("lower --actor-num-nodes, --actor-num-gpus-per-node or --rollout-num-gpus, or add machines")
        return f"{message}; {', '.join(ways)}"


def uses_ray(config: Config) -> bool:
    """Whether the run uses Ray: with several training ranks, or --ray-address.

    One trainer with engines on the same machine does not.
    """
    return config.cluster.ray_address is not None or Topology.of(config).num_ranks > 1
