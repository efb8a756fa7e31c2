"""Runs that failed or were killed: what they print, and what `furlong doctor --run` reports for their folder."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file

import faulty_hooks
from confined import REFUSED, on_a_small_disk, with_little_memory
from diagnosed_runs import arithmetic, run, told
from faults_marker import fault
from furlong import cli
from furlong.quickstart.quickstart import model_folder
from furlong.training.fsdp.backend import FsdpBackend
from runs import Child, flags, write_model, write_prompts


def examine(folder, capsys):
    capsys.readouterr()
    code = cli.main(["doctor", "--run", str(folder), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_healthy_run_is_reported_as_healthy(tmp_path, capsys):
    assert run(tmp_path / "run", num_rollout=1) == (0, {})
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["ok"], result["status"], result["findings"]) == (0, True, "finished", [])
    assert cli.main(["doctor", "--run", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.endswith("run: finished after 1 of 1 steps\nno problems found\n")


@fault("MEM02")
def test_a_run_that_gets_too_little_memory_names_a_micro_batch_that_fits(tmp_path, capsys, forked):
    """`ulimit -v` of the process is its initial size plus 900 MiB."""
    model = write_model(tmp_path / "model", intermediate_size=4096)
    data = write_prompts(tmp_path / "prompts.jsonl", 32)
    sizes = {"rollout_batch_size": 16, "n_samples_per_prompt": 8, "rollout_max_response_len": 80, "num_rollout": 1}

    def run_with(name: str, tokens: int) -> int:
        words = flags(model, data, tmp_path / name, **sizes, use_dynamic_batch_size=True, max_tokens_per_gpu=tokens)
        process = forked.Process(target=with_little_memory, args=(words, tmp_path / f"{name}.txt", 900 << 20))
        process.start()
        process.join(60)
        return process.exitcode

    assert run_with("run", 12000) == 1
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["status"], [f["id"] for f in result["findings"]]) == (1, "failed", ["MEM02"])
    assert "--max-tokens-per-gpu" in result["findings"][0]["remedy"]
    assert "forward and backward" in result["findings"][0]["evidence"]["phase"]
    message = " ".join((tmp_path / "run.txt").read_text().partition("[MEM02]")[2].split())
    assert "forward and backward" in message
    for value in (
        r"tried [\d,]+ MiB",
        r"longest sample \d+ tokens",
        r"[\d.]+ MiB of [\d.]+ MiB \(ulimit -v\)",
        r"1\.\d GiB in `train`\D+\d+\.\d MiB",
    ):
        assert re.search(value, message), message
    change = re.search(r"--max-tokens-per-gpu (\d+)", message)
    assert change
    assert change[0] in result["findings"][0]["remedy"]
    assert 1024 <= int(change[1]) < 6000
    assert run_with("mended", int(change[1])) == 0
    assert "MEM02" not in told(tmp_path / "mended")


@fault("DISK01")
def test_a_disk_that_is_full_when_a_checkpoint_is_written(tmp_path, capsys, forked):
    save = tmp_path / "save"
    save.mkdir()
    faulty = {"custom_generate_function_path": f"{faulty_hooks.__file__}:generate_while_the_disk_fills"}
    words = arithmetic(tmp_path / "run", num_rollout=1, save=save, **faulty)
    process = forked.Process(target=on_a_small_disk, args=(words, tmp_path / "log.txt", save, "30m"))
    process.start()
    process.join(60)
    if process.exitcode == REFUSED:
        pytest.skip("this machine lets no process mount a disk of its own")
    assert process.exitcode == 1
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["status"], [f["id"] for f in result["findings"]]) == (1, "failed", ["DISK01"])
    assert "No space left on device" in result["findings"][0]["finding"]
    assert "--save" in result["findings"][0]["remedy"]
    assert "[DISK01]" in (tmp_path / "log.txt").read_text()
    assert run(tmp_path / "mended", num_rollout=1, save=save) == (0, {})


@fault("ENG05")
def test_a_missing_server_is_refused_by_doctor_and_run_alike(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
    words = arithmetic(tmp_path / "run", num_rollout=1, rollout_external_engine_addrs=address)
    assert cli.main(["doctor", *words]) == 1
    reported = capsys.readouterr().out
    assert "[ENG05] no engine answers" in reported
    assert cli.main_train(words) == 2
    refused = " ".join(capsys.readouterr().err.split())
    assert address in refused
    assert " ".join(reported.splitlines()[0].split()).removeprefix("error ")[:50] in refused
    assert not (tmp_path / "run").exists()


def test_an_error_of_the_engine_is_explained_on_the_terminal(tmp_path, capsys):
    code, _ = run(tmp_path / "run", lr=10, weight_decay=1e30, clip_grad=0)
    before, printed = capsys.readouterr().err.split("furlong: EngineError: ")
    assert code == 1
    assert printed.startswith("[NUM04] ")
    assert "request furlong-" in printed
    assert "Traceback" not in before
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["status"]) == (1, "failed")
    assert "NUM04" in [f["id"] for f in result["findings"]]


def test_a_model_with_nan_is_distinguished_from_one_that_training_broke(tmp_path, capsys):
    model = shutil.copytree(model_folder(), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][:] = math.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert run(tmp_path / "run", hf_checkpoint=model)[0] == 1
    message = capsys.readouterr().err
    assert "version 0" in message
    assert "`furlong check DIR`" in message


@fault("SYNC01")
def test_ranks_that_time_out_in_a_collective_of_nccl(tmp_path, capsys, monkeypatch):
    timeout = RuntimeError(
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLGATHER) ran for "
        "600013 milliseconds before timing out."
    )
    monkeypatch.setattr(FsdpBackend, "forward_backward", Mock(side_effect=timeout))  # not an error of user code
    with pytest.raises(RuntimeError, match="Watchdog"):
        run(tmp_path / "run", num_rollout=1)
    code, result = examine(tmp_path / "run", capsys)
    assert (code, [found["id"] for found in result["findings"]]) == (1, ["SYNC01"])
    assert "NCCL_SOCKET_IFNAME" in result["findings"][0]["remedy"]


@fault("KILL01")
def test_a_killed_run_is_recognised_and_resumes(tmp_path, capsys, forked):
    argv = arithmetic(tmp_path / "run", num_rollout=200, save=tmp_path / "save", save_interval=1)
    child = Child(forked, argv, tmp_path)
    child.wait_for_step(60)
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["status"]) == (0, "running")
    child.wait_for_step(60)
    child.kill()
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["status"], [f["id"] for f in result["findings"]]) == (1, "killed", ["KILL01"])
    assert result["last_words"]
    resumed = {"num_rollout": result["step"] + 1, "save": tmp_path / "save", "load": tmp_path / "save"}
    assert run(tmp_path / "run", **resumed)[0] == 0
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["status"]) == (0, "finished")


@fault("KILL01")
def test_a_crash_in_compiled_code_names_the_line_that_called_it(tmp_path, capsys, forked):
    path = f"{faulty_hooks.__file__}:generate_with_a_crash"
    child = Child(forked, arithmetic(tmp_path / "run", custom_generate_function_path=path), tmp_path)
    child.process.join(60)
    _, result = examine(tmp_path / "run", capsys)
    [found] = result["findings"]
    place = r"Segmentation fault in string_at \S+, called from generate_with_a_crash \(\S+/faulty_hooks.py:\d+\)"
    assert (child.process.exitcode, result["status"], found["id"]) == (-11, "killed", "KILL01")
    assert re.search(place, found["finding"])
    assert "out-of-memory" not in str(found)


def test_a_run_that_fails_during_startup_is_reported_as_failed(tmp_path, capsys, monkeypatch):
    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FsdpBackend, "__init__", no_room)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path / "run", num_rollout=1)
    code, result = examine(tmp_path / "run", capsys)
    assert (code, result["status"], [f["id"] for f in result["findings"]]) == (1, "failed", ["DISK01"])
    assert result["error"].startswith("OSError: [Errno 28]")


def test_a_folder_that_is_not_a_run_is_named(tmp_path, capsys):
    assert cli.main(["doctor", "--run", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "config.json" in error
    assert str(tmp_path) in error


def _ended_by(error: BaseException, folder: Path, capsys, monkeypatch) -> dict[str, Any]:
    """The only diagnosis of a run whose training step raised an error of the system."""
    monkeypatch.setattr(FsdpBackend, "forward_backward", Mock(side_effect=error))  # not an error of user code
    with pytest.raises(type(error)):
        run(folder, num_rollout=1)
    code, result = examine(folder, capsys)
    [found] = result["findings"]
    assert (code, result["status"]) == (1, "failed")
    return found


@fault("LIMIT01")
def test_too_many_open_files(tmp_path, capsys, monkeypatch):
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    found = _ended_by(error, tmp_path / "run", capsys, monkeypatch)
    assert found["id"] == "LIMIT01"
    assert "ulimit -n" in found["remedy"]


@fault("GPU06")
def test_a_gpu_with_a_memory_error(tmp_path, capsys, monkeypatch):
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    found = _ended_by(error, tmp_path / "run", capsys, monkeypatch)
    assert found["id"] == "GPU06"
    assert "Xid" in found["remedy"]
