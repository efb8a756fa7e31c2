"""Engines that are killed or stopped during a run: the run continues and loses nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

import faulty_engines
from faults_marker import fault
from faulty_engines import closes_connections_of, hangs_in
from forked_engines import ForkedEngines
from furlong.catalogue import CATALOGUE
from furlong.data.audit import audit
from furlong.errors import ENGINE_HANGS, ENGINE_UNANSWERED, EngineError, SyncError
from furlong.training.worker import RoundWorker
from runs import flags, ledger_events, rows, train, write_prompts

pytestmark = pytest.mark.nightly

HAS_ROUTER = importlib.util.find_spec("sglang_router") is not None

ONE, TWO = {"rollout_num_gpus": 1}, {"rollout_num_gpus": 2}
SHARED = ONE | {"colocate": True}
HELD = ONE | {"async_buffer_size": 1, "pause_mode": "hold"}
CLOSED = r": POST .* the server closed the connection without an answer"


class Saboteur(threading.Thread):
    """Sends one signal to each engine of a run once `after` appears in its log."""

    def __init__(self, engines: ForkedEngines, folder: Path, after: str, *signals: signal.Signals) -> None:
        super().__init__(daemon=True)
        self.engines, self.folder, self.after, self.signals = engines, folder, after, signals
        self.hit: list[int] = []
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 240  # a loaded machine takes more than a minute to start a run
        while time.monotonic() < deadline and not self.hit:
            log = self.folder / "run.log"
            if log.exists() and self.after in log.read_text():
                for engine, number in zip(self.engines.alive(), self.signals, strict=False):
                    os.kill(engine, number)
                    self.hit.append(engine)
            time.sleep(0.002)


def children(words: str) -> list[int]:
    """Ids of child processes with this text in their command."""
    found: list[int] = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if words in " ".join(process.cmdline()):
                found.append(process.pid)
    return sorted(found)


def events(folder: Path, name: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == name]


def sabotaged(engines, model, folder: Path, after: str, *signals: signal.Signals, **changes):
    """Train four rollouts on two engines that receive one signal each; returns the folder of the run."""
    data = write_prompts(folder / "prompts.jsonl")
    saboteur = Saboteur(engines, folder / "run", after, *signals)
    argv = flags(
        model, data, folder / "run", engine="embedded", rollout_num_gpus=2, num_rollout=4, use_fault_tolerance=True,
        rollout_health_check_interval=0.3, rollout_health_check_timeout=4, rollout_max_response_len=24,
        sglang_router_strategy="cache_aware" if HAS_ROUTER else "direct", log_level="DEBUG", **changes,
    )  # fmt: skip
    try:
        assert train(argv) == 4
    finally:
        saboteur.join(240)
    assert len(saboteur.hit) == len(signals)
    assert engines.alive() == []
    return folder / "run"


def check_nothing_is_lost(folder: Path, num_rollout: int = 4, *, is_on_policy: bool = True) -> None:
    assert [row["step"] for row in rows(folder)] == [*range(1, num_rollout + 1)]
    assert audit(folder / "ledger.jsonl", finished=True).ok
    trained = [event["g"] for event in ledger_events(folder) if event["e"] == "trained"]
    assert len(trained) == len(set(trained)) == 4 * num_rollout
    if is_on_policy:
        assert all(
            row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in rows(folder)
        )  # the engine has the right weights


@fault("ENG03")
def test_a_run_replaces_killed_and_stopped_engines_and_a_killed_router(engines, model, tmp_path, monkeypatch):
    train_part, folder = RoundWorker.train_part, tmp_path / "run"

    def train_without_router(worker, part, **options):
        """Kill the router in the first rollout; in the third, wait until it is restarted."""
        if HAS_ROUTER and part.batch.rollout_id == 0:
            [router] = children("router")
            os.kill(router, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while HAS_ROUTER and part.batch.rollout_id == 2 and time.monotonic() < deadline:
            if events(folder, "router_restarted"):
                break
            time.sleep(0.01)
        return train_part(worker, part, **options)

    monkeypatch.setattr(RoundWorker, "train_part", train_without_router)
    sabotaged(engines, model, tmp_path, "weight_sync done: version 1", signal.SIGKILL, signal.SIGSTOP)
    check_nothing_is_lost(folder)
    lost, restarted = events(folder, "engine_lost"), events(folder, "engine_restarted")
    assert sorted(event["engine"] for event in lost) == [0, 1]
    assert any("was ended by signal 9" in event["why"] for event in lost)
    assert restarted
    assert all(event["version"] >= 1 for event in restarted)
    if HAS_ROUTER:
        [router_lost], [router_back] = events(folder, "router_lost"), events(folder, "router_restarted")
        assert "ended by signal 9" in router_lost["why"]
        assert router_back["seconds"] > 0


def test_a_colocated_engine_is_replaced_in_any_phase(engines, model, tmp_path, monkeypatch):
    train_part, folder = RoundWorker.train_part, tmp_path / "run"

    def train_and_kill(worker, part, **options):
        if part.batch.rollout_id == 1:
            os.kill(engines.alive()[0], signal.SIGKILL)
        return train_part(worker, part, **options)

    monkeypatch.setattr(RoundWorker, "train_part", train_and_kill)
    engines.fault = partial(faulty_engines.sends_a_signal_while_generating, signal.SIGKILL, tmp_path / "killed")
    argv = flags(
        model, write_prompts(tmp_path / "prompts.jsonl"), folder, engine="embedded", rollout_num_gpus=1, colocate=True,
        num_rollout=10, use_fault_tolerance=True, rollout_health_check_interval=0.05, rollout_max_response_len=24,
    )  # fmt: skip
    assert train(argv) == 10
    assert len(events(folder, "engine_lost")) == 2
    during, between = [event["version"] for event in events(folder, "engine_restarted")]
    assert during == 0
    assert between >= 2  # the event follows the weight update that restored the engine
    check_nothing_is_lost(folder, 10)


@pytest.mark.parametrize(
    ("killed_in", "version", "changes"),
    [
        (1, 2, {"async_buffer_size": 1}),  # an update is due, and would wait for the rollout that waits for it
        (0, 1, {"update_weights_interval": 2}),  # no update is due before the rollout ends
    ],
)
def test_weights_are_updated_if_all_engines_were_lost_after_training(
    engines, model, tmp_path, killed_in, version, changes, monkeypatch
):
    train_part, folder = RoundWorker.train_part, tmp_path / "run"

    def train_and_kill(worker, part, **options):
        if part.batch.rollout_id == killed_in:
            os.kill(engines.alive()[0], signal.SIGKILL)
        return train_part(worker, part, **options)

    monkeypatch.setattr(RoundWorker, "train_part", train_and_kill)
    argv = flags(
        model, write_prompts(tmp_path / "prompts.jsonl"), folder, engine="embedded", rollout_num_gpus=1, num_rollout=4,
        use_fault_tolerance=True, rollout_health_check_interval=0.05, rollout_max_response_len=100, **changes,
    )  # fmt: skip
    assert train(argv) == 4
    check_nothing_is_lost(folder, is_on_policy=False)
    assert [event["version"] for event in events(folder, "engine_restarted")] == [version]
    assert (folder / "run.log").read_text().count("rollouts continue with new weights") == 1


@pytest.mark.parametrize(
    ("fails", "what", "why", "changes"),
    [
        (hangs_in, "load_bucket", "during a weight update", TWO | {"update_weight_transport": "nccl"}),
        (hangs_in, "load_bucket", "during a weight update", TWO | {"update_weight_transport": "ipc"}),
        (hangs_in, "_check_weights", "during a weight update", TWO | {"update_weight_transport": "nccl"}),
        (hangs_in, "release_memory", "did not answer within 1 s", SHARED),
        (closes_connections_of, "/update_weights_from_distributed", CLOSED, ONE),
        (closes_connections_of, "/update_weights_from_tensor", CLOSED, TWO | {"update_weight_transport": "ipc"}),
        (closes_connections_of, "/weights_checker", CLOSED, TWO),
        (closes_connections_of, "/flush_cache", CLOSED, SHARED),
        (closes_connections_of, "/pause_generation", CLOSED, HELD),
    ],
)
def test_an_engine_that_passes_health_checks_but_ignores_a_command_is_replaced(
    engines, model, tmp_path, fails, what, why, changes, monkeypatch
):
    train_part = RoundWorker.train_part

    def train_with_both(worker, part, **options):
        """Before the third rollout, wait until the engine is restarted."""
        deadline = time.monotonic() + 60
        while part.batch.rollout_id == 2 and time.monotonic() < deadline:
            if events(tmp_path / "run", "engine_restarted"):
                break
            time.sleep(0.01)
        return train_part(worker, part, **options)

    monkeypatch.setattr(RoundWorker, "train_part", train_with_both)
    monkeypatch.setattr("furlong.inference.sglang.server.MEMORY_S", 1)
    engines.fault = partial(fails, what, tmp_path / "once")
    argv = flags(
        model, write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "run", engine="embedded", num_rollout=4,
        use_fault_tolerance=True, update_weight_timeout=1 if fails is hangs_in else 30, **changes,
    )  # fmt: skip
    assert train(argv) == 4
    check_nothing_is_lost(tmp_path / "run", is_on_policy="async_buffer_size" not in changes)
    [lost] = events(tmp_path / "run", "engine_lost")
    assert re.search(why, lost["reason"])
    assert lost["code"] == (ENGINE_HANGS if fails is hangs_in else ENGINE_UNANSWERED)
    [diagnosis] = [each for each in events(tmp_path / "run", "diagnosis") if each["id"] == "ENG03"]
    assert (diagnosis["evidence"]["code"], diagnosis["cause"] == CATALOGUE["ENG03"].cause) == (lost["code"], False)
    assert len(events(tmp_path / "run", "engine_restarted")) == 1


@pytest.mark.parametrize(
    ("what", "changes", "told"),
    [
        ("/flush_cache", SHARED, rf"(?s)engine 0 .*{CLOSED}; the last lines of its log.*--use-fault-tolerance"),
        (
            "/update_weights_from_tensor",
            ONE | {"update_weight_transport": "ipc"},
            "1 engines failed to load bucket.* closed",
        ),
    ],
)
def test_without_fault_tolerance_a_broken_command_connection_ends_the_run(
    engines, model, tmp_path, what, changes, told
):
    engines.fault = partial(closes_connections_of, what, tmp_path / "once")
    argv = flags(model, write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "run", engine="embedded", **changes)
    with pytest.raises((EngineError, SyncError), match=told):
        train(argv)


@fault("ENG06")
def test_without_fault_tolerance_a_stopped_engine_is_reported_and_a_dead_one_ends_the_run(
    engines, model, tmp_path, monkeypatch
):
    for name in ("SILENT_S", "TOKEN_TIMEOUT_S"):
        monkeypatch.setattr(f"furlong.inference.supervisor.supervisor.{name}", 0.4)
    data, folder = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "run"
    engines.fault = partial(faulty_engines.sends_a_signal_while_generating, signal.SIGSTOP, tmp_path / "stopped")
    told: list[dict] = []

    def kill() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not told:
            with contextlib.suppress(FileNotFoundError):
                told.extend(event for event in events(folder, "diagnosis") if event["id"] == "ENG06")
            time.sleep(0.02)
        os.kill(engines.alive()[0], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    argv = flags(model, data, folder, rollout_num_gpus=1, num_rollout=2)
    with pytest.raises(
        EngineError, match=r"(?s)was ended by signal 9; the last lines of its log.*--use-fault-tolerance"
    ):
        train(argv)
    killer.join(10)
    evidence = told[0]["evidence"]
    assert evidence["running"] > 0
    assert evidence["asked"] == "/generate"
    assert "/health_generate did not answer within 0.4 s" in evidence["health"]
    assert engines.alive() == []
