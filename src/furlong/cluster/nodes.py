"""The machines of a Ray cluster, and whether a run fits on them. Does not import Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from furlong.config.topology import Topology
from furlong.errors import ConfigError


@dataclass(frozen=True)
class Node:
    """One machine of the cluster with its GPUs, or CPU slots."""

    node_id: str
    address: str
    total: int
    free: int

    def __str__(self) -> str:
        return f"{self.address}: {self.free} of {self.total} free"


def check_fits(topology: Topology, nodes: Sequence[Node], resource: str) -> None:
    """Raise ConfigError if the request can never be placed on these machines, with the numbers and what would fit."""
    shortage = topology.shortage(sum(node.total for node in nodes))
    if shortage and resource == "CPU":
        shortage += " (no machine has a GPU: a slot is a CPU)"
    if shortage:
        raise ConfigError(f"{shortage}. By machine: {listed(nodes)}")
    largest = max(node.total for node in nodes)
    if topology.num_ranks and topology.gpus_per_node > largest:
        raise ConfigError(
            f"--actor-num-gpus-per-node {topology.gpus_per_node}: the largest machine has {largest} GPUs "
            f"({listed(nodes)}); use --actor-num-nodes {-(-topology.num_ranks // largest)} "
            f"--actor-num-gpus-per-node {largest}"
        )


def listed(nodes: Sequence[Node]) -> str:
    """Describe machines for a message; at most 8."""
    shown = "; ".join(map(str, nodes[:8]))
    return f"{shown}; and {len(nodes) - 8} more" if len(nodes) > 8 else shown
