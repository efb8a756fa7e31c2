"""Slots in the order of the hardware, and requests that can never be placed. No cluster runs."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest

from furlong.cluster import gpu_placement as placement
from furlong.cluster.gpu_placement import Node, Slot, _assigned, _wait, check_fits, in_hardware_order
from furlong.config.topology import Topology
from furlong.errors import ClusterError, ConfigError

NODES = [Node("a", "10.0.0.2", 8, 3), Node("b", "10.0.0.10", 8, 8)]


def test_slots_are_ordered_by_machine_and_gpu():
    expected = [Slot(i, node, address, gpu) for i, (node, address, gpu) in enumerate(
        [("b", "10.0.0.2", 0), ("b", "10.0.0.2", 1), ("b", "10.0.0.2", 10), ("a", "10.0.0.10", 0)]
    )]  # fmt: skip
    mixed = expected[:]
    random.Random(0).shuffle(mixed)
    assert in_hardware_order(mixed) == expected


def test_slots_without_gpus_keep_the_order_of_their_numbers():
    slots = [Slot(i, "a", "127.0.0.1", None) for i in (2, 0, 1)]
    assert [slot.bundle for slot in in_hardware_order(slots)] == [0, 1, 2]


def test_a_request_that_fits_passes_even_while_others_hold_gpus():
    check_fits(Topology(num_nodes=2, gpus_per_node=8), NODES, "GPU")


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (Topology(num_nodes=4, gpus_per_node=8), ["4 x 8 = 32 GPUs, the cluster has 16", "10.0.0.2: 3 of 8 free"]),
        (Topology(gpus_per_node=16), ["the largest machine has 8", "--actor-num-nodes 2 --actor-num-gpus-per-node 8"]),
        (Topology(gpus_per_node=8, num_engine_gpus=16), ["8 + 16 = 24", "--colocate would need 16"]),
    ],
)
def test_a_placement_that_can_never_succeed_is_refused_with_a_fix(topology, words):
    with pytest.raises(ConfigError) as caught:
        check_fits(topology, NODES, "GPU")
    assert all(word in str(caught.value) for word in words), caught.value


def test_slots_on_cpus_are_called_so():
    with pytest.raises(ConfigError, match="no machine has a GPU: a slot is a CPU"):
        check_fits(Topology(gpus_per_node=4), [Node("a", "127.0.0.1", 2, 2)], "CPU")


def test_an_engine_has_equally_many_gpus_of_each_of_its_machines():
    slots = [Slot(0, "a", "10.0.0.1", 0), *(Slot(1 + i, "b", "10.0.0.2", i) for i in range(3))]
    halves = Topology(num_nodes=0, num_engine_gpus=2, gpus_per_engine=2, engine_node_gpus=1)
    assert _assigned(None, slots[:2], halves).engines == [slots[:2]]  # type: ignore[arg-type]
    torn = Topology(num_nodes=0, num_engine_gpus=4, gpus_per_engine=4, engine_node_gpus=1)
    with pytest.raises(ClusterError, match=r"machines.*, 1 of 10\.0\.0\.1, 3 of 10\.0\.0\.2; .*--num-gpus-per-node"):
        _assigned(None, slots, torn)  # type: ignore[arg-type]


def test_waiting_for_slots_is_logged_every_30_seconds_until_the_deadline(monkeypatch, caplog):
    now = [0.0]

    def wait(timeout_seconds: float) -> bool:  # Ray counts whole seconds; looking takes a moment, too
        now[0] += int(timeout_seconds) + 0.01
        return False

    monkeypatch.setattr(placement, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(placement, "live_nodes", lambda: NODES)
    told: list[str] = []
    topology = Topology(gpus_per_node=12)
    with caplog.at_level(logging.WARNING), pytest.raises(ClusterError, match=r"since 70 s: 11 are free, 1 are missing"):
        _wait(SimpleNamespace(wait=wait), topology, "GPU", 70.0, lambda name, **_: told.append(name))  # type: ignore[arg-type]
    assert told == ["placement_waiting"] * 2
    assert len(caplog.records) == 2
