"""Faults of the machine that are found before a run starts: files, versions, memory, GPUs, ports."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.world import names, only
from faults_marker import fault
from furlong.catalogue import Diagnosis
from furlong.cli import main
from furlong.cluster.ray_session import Node, _refusal
from furlong.commands.serve import taken_port
from furlong.config.command_line import examine
from furlong.diagnosis.preflight import machine_checks as machine
from furlong.run.launch import findings_before_run
from furlong.tools import memory_plan as memory
from runs import flags


def test_files_that_this_user_may_not_read_or_write(world, monkeypatch):
    locked = {world.model / "config.json"}
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path) not in locked)  # tests may run as root
    assert f"{world.model}/config.json" in only(world.look(), "CKPT07").finding
    locked = {world.data}
    assert "prompts.jsonl" in only(world.look(), "CFG05").finding


@fault("ENV01")
def test_a_version_outside_the_tested_range(world, monkeypatch):
    """Another distribution comes first on the path, as one does that pip put into another site folder."""
    folder = world.folder / "site" / "transformers-4.51.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.51.0\n")
    monkeypatch.syspath_prepend(folder.parent)
    found = only(world.look(), "ENV01")
    assert "transformers 4.51.0 (tested >=5.12,<6)" in found.finding
    assert "`pip install 'transformers>=5.12,<6'`" in found.remedy
    shutil.rmtree(folder)
    assert world.look() == []


@fault("ENV02")
def test_more_threads_than_processors(world):
    found = only(world.look(num_threads=999), "ENV02")
    assert "--num-threads 999" in found.finding
    assert found.evidence["threads"] == 999
    count = found.remedy.split()[2].rstrip(",")
    assert world.look(num_threads=count) == []


@fault("DISK01")
def test_a_disk_too_small_for_the_checkpoints(world):
    """No disk holds what a run leaves that saves after each of a trillion rollouts and removes nothing."""
    one = 2 * (5 * 64 + 8) * 12
    every_rollout = {"save": world.folder / "save", "save_interval": 1, "num_rollout": 10**12}
    found = only(world.look(**every_rollout), "DISK01")
    free = shutil.disk_usage(world.folder).free
    assert (found.evidence["checkpoint_bytes"], found.evidence["kept"]) == (one, 10**12)
    assert found.evidence["free_bytes"] == pytest.approx(free, rel=0.5)
    [count] = re.findall(r"--keep-checkpoints (\d+)", found.remedy)
    assert int(count) == found.evidence["free_bytes"] // one - 1
    assert world.look(**every_rollout, keep_checkpoints=3) == []


def test_folders_that_cannot_be_made(world):
    (world.folder / "file").touch()
    for name in ("output_dir", "save"):
        found = only(world.look(**{name: world.folder / "file" / "run"}), "DISK01")
        flag = f"--{name.replace('_', '-')}"
        assert names(found.finding, f"{flag} {world.folder / 'file' / 'run'}: {world.folder / 'file'} ")
        assert flag in found.remedy
    (world.folder / "link").symlink_to("/nowhere")
    for place in (world.folder / "link", world.folder / "link" / "run"):
        found = only(world.look(output_dir=place), "DISK01")
        assert names(found.finding + found.cause, place, world.folder / "link", "a link to what does not exist")
    found = only(world.look(save_debug_rollout_data=world.folder / "file" / "{rollout_id}"), "DISK01")
    assert found.finding.startswith("--save-debug-rollout-data")
    assert world.look(save_debug_rollout_data=world.folder / "file_{rollout_id}") == []


@fault("GPU01")
def test_more_gpus_than_there_are(world):
    for number in range(2):
        (world.folder / f"nvidia{number}").touch()
    (world.folder / "nvidiactl").touch()

    def look(count: int) -> list[Diagnosis]:
        resolved, _ = examine(flags(world.model, world.data, world.folder, actor_num_gpus_per_node=count))
        return list(machine.gpus(machine.PreflightContext(resolved.config), world.folder))

    found = only(look(4), "GPU01")
    assert (found.evidence["needed"], found.evidence["available"]) == (4, 2)
    assert "--actor-num-gpus-per-node" in found.remedy
    assert look(2) == []


def test_engines_may_share_the_gpu_of_one_trainer(world):
    (world.folder / "nvidia0").touch()

    def lacking(count: int, transport: str) -> list[tuple[str, int]]:
        changes = {"engine": "sglang", "rollout_num_gpus": count, "update_weight_transport": transport}
        resolved, _ = examine(flags(world.model, world.data, world.folder, **changes))
        found = machine.gpus(machine.PreflightContext(resolved.config), world.folder)
        return [(each.evidence["sum"], each.evidence["available"]) for each in found]

    assert lacking(1, "disk") == lacking(1, "ipc") == []
    assert lacking(1, "nccl") == [("1 + 1 = 2", 1)]
    assert lacking(2, "disk") == [("1 + 2 = 3", 1)]


@fault("GPU03")
def test_a_port_that_another_process_has(tmp_path, capsys):
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        found = taken_port("--port", "127.0.0.1", port)
        assert found is not None
        assert (found.id, found.evidence["port"]) == ("GPU03", port)
        assert main(["serve", "--model-path", str(tmp_path), "--port", str(port)]) == 2
        assert "[GPU03]" in capsys.readouterr().err
        other.communicate("\n", timeout=20)
    assert taken_port("--port", "127.0.0.1", port) is None
    with socket.create_server(("127.0.0.1", 0)) as mine:
        assert taken_port("--port", "127.0.0.1", mine.getsockname()[1]) is not None
    assert taken_port("--port", "127.0.0.1", 0) is None


def set_dimensions(world, **changes):
    """Give the model of `world` dimensions as of a large one."""
    large = {
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 2560,
        "intermediate_size": 9728, "num_hidden_layers": 2, "vocab_size": 151936,
    }  # fmt: skip
    path = world.model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | large | changes))


@fault("MEM01")
def test_training_that_does_not_fit_the_gpu_is_reported_with_a_change_that_does(world, monkeypatch):
    """The driver's command is a script that names a GPU, and the model's config one of 4B parameters."""
    path = world.folder / "bin" / "nvidia-smi"
    path.parent.mkdir()
    set_dimensions(world)

    def gpu(mebibytes: int) -> None:
        path.write_text(f"#!/bin/sh\necho 'Tiny GPU, {mebibytes}'\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    gpu(13 * 1024)
    found = [each for each in world.look(bf16=True) if each.id == "MEM01"]
    assert len(found) == 1
    assert "Tiny GPU" in found[0].finding
    assert found[0].evidence["fits"] is False
    words = found[0].remedy.split()
    mended = {word[2:].replace("-", "_"): True for word in words if word.startswith("--")}
    assert not [each for each in world.look(bf16=True, **mended) if each.id == "MEM01"]
    gpu(141 * 1024)
    assert not [each for each in world.look(bf16=True) if each.id == "MEM01"]


def test_the_preflight_plans_the_sizes_that_the_run_would_choose(world, monkeypatch):
    set_dimensions(world)
    planned: list[int] = []

    def plan(config, *args):
        planned.append(config.train.max_tokens_per_gpu)
        return memory.plan_memory(config, *args)

    monkeypatch.setattr(machine, "local_device", lambda: ("H100", 80 << 30))
    monkeypatch.setattr(machine, "plan_memory", plan)
    world.doctor()
    world.doctor(use_dynamic_batch_size=True, max_tokens_per_gpu=4096)
    assert planned == [32768, 4096]


@contextlib.contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """Listen on a port, and answer each connection with these bytes before closing it; yields the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(64)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@fault("GPU05")
def test_a_ray_cluster_that_is_not_there(world, monkeypatch):
    ranks = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 1}
    with listening(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))) as address:  # a SETTINGS frame, as of a gRPC server
        assert world.look(**ranks, ray_address=address) == []
    found = only(world.look(**ranks, ray_address=address), "GPU05")
    assert f"--ray-address {address}" in found.finding
    assert found.evidence == {"address": address}
    monkeypatch.setenv("RAY_ADDRESS", address)
    found = only(world.doctor(**ranks), "GPU05")
    assert f"RAY_ADDRESS of the environment {address}" in found.finding
    assert "unset RAY_ADDRESS" in found.remedy
    monkeypatch.delenv("RAY_ADDRESS")
    found = only(world.look(**ranks, ray_address=f"ray://{address}"), "GPU05")
    assert "ray job submit" in found.remedy
    assert world.look(**ranks, ray_address=None) == []
    assert world.look(**ranks, ray_address="auto") == []
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    for given in (None, address):
        assert "furlong-rl[ray]" in only(world.doctor(**ranks, ray_address=given), "GPU05").remedy


def cluster(monkeypatch, *nodes: Node, resource: str = "CPU") -> None:
    """Let a cluster of these machines answer."""
    monkeypatch.setattr("furlong.run.launch.cluster_nodes", lambda _: (list(nodes), resource))


def check(world, **changes) -> list[Diagnosis]:
    resolved, problems = examine(flags(world.model, world.data, world.folder / "run", **changes))
    return findings_before_run(resolved, problems)


def test_the_slots_of_a_cluster_and_the_key_of_its_engines(world, monkeypatch):
    with listening(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))) as address:
        asked = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 1, "ray_address": address}
        cluster(monkeypatch, Node("a", "127.0.0.1", 4, 4))
        assert check(world, **asked) == []
        cluster(monkeypatch, Node("a", "127.0.0.1", 1, 1), Node("b", "127.0.0.1", 1, 1))
        found = only(check(world, **asked), "GPU01")
        assert names(found.finding, "2 + 1 = 3", "has 2")
        cluster(monkeypatch, Node("a", "127.0.0.1", 1, 1), Node("b", "127.0.0.1", 3, 3))
        assert check(world, **asked) == []
        found = only(
            check(world, **asked | {"actor_num_gpus_per_node": 4, "rollout_num_gpus": None, "colocate": True}), "GPU01"
        )
        assert "the largest machine has 3" in found.finding
        cluster(monkeypatch, Node("a", "10.0.0.4", 4, 4))
        assert check(world, **asked) == []
        found = only(check(world, **asked, offload_optimizer_states=True), "CFG02")
        cluster(monkeypatch, Node("a", "10.0.0.4", 4, 4), resource="GPU")
        assert check(world, **asked, offload_optimizer_states=True) == []


@fault("GPU05")
def test_a_cluster_that_refuses_the_token_is_not_a_missing_cluster(world, monkeypatch):
    def refuse(address):
        raise _refusal(address, "AuthenticationError: Unauthenticated: missing token")

    monkeypatch.setattr("furlong.run.launch.cluster_nodes", refuse)
    with listening(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))) as address:
        found = only(check(world, actor_num_gpus_per_node=2, rollout_num_gpus=1, ray_address=address), "GPU05")
    assert names(found.finding, address, "token authentication")
    assert names(found.remedy, "RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN")


@fault("ENG05")
def test_engine_addresses_that_are_not_engines(world):
    with listening(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi") as address:
        found = only(world.look(rollout_external_engine_addrs=address), "ENG05")
        assert names(found.finding, address, "JSON")
    found = only(world.look(rollout_external_engine_addrs=address), "ENG05")
    assert names(found.finding, "no engine answers", address)
    with listening(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n") as address:
        found = only(world.look(rollout_external_engine_addrs=address), "ENG05")
        assert "--sglang-api-key" in found.remedy
    found = only(world.look(rollout_external_engine_addrs="foo"), "ENG05")
    assert names(found.finding, "'foo'", "not the address")
    answer = b'{"version": "0.5.16", "context_length": 64}'
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer)
    with listening(head + answer) as address:
        assert world.look(rollout_external_engine_addrs=address) == []
        found = only(world.look(rollout_external_engine_addrs=address, rollout_max_context_len=128), "ENG05")
        assert names(found.finding, "128", "64", address)
