"""Placement of a run's processes: one slot per GPU, in hardware order.

Slots are bundles of one Ray placement group. A request that the cluster can never satisfy is refused immediately, with
the numbers. While other jobs use the GPUs, the missing ones are logged every `REPORT_S` seconds.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from furlong.cluster.ray_session import Node, check_fits, listed
from furlong.config.topology import Topology
from furlong.errors import PLACEMENT_TIMEOUT, ClusterError

logger = logging.getLogger(__name__)

REPORT_S = 30.0  # between two log lines while waiting
PROBE_S = 120.0  # for a slot to report its GPU

OnEvent = Callable[..., None]  # (name, **fields)


@dataclass(frozen=True)
class Slot:
    """One bundle: its machine, its GPU on that machine (None: a CPU), and its index in the group."""

    bundle: int
    node_id: str
    address: str
    gpu: int | None


@dataclass(frozen=True)
class Placement:
    """The slots of a run; trainer rank i is on `trainers[i]`, engine e on `engines[e]`."""

    group: PlacementGroup
    trainers: Sequence[Slot]
    engines: Sequence[Sequence[Slot]]

    def strategy(self, slot: Slot) -> PlacementGroupSchedulingStrategy:
        """Return the scheduling strategy that places an actor on this slot."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=slot.bundle)

    def release(self) -> None:
        """Release the slots; their processes end."""
        remove_placement_group(self.group)


def place(topology: Topology, *, timeout_s: float, on_event: OnEvent) -> Placement:
    """Reserve the slots of a run. Raises ConfigError for more than the cluster has, ClusterError after `timeout_s`.

    `on_event` receives `placement_waiting` (seconds, asked, free, lacking) for the monitors.
    """
    nodes = live_nodes()
    resource = _resource()
    check_fits(topology, nodes, resource)
    bundle = {"GPU": 1, "CPU": 1} if resource == "GPU" else {"CPU": 1}
    group = placement_group([dict(bundle) for _ in range(topology.num_gpus)], strategy="PACK")
    try:
        _wait(group, topology, resource, timeout_s, on_event)
        slots = in_hardware_order(_slots(group, resource))
        return _assigned(group, slots, topology)
    except BaseException:
        remove_placement_group(group)
        raise


def live_nodes() -> list[Node]:
    """Return the machines of the connected cluster, in the order of their addresses; GPUs if any machine has one."""
    free: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()  # pyright: ignore
    resource = _resource()
    nodes = [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            total=int(node["Resources"].get(resource, 0)),
            free=int(free.get(node["NodeID"], {}).get(resource, 0)),
        )
        for node in _alive()
    ]
    return sorted((node for node in nodes if node.total), key=lambda node: _address_key(node.address))


def _resource() -> str:
    return "GPU" if any(node["Resources"].get("GPU") for node in _alive()) else "CPU"


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def in_hardware_order(slots: Sequence[Slot]) -> list[Slot]:
    """Sort slots by machine (numerically by address), then GPU: neighboring ranks get neighboring GPUs."""
    return sorted(slots, key=lambda s: (_address_key(s.address), s.node_id, -1 if s.gpu is None else s.gpu, s.bundle))


def _address_key(address: str) -> tuple[tuple[int, int | str], ...]:
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in address.split("."))


def _assigned(group: PlacementGroup, slots: Sequence[Slot], topology: Topology) -> Placement:
    """Assign slots: trainers first, engines from their offset. Raises ClusterError if one spans machines wrongly."""
    trainers = slots[: topology.num_ranks]
    start = topology.engine_offset
    engines = [slots[start + first : start + first + size] for first, size in topology.engine_parts]
    parts = {f"trainer node {i}": trainers[i * topology.gpus_per_node : (i + 1) * topology.gpus_per_node]
              for i in range(topology.num_nodes)}  # fmt: skip
    for e, engine in enumerate(engines):
        per_node = min(len(engine), topology.engine_node_gpus)
        parts |= {f"engine {e}": engine[i : i + per_node] for i in range(0, len(engine), per_node)}
    for name, part in parts.items():
        if len({slot.node_id for slot in part}) > 1:
            raise ClusterError(
                f"Ray gave {name} GPUs on several machines ({', '.join(sorted({slot.address for slot in part}))}), "
                "because other jobs use some of each; wait until whole machines are free, or request counts that "
                "divide what is free on each"
            )
    for e, engine in enumerate(engines):
        counts = Counter(slot.address for slot in engine)
        if len(set(counts.values())) > 1:
            where = ", ".join(f"{count} of {address}" for address, count in counts.items())
            raise ClusterError(
                f"engine {e} spans machines with unequal numbers of GPUs, {where}; SGLang requires the same number on "
                "each. Set --num-gpus-per-node to the GPUs of a machine, and --rollout-num-gpus-per-engine to a "
                "multiple of it or to a number that fits on one machine"
            )
    return Placement(group, trainers, engines)


def _wait(group: PlacementGroup, topology: Topology, resource: str, timeout_s: float, on_event: OnEvent) -> None:
    started = time.monotonic()
    while True:
        left = timeout_s - (time.monotonic() - started)
        if group.wait(timeout_seconds=max(math.ceil(min(REPORT_S, left)), 0)):  # Ray cuts parts of seconds off
            return
        nodes = live_nodes()
        free = sum(node.free for node in nodes)
        waited = time.monotonic() - started
        what = (
            f"waiting for {topology.sum} {resource}s since {waited:.0f} s: {free} are free, "
            f"{max(topology.num_gpus - free, 0)} are missing ({listed(nodes)})"
        )
        if waited >= timeout_s:
            raise ClusterError(
                f"{what}; others hold them. End those, or wait longer than --placement-timeout {timeout_s:g}",
                code=PLACEMENT_TIMEOUT,
            )
        logger.warning("%s; giving up after --placement-timeout %g", what, timeout_s)
        on_event(
            "placement_waiting",
            seconds=round(waited, 1),
            asked=f"{topology.num_gpus} {resource}s",
            free=free,
            lacking="; ".join(str(node) for node in nodes if node.free < node.total),
        )


def _slots(group: PlacementGroup, resource: str) -> list[Slot]:
    on_node: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node.node_id: node.address for node in live_nodes()}
    gpus: dict[int, int | None] = dict.fromkeys(on_node)
    if resource == "GPU":
        probes = {
            bundle: _slot_gpu.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            ).remote()
            for bundle in on_node
        }
        gpus |= dict(zip(probes, ray.get(list(probes.values()), timeout=PROBE_S), strict=True))
    return [Slot(bundle, node_id, addresses[node_id], gpus[bundle]) for bundle, node_id in on_node.items()]


@ray.remote(num_gpus=1, num_cpus=1)
def _slot_gpu() -> int:
    return int(ray.get_gpu_ids()[0])
