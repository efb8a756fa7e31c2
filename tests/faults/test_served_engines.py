"""Faults of the engines that a run starts, in real runs with servers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

import faulty_engines
from diagnosed_runs import run
from faults_marker import fault
from forked_engines import ForkedEngines
from furlong.core.device_memory import DeviceMemory
from furlong.inference.supervisor import supervisor
from runs import rows


@fault("ENG01")
def test_an_illegal_memory_access_lists_the_remedies_in_order(engines, tmp_path, capsys):
    engines.fault = faulty_engines.exits_with_many_requests
    few = {"num_rollout": 1, "rollout_num_gpus": 1}
    code, found = run(tmp_path / "run", **few)
    assert (code, list(found)) == (1, ["ENG01"])
    message = " ".join(capsys.readouterr().err.split())
    remedies = (
        "--sglang-mem-fraction-static",
        "CUDA_LAUNCH_BLOCKING=1",
        "--sglang-disable-cuda-graph",
        "DeepEP",
        "core dump",
    )
    order = [message.index(remedy, message.index("[ENG01]")) for remedy in remedies]
    assert order == sorted(order)
    assert "engine-0.log" in message
    assert run(tmp_path / "mended", **few, sglang_server_concurrency=faulty_engines.FEW) == (0, {})


@fault("MEM02")
def test_an_engine_without_room_for_its_graphs_is_not_taken_for_the_trainer(engines, tmp_path):
    engines.fault = faulty_engines.exits_capturing_graphs
    code, found = run(tmp_path / "run", num_rollout=1, rollout_num_gpus=1)
    assert (code, list(found)) == (1, ["MEM02"])
    assert found["MEM02"]["evidence"]["phase"] == "capturing CUDA graphs"
    assert "logs/engine-0.log, line" in found["MEM02"]["finding"]
    assert "--sglang-mem-fraction-static" in found["MEM02"]["remedy"]
    assert "--sglang-cuda-graph-max-bs" in found["MEM02"]["remedy"]
    engines.fault = None
    assert run(tmp_path / "mended", num_rollout=1, rollout_num_gpus=1) == (0, {})


@fault("ENG04")
@pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed")
def test_one_engine_gets_all_requests(engines, tmp_path, monkeypatch):
    """All samples of a prompt go to the engine with its prefix, so two of three engines idle."""
    monkeypatch.setattr(supervisor, "LOAD_INTERVAL_S", 0.01)
    one_prompt = {"rollout_batch_size": 1, "n_samples_per_prompt": 24, "num_rollout": 5, "rollout_num_gpus": 3}
    one_prompt |= {"rollout_temperature": 5, "rollout_max_response_len": 24}  # so that answers are equally long
    code, found = run(tmp_path / "run", **one_prompt)
    assert code == 0
    event = found["ENG04"]
    last = rows(tmp_path / "run")[-1]
    assert (event["step"], event["evidence"]["max"]) == (5, last["engine/requests/max"])
    assert event["evidence"]["ratio"] == pytest.approx(3, abs=0.1)
    assert "--sglang-router-strategy round_robin" in event["remedy"]
    code, found = run(tmp_path / "mended", **one_prompt, sglang_router_strategy="round_robin")
    assert (code, "ENG04" in found) == (0, False)
    seen = [row for row in rows(tmp_path / "mended") if "engine/requests/max" in row]
    assert seen
    assert sum(r["engine/requests/max"] for r in seen) < 2 * sum(r["engine/requests/mean"] for r in seen)


@fault("MEM03")
def test_an_engine_that_retains_more_memory_each_step(engines, tmp_path, monkeypatch):
    """The device that trainer and engine share is the machine's memory, as the engine's process uses it."""

    def of_engine(device) -> DeviceMemory:
        used = sum(psutil.Process(pid).memory_info().rss for pid in engines.alive())
        return DeviceMemory(used=used, total=4 << 30, reserved=0, peak=0)

    monkeypatch.setattr("furlong.training.local_trainer.device_memory", of_engine)
    engines.fault = faulty_engines.leaks_request_buffers
    shared = {"num_rollout": 3, "rollout_num_gpus": 1, "colocate": True}
    code, found = run(tmp_path / "run", **shared)
    assert (code, list(found)) == (0, ["MEM03"])
    event, kept = found["MEM03"], [row["memory/engine_kept_frac"] for row in rows(tmp_path / "run")]
    assert (event["severity"], event["evidence"]["part"], event["evidence"]["first"]) == ("error", "engine", kept[0])
    assert event["evidence"]["kept_frac"] == kept[event["step"] - 1] > 1.5 * kept[0]
    assert "--sglang-server-concurrency" in event["remedy"]
    assert run(tmp_path / "mended", **shared, sglang_server_concurrency=faulty_engines.FEW) == (0, {})


@contextlib.contextmanager
def woken(engines: ForkedEngines, *, after_s: float) -> Iterator[None]:
    """Resume engines that have been stopped for this long."""
    ended = threading.Event()

    def wake() -> None:
        while not ended.wait(0.02):
            for pid in engines.alive():
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                        time.sleep(after_s)
                        os.kill(pid, signal.SIGCONT)

    waker = threading.Thread(target=wake, daemon=True)
    waker.start()
    yield
    ended.set()
    waker.join()


@fault("SYNC01")
def test_an_engine_that_does_not_load_its_weights(engines, tmp_path, capsys):
    engines.fault = faulty_engines.stops_while_loading
    one = {"num_rollout": 1, "rollout_num_gpus": 1, "update_weight_transport": "ipc"}
    with woken(engines, after_s=1.0):
        code, found = run(tmp_path / "run", **one, update_weight_timeout=0.3)
    assert (code, list(found)) == (1, ["SYNC01"])
    event = found["SYNC01"]
    assert (event["evidence"]["version"], event["evidence"]["seconds"], event["evidence"]["transport"]) == (
        1,
        0.3,
        "ipc",
    )
    assert event["evidence"]["missing"][0] in event["finding"]
    assert "shared memory" in event["cause"]
    assert "(--update-weight-timeout)" in event["remedy"]
    assert "--update-weight-buffer-size" in event["remedy"]
    assert "SyncError: weight_sync version 1" in capsys.readouterr().err
    with woken(engines, after_s=0.1):
        assert run(tmp_path / "mended", **one, update_weight_timeout=60) == (0, {})
