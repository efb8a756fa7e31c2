"""Faults of a run's machine, in real runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest

import faulty_hooks
from diagnosed_runs import run
from faults_marker import fault
from furlong.diagnosis.monitors import machine_monitors as machines
from furlong.machine import MemoryUse
from furlong.tools import gpu_memory as devices
from runs import rows

HOOKS = faulty_hooks.__file__


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Put a fake nvidia-smi first on the path."""
    path = folder / "bin" / "nvidia-smi"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


@fault("CHECK01")
def test_a_driver_that_does_not_answer_a_check_ends_no_run(tmp_path, monkeypatch):
    path = driver(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(devices, "ANSWER_S", 0.2)
    code, found = run(tmp_path / "run", num_rollout=1)
    assert (code, list(found)) == (0, ["CHECK01"])
    event = found["CHECK01"]
    assert "machine.occupied_gpus" in event["finding"]
    assert "timed out after 0.2 seconds" in event["finding"]
    assert event["evidence"] == {"check": "machine.occupied_gpus", "error": "TimeoutExpired"}
    path.unlink()
    assert run(tmp_path / "mended", num_rollout=1) == (0, {})


@fault("GPU04")
def test_a_gpu_that_another_process_has_taken(tmp_path, monkeypatch):
    other = 4_194_305  # no process has this number
    driver(
        tmp_path,
        monkeypatch,
        f"""case "$*" in
        *query-gpu=index*) echo "0, GPU-aa, Tiny GPU, 70000, 81559"; echo "1, GPU-bb, Tiny GPU, 4, 81559";;
        *compute-apps*) echo "GPU-aa, {other}, python"; echo "GPU-bb, 1, init";;
        *) echo "Tiny GPU, 81559";; esac""",
    )
    code, found = run(tmp_path / "run", num_rollout=1)
    assert (code, list(found)) == (0, ["GPU04"])
    event = found["GPU04"]
    assert event["severity"] == "warning"
    assert all(value in event["finding"] for value in ("GPU 0 (Tiny GPU)", "68.4 GiB of 79.6 GiB", f"process {other}"))
    assert event["evidence"]["processes"] == [f"{other} (python)"]
    assert f"`kill {other}`" in event["remedy"]
    assert "CUDA_VISIBLE_DEVICES" in event["remedy"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    assert run(tmp_path / "mended", num_rollout=1) == (0, {})


def test_a_gpu_used_only_by_this_process_and_its_parents_is_not_occupied(tmp_path, monkeypatch):
    driver(
        tmp_path,
        monkeypatch,
        f"""case "$*" in
        *query-gpu=index*) echo "0, GPU-aa, Tiny GPU, 70000, 81559";;
        *compute-apps*) echo "GPU-aa, {os.getpid()}, python"; echo "GPU-aa, {os.getppid()}, python";; esac""",
    )
    assert devices.gpus_in_use(1, None) == []


def test_a_gpu_that_shares_host_memory_has_no_known_size(tmp_path, monkeypatch):
    driver(tmp_path, monkeypatch, "echo 'NVIDIA GB10, [N/A]'")
    assert devices.local_device() is None


@fault("MEM04")
def test_a_function_that_leaks_memory(tmp_path, monkeypatch):
    """The machine's memory is barely more than this process uses, so that a small leak fills it."""
    begun = psutil.Process().memory_info().rss

    def of_machine() -> MemoryUse:
        return MemoryUse(psutil.Process().memory_info().rss - begun + (200 << 20), 1 << 30, "the control group")

    monkeypatch.setattr(MemoryUse, "of_machine", staticmethod(of_machine))
    monkeypatch.setattr(machines, "HOST_ROWS", 12)
    small = {"num_rollout": 13, "rollout_batch_size": 1, "n_samples_per_prompt": 4}
    code, found = run(tmp_path / "run", **small, custom_generate_function_path=f"{HOOKS}:generate_and_remember")
    used = [row["perf/host_memory_frac"] for row in rows(tmp_path / "run")]
    assert (code, "MEM04" in found) == (0, True)
    event = found["MEM04"]
    assert event["step"] >= 12
    assert event["evidence"]["used"] == used[event["step"] - 1] > event["evidence"]["before"] + 0.1
    assert "--save-interval" in event["remedy"]
    code, found = run(tmp_path / "mended", **small, custom_generate_function_path=f"{HOOKS}:generate")
    assert (code, "MEM04" in found) == (0, False)


@fault("ENG02")
def test_a_compile_cache_that_was_cut_off(tmp_path, monkeypatch):
    from torch._inductor.codecache import LocalCache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    LocalCache.get_local_cache_path.cache_clear()
    written = LocalCache.get_local_cache_path()
    written.parent.mkdir(parents=True)
    written.write_text('{"system": {"hash": "0", "cac')
    own = {"num_rollout": 1, "loss_type": "custom_loss"}
    own["custom_loss_function_path"] = f"{HOOKS}:loss_with_a_tuned_product"
    code, found = run(tmp_path / "run", **own)
    assert (code, list(found)) == (1, ["ENG02"])
    event = found["ENG02"]
    assert event["evidence"]["source"] == "traceback"
    assert "JSONDecodeError: Unterminated string starting at: line 1 column" in event["finding"]
    assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1" in event["remedy"]
    shutil.rmtree(tmp_path / "cache")
    assert run(tmp_path / "mended", **own) == (0, {})
    LocalCache.get_local_cache_path.cache_clear()
