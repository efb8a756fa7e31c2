"""Runs on a Ray cluster of two machines, which are two sets of Ray's processes here, each with its own address."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import killing_reward
from diagnosed_runs import told
from faults_marker import fault
from forked_ray import RayWorkers
from furlong.cluster.ray_session import cluster_nodes
from furlong.config.topology import Topology
from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics
from furlong.data.audit import audit
from furlong.errors import ClusterError, ConfigError
from ray_machines import connected_machines
from runs import Row, flags, rows, train, write_model, write_prompts

pytestmark = pytest.mark.nightly

HEAD, OTHER = "127.0.0.1", "127.0.0.2"
SLOTS = {HEAD: 1, OTHER: 3}
# Stands in for SGLang over several machines: the processes of an engine meet, then the first one serves.
LAUNCH_SERVER = """
import argparse, os, socket, sys, time
parser = argparse.ArgumentParser()
names = "model-path host port nnodes node-rank dist-init-addr tp-size random-seed api-key"
for name in names.split():
    parser.add_argument("--" + name)
args, _ = parser.parse_known_args()
host, _, port = args.dist_init_addr.partition(":")
print(f"node {args.node_rank} of {args.nnodes} on {args.host}, tp {args.tp_size}, key {args.api_key[::-1]}", flush=True)
if args.node_rank == "0":
    listener = socket.create_server((host, int(port)))
    for _ in range(int(args.nnodes) - 1):
        peer, _ = listener.accept()
        peer.set_inheritable(True)
    os.environ["FURLONG_API_KEY"] = args.api_key
    serve = ["serve", "--model-path", args.model_path, "--host", args.host, "--port", args.port]
    os.execv(sys.executable, [sys.executable, "-m", "furlong", *serve, "--random-seed", args.random_seed])
while True:
    try:
        peer = socket.create_connection((host, int(port)))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
peer.recv(1)  # until the first one is gone
sys.exit("the first node is gone")
"""
GROUPS = """
sglang:
  - name: default
    server_groups:
      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2}
      - {worker_type: placeholder, num_gpus: 2}
"""
NUM, SAVED = 5, 3  # rollouts of the whole run, and of its first part
# Adam would divide gradients that are rounding noise by themselves, and after two steps nothing would be comparable.
HOW = {"optimizer": "sgd", "lr": 0.1}
CLOSE = {"train/loss": 1e-6, "train/grad_norm": 1e-4, "rollout/raw_reward": 0.0, "rollout/response_len/mean": 0.0}


@pytest.fixture(scope="module")
def cluster(ray_workers: RayWorkers) -> Iterator[None]:
    """Two machines with a slot and with three."""
    with connected_machines({address: {"num_cpus": num_slots} for address, num_slots in SLOTS.items()}):
        yield


def test_a_cluster_is_asked_for_its_machines_before_a_run(cluster: None) -> None:
    import ray

    nodes, resource = cluster_nodes(ray.get_runtime_context().gcs_address)
    assert ({node.address: node.total for node in nodes}, resource) == (SLOTS, "CPU")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts, and a run in one process: what the others are compared with."""
    folder = tmp_path_factory.mktemp("recorded")
    model, data = write_model(folder / "model"), write_prompts(folder / "prompts.jsonl")
    train(flags(model, data, folder / "run", num_rollout=NUM, **HOW))
    return folder


def assert_equal_within_rounding(found: list[Row], expected: list[Row]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for there, here in zip(found, expected, strict=True):
        for name, tolerance in CLOSE.items():
            assert there[name] == pytest.approx(here[name], rel=tolerance, abs=tolerance), (there["step"], name)


def test_two_ranks_on_two_machines_train_as_one_process_does_while_one_of_two_engines_is_killed(
    cluster, recorded, tmp_path, monkeypatch
):
    from furlong.cluster.ray_trainer import RayTrainer  # imports Ray, which reads its settings then

    output, train_on_ranks = tmp_path / "run", RayTrainer.train

    async def kill_and_train(trainer: RayTrainer, batch: RolloutBatch) -> Metrics:
        if batch.rollout_id == 1:
            [port] = re.findall(r"engine 0: .* --port (\d+) ", (output / "run.log").read_text())
            for process in psutil.process_iter(["cmdline"]):
                if port in (process.info["cmdline"] or ()) and "serve" in process.info["cmdline"]:
                    process.kill()
        return await train_on_ranks(trainer, batch)

    monkeypatch.setattr(RayTrainer, "train", kill_and_train)
    argv = flags(
        recorded / "model", recorded / "prompts.jsonl", output, num_rollout=SAVED, actor_num_nodes=2,
        rollout_num_gpus=2, save=recorded / "save", async_save=True, use_fault_tolerance=True, ray_address="auto",
        sglang_router_strategy="round_robin", **HOW,
    )  # fmt: skip
    assert train(argv) == SAVED
    log = (output / "run.log").read_text()
    assert_equal_within_rounding(rows(output), rows(recorded / "run")[:SAVED])
    assert re.search("engine_lost: engine 0 .*was ended by signal 9", log)
    assert audit(output / "ledger.jsonl", finished=True).ok
    # A random model finds any text unlikely, and never ends.
    assert {"ENG03"} <= set(told(output)) <= {"ENG03", "TPL03", "STOP02"}
    for rank, address in enumerate((HEAD, OTHER)):
        assert re.search(rf"trainer rank {rank}, process \d+ on \S+ \({address}\)", log)
        assert f"rank {rank} of 2, on a CPU" in (output / "logs" / f"trainer-rank-{rank}.log").read_text()
    assert len(set(re.findall(rf"engine (http://{OTHER}:\d+)", log))) >= 2
    assert "sglang_router.launch_router" in log


def test_next_run_resumes_from_that_checkpoint_on_shared_slots(cluster, recorded, tmp_path):
    argv = flags(
        recorded / "model", recorded / "prompts.jsonl", tmp_path / "run", num_rollout=NUM, actor_num_gpus_per_node=2,
        colocate=True, load=recorded / "save", trace=True, **HOW,
    )  # fmt: skip
    assert train(argv) == NUM
    assert_equal_within_rounding(rows(tmp_path / "run"), rows(recorded / "run")[SAVED:])
    assert "by ipc" in (tmp_path / "run" / "run.log").read_text()
    traced = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in traced if event["name"] == "process_name"]
    assert {"driver", "trainer rank 0", "trainer rank 1"} < set(names)
    assert sum(name.startswith("engine ") for name in names) == 2
    shared = ("perf/sleep_time", "perf/wake_up_time", "perf/offload_rollout_time", "perf/onload_rollout_time")
    assert all(row[name] > 0 for row in rows(tmp_path / "run") for name in shared)
    assert all(found["severity"] == "info" for found in told(tmp_path / "run").values())  # what it resumes from


@fault("GPU02")
def test_a_run_that_waits_for_slots_names_them(cluster, recorded, tmp_path, monkeypatch):
    from furlong.cluster import gpu_placement as placement

    monkeypatch.setattr(placement, "REPORT_S", 1.0)
    others = placement.place(Topology(gpus_per_node=1, num_engine_gpus=3), timeout_s=30, on_event=lambda *_, **__: None)
    argv: list[Any] = flags(
        recorded / "model", recorded / "prompts.jsonl", tmp_path / "run", rollout_num_gpus=1, placement_timeout=2,
        actor_num_nodes=2,
    )  # fmt: skip
    try:
        with pytest.raises(ClusterError, match=r"0 are free, 3 are missing .* longer than --placement-timeout 2"):
            train(argv)
    finally:
        others.release()
    placement.place(Topology(num_nodes=2, num_engine_gpus=1), timeout_s=30, on_event=lambda *_, **__: None).release()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    waiting = next(event for event in events if event["event"] == "diagnosis" and event["id"] == "GPU02")
    for shown in ("3 CPUs", "127.0.0.1: 0 of 1 free; 127.0.0.2: 0 of 3 free"):
        assert shown in waiting["finding"]
    assert "--colocate" in waiting["remedy"]


def test_more_ranks_than_slots_are_refused_with_the_arithmetic(cluster, recorded, tmp_path):
    argv: list[Any] = flags(
        recorded / "model", recorded / "prompts.jsonl", tmp_path / "run", actor_num_nodes=2, actor_num_gpus_per_node=2,
        rollout_num_gpus=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"needs 2 x 2 \+ 1 = 5 GPUs, the cluster has 4; .*127.0.0.1: [01] of 1 free"):
        train(argv)


def test_flags_that_need_a_gpu_are_refused_if_the_cluster_has_none(cluster, recorded, tmp_path):
    data = recorded / "prompts.jsonl"
    argv = flags(
        recorded / "model", data, tmp_path / "run", actor_num_nodes=2, rollout_num_gpus=1, record_memory_history=True
    )
    with pytest.raises(ConfigError, match="--record-memory-history"):
        train(argv)


def test_an_engine_over_two_machines_serves_and_is_lost_with_either(cluster, recorded, tmp_path, monkeypatch):
    package, output = tmp_path / "site" / "sglang", tmp_path / "run"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(LAUNCH_SERVER)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv(killing_reward.VICTIM, f"sglang.launch_server .*{recorded / 'model'} .*--node-rank 1")
    (tmp_path / "engines.yaml").write_text(GROUPS)
    argv = flags(
        recorded / "model", recorded / "prompts.jsonl", output, num_rollout=3, ray_address="auto", engine="sglang",
        sglang_config=tmp_path / "engines.yaml", num_gpus_per_node=1, debug_rollout_only=True,
        sglang_api_key="hidden", use_fault_tolerance=True, rollout_max_engine_restarts=1, **killing_reward.FLAGS,
    )  # fmt: skip
    assert train(argv) == 3
    first, second = ((output / "logs" / f"engine-0{node}.log").read_text() for node in ("", "-node-1"))
    assert first.count(f"node 0 of 2 on {HEAD}, tp 2, key neddih") == 2
    assert second.count(f"node 1 of 2 on {OTHER}, tp 2, key neddih") == 2
    log = (output / "run.log").read_text()
    assert re.search(rf"engine_lost: engine 0 at http://{HEAD}:\d+: process \d+ on {OTHER} was ended by signal 9", log)
    assert "engine_restarted: engine 0" in log
    assert "hidden" not in first + second + log
    assert "ASYNC01" not in told(output)  # nobody promises that weights change
