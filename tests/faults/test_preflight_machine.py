"""Faults of the machine that are found before a run starts: files, versions, memory, GPUs, ports."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from faults.world import names, only
from faults_marker import fault, typed
from furlong.cli import main
from furlong.commands.serve import taken_port
from furlong.config.command_line import examine
from furlong.core.catalogue import Diagnosis
from furlong.diagnosis.preflight import machine_checks as machine
from runs import flags


def test_files_that_this_user_may_not_read_or_write(world, monkeypatch):
    locked = {world.model / "config.json"}
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path) not in locked)  # tests may run as root
    assert f"{world.model}/config.json" in only(world.look(), "CKPT07").finding
    locked = {world.data}
    assert "prompts.jsonl" in only(world.look(), "CFG05").finding
    (world.folder / "run").mkdir()
    (world.folder / "run" / "run.log").touch()
    locked = {world.folder / "run" / "run.log"}
    assert "run.log" in only(world.look(), "DISK01").finding


def test_a_tracker_without_its_package(world, monkeypatch):
    monkeypatch.setattr("furlong.diagnosis.preflight.machine_checks.find_spec", lambda _: None)
    assert "wandb" in only(world.look(use_wandb=True), "CFG05").finding


@fault("ENV01")
def test_a_version_outside_the_tested_range(world, monkeypatch):
    """Another distribution comes first on the path, as one does that pip put into another site folder."""
    folder = world.folder / "site" / "transformers-4.51.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.51.0\n")
    monkeypatch.syspath_prepend(folder.parent)
    found = only(world.look(), "ENV01")
    assert "transformers 4.51.0 (tested >=5.0,<6)" in found.finding
    assert "`pip install 'transformers>=5.0,<6'`" in found.remedy
    shutil.rmtree(folder)
    assert world.look() == []


@fault("ENV02")
def test_more_threads_than_processors(world):
    found = only(world.look(num_threads=999), "ENV02")
    assert "--num-threads 999" in found.finding
    assert found.evidence["threads"] == 999
    count = found.remedy.split()[2].rstrip(",")
    assert world.look(num_threads=count) == []


def test_more_ranks_than_processors_on_a_machine_without_gpus(world, tmp_path):
    context = machine.PreflightContext(
        examine(flags(world.model, world.data, tmp_path, actor_num_gpus_per_node=999))[0].config
    )
    [found] = machine.threads(context, tmp_path)
    assert found.evidence["ranks"] == 999
    (tmp_path / "nvidia0").touch()
    assert list(machine.threads(context, tmp_path)) == []


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
        assert names(found.finding, place, world.folder / "link", "/nowhere")
    found = only(world.look(save_debug_rollout_data=world.folder / "file" / "{rollout_id}"), "DISK01")
    assert found.finding.startswith("--save-debug-rollout-data")
    assert world.look(save_debug_rollout_data=world.folder / "file_{rollout_id}") == []


@pytest.mark.parametrize(
    ("flag", "template", "entry"),
    [
        ("save_debug_rollout_data", "d/{rollout_id}.safetensors", "d/1.safetensors"),
        ("save_debug_rollout_data", "d/{rollout_id}", "d/eval_0"),
        ("save_debug_rollout_data", "[d]/{rollout_id}/samples", "[d]/0/samples"),
        ("save_debug_train_data", "d/{rollout_id}_{rank}", "d/0_3"),
        ("output_dir", "run", "run/metrics.jsonl"),
        ("save", "save", "save/latest_checkpointed_iteration.txt"),
    ],
)
def test_a_folder_where_a_file_is_written(world, flag, template, entry):
    (world.folder / entry).mkdir(parents=True)
    found = only(world.look(**{flag: world.folder / template}), "DISK01")
    assert names(found.finding, f"--{flag.replace('_', '-')} {world.folder / template}", world.folder / entry)
    (world.folder / entry).rmdir()
    assert world.look(**{flag: world.folder / template}) == []


def test_a_file_where_a_model_folder_is_written(world):
    (world.folder / "hf_1").touch()
    exports = {"save": world.folder / "save", "save_hf": world.folder / "hf_{rollout_id}"}
    found = only(world.look(**exports), "DISK01")
    assert names(found.finding, "--save-hf", world.folder / "hf_1")
    (world.folder / "hf_1").unlink()
    (world.folder / "hf_1").mkdir()  # replaced
    (world.folder / "hf_9").touch()  # not written
    assert world.look(**exports) == []


@fault("GPU01")
def test_more_gpus_than_there_are(world):
    for number in range(2):
        (world.folder / f"nvidia{number}").touch()
    (world.folder / "nvidiactl").touch()

    def look(count: int) -> list[Diagnosis]:
        typed("furlong doctor ... --actor-num-gpus-per-node", count)
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
        typed("furlong serve --model-path model --port", port)
        found = taken_port("--port", "127.0.0.1", port)
        assert found is not None
        assert (found.id, found.evidence["pid"]) == ("GPU03", other.pid)
        assert names(found.finding, port, f"process {other.pid} ({sys.executable})")
        assert main(["serve", "--model-path", str(tmp_path), "--port", str(port)]) == 2
        assert "[GPU03]" in capsys.readouterr().err
        other.communicate("\n", timeout=20)
    assert taken_port("--port", "127.0.0.1", port) is None
    with socket.create_server(("127.0.0.1", 0)) as mine:
        assert taken_port("--port", "127.0.0.1", mine.getsockname()[1]) is not None
    assert taken_port("--port", "127.0.0.1", 0) is None


@fault("MEM01")
def test_training_that_does_not_fit_the_gpu_is_reported_with_a_change_that_does(world, monkeypatch):
    """The driver's command is a script that names a GPU, and the model's config one of 4B parameters."""
    path = world.folder / "bin" / "nvidia-smi"
    path.parent.mkdir()
    config = json.loads((world.model / "config.json").read_text())
    large = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 2,
        "vocab_size": 151936,
    }
    (world.model / "config.json").write_text(json.dumps(config | large))

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


@fault("GPU05")
def test_a_ray_cluster_that_is_not_there(world):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        ranks = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 1, "ray_address": address}
        assert world.look(**ranks) == []
    found = only(world.look(**ranks), "GPU05")
    assert f"--ray-address {address}" in found.finding
    assert found.evidence == {"address": address}
    only(world.look(**ranks | {"ray_address": f"ray://{address}"}), "GPU05")
    assert world.look(**ranks | {"ray_address": None}) == []
    assert world.look(**ranks | {"ray_address": "auto"}) == []
