"""Runs that make no progress: what is reported and written, and how they end."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path

import faulty_hooks
from diagnosed_runs import events, run
from fakes_loop import Unobserved
from faults_marker import fault
from furlong.core.tracing import heartbeat
from furlong.data.audit import audit
from furlong.diagnosis.hang_watchdog import HangWatchdog, busy_in
from furlong.training.fsdp.backend import FsdpBackend
from runs import rows


@fault("HANG01")
def test_a_rollout_that_waits_for_ever_ends_with_a_checkpoint(tmp_path, capsys):
    path = faulty_hooks.__file__
    settings = {"num_rollout": 3, "save": tmp_path / "save", "custom_generate_function_path": f"{path}:generate"}
    faulty = {"custom_generate_function_path": f"{path}:generate_and_wait_for_ever"}
    code, found = run(tmp_path / "run", **settings | faulty, hang_timeout=3, on_hang="stop")
    assert (code, list(found)) == (1, ["HANG01"])
    event = found["HANG01"]
    assert event["evidence"]["seconds"] >= 1
    assert "generate_and_wait_for_ever" in event["finding"]
    assert event["evidence"]["queues"] == {"engine running": 0, "engine waiting": 0}
    assert event["evidence"]["report"] in event["remedy"]
    assert "--on-hang stop" not in event["remedy"]
    report = Path(event["evidence"]["report"]).read_text()
    assert re.search(r" x Task-N+: generate_and_wait_for_ever", report)
    assert "'group': " in report
    assert "Thread 0x" in report
    assert "[HANG01]" in capsys.readouterr().err
    assert events(tmp_path / "run")[-1]["event"] == "stopped"
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    assert run(tmp_path / "run", **settings, load=tmp_path / "save")[0] == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).ok


@fault("HANG01")
def test_a_trainer_that_hangs_is_reported_with_its_source_line_and_continues(tmp_path, monkeypatch):
    step = FsdpBackend.optim_step

    def stuck(self, **role):
        time.sleep(4)
        return step(self, **role)

    monkeypatch.setattr(FsdpBackend, "optim_step", stuck)
    code, found = run(tmp_path / "run", num_rollout=1, hang_timeout=2, on_hang="warn")
    assert (code, list(found)) == (0, ["HANG01"])
    assert "furlong-trainer" in found["HANG01"]["finding"]
    assert "stuck (faults/test_hanging.py:" in found["HANG01"]["finding"]
    assert rows(tmp_path / "run")[0]["diagnosis/HANG01"] == 1
    assert len(list((tmp_path / "run").glob("hang_*.txt"))) == 1
    monkeypatch.undo()
    assert run(tmp_path / "mended", num_rollout=1, hang_timeout=30) == (0, {})


def hang_for_ever(folder: str) -> None:
    """Body of a process whose run cannot end: its loop is blocked."""
    import asyncio

    async def blocked(hang: HangWatchdog) -> None:
        task = asyncio.current_task()
        assert task is not None
        hang.attach(task)
        time.sleep(60)

    with HangWatchdog(Path(folder), seconds=0.2, observer=Unobserved(), stops="stop", grace_s=0.3) as hang:
        asyncio.run(blocked(hang))


def test_a_process_that_cannot_stop_is_ended(tmp_path, forked):
    process = forked.Process(target=hang_for_ever, args=(str(tmp_path),))
    process.start()
    process.join(100)  # the server of forks may start first
    assert process.exitcode == 1
    assert "blocked" in (tmp_path / "hang_0.txt").read_text()


def test_a_run_that_closes_is_not_cancelled(tmp_path):
    async def close_slowly():
        hang = HangWatchdog(tmp_path, seconds=0.1, observer=Unobserved(), stops="stop")
        with hang:
            hang.attach(asyncio.current_task())
            hang.begin_close()
            await asyncio.sleep(0.3)

    asyncio.run(close_slowly())
    assert (tmp_path / "hang_0.txt").exists()


def test_progress_of_any_kind_keeps_the_watchdog_silent(tmp_path):
    with HangWatchdog(tmp_path, seconds=0.2, observer=Unobserved()):
        for _ in range(10):
            time.sleep(0.04)
            heartbeat.beat("micro-batch")
    assert not list(tmp_path.iterdir())
    with HangWatchdog(tmp_path, seconds=0, observer=Unobserved()) as hang:
        assert hang._thread is None


def test_a_busy_thread_is_distinguished_from_an_idle_one():
    go = threading.Event()
    waits = threading.Thread(target=go.wait, name="idle-thread")
    works = threading.Thread(target=lambda: time.sleep(0.3), name="busy-thread")
    waits.start(), works.start()
    time.sleep(0.01)
    assert busy_in("idle-thread") is None
    assert "<lambda> (faults/test_hanging.py:" in str(busy_in("busy-thread"))
    go.set()
    waits.join(), works.join()
    assert busy_in("busy-thread") is None
