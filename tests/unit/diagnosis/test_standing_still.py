"""A run that stands still, judged by the age of its last event and the state of its processes."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from furlong.config import parse
from furlong.diagnosis.postmortem.recorded_run import RecordedRun
from furlong.diagnosis.postmortem.run_examination import examine
from furlong.diagnosis.postmortem.standing_still import (
    RunProcess,
    last_progress,
    stopped_processes,
    without_progress,
)

MAIN = [RunProcess(7, "furlong train", False, True)]


def run_at(path: Path, *times: float, **start: Any) -> RecordedRun:
    """A run that started at `times[0]` and ended a step at each of the others."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(parse(["--hf-checkpoint", "none"]).to_json())
    events: list[dict[str, Any]] = [{"time": times[0], "event": "start", **start}]
    events += [{"time": when, "event": "step", "step": i} for i, when in enumerate(times[1:], 1)]
    (path / "events.jsonl").write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in events))
    (path / "run.log").touch()
    return RecordedRun.read(path)


@pytest.mark.parametrize(
    ("times", "age_s", "is_reported"),
    [
        ((0, 5, 10, 15), 299, False),
        ((0, 5, 10, 15), 301, True),
        ((0, 100, 200), 999, False),
        ((0, 100, 200), 1001, True),
        ((0,), 3599, False),  # it starts
        ((0,), 3601, True),
    ],
)
def test_no_progress_is_reported_after_a_time_that_the_steps_justify(
    tmp_path: Path, times: tuple[float, ...], age_s: float, is_reported: bool
) -> None:
    found = without_progress(run_at(tmp_path / "run", *times), age_s, "step", MAIN)
    assert [each.id for each in found] == ["HANG01"] * is_reported
    if found:
        assert f"no progress for {age_s} s" in found[0].finding
        assert found[0].evidence["seconds"] == age_s


def test_groups_count_as_progress_and_reports_do_not(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", 0, 100)
    with (run.folder / "events.jsonl").open("ab") as file:
        file.write(orjson.dumps({"time": 500, "event": "engine_silent", "seconds": 60.0}) + b"\n")
    run = RecordedRun.read(run.folder)
    assert last_progress(run, 1000.0) == (900.0, "step")
    (run.folder / "ledger.jsonl").touch()
    os.utime(run.folder / "ledger.jsonl", (990, 990))
    assert last_progress(run, 1000.0) == (10.0, "write to ledger.jsonl")


def test_stopped_processes_are_named_by_their_part() -> None:
    main = RunProcess(1, "furlong train", True, True)
    engine, worker = RunProcess(2, "python -m sglang.launch_server", True), RunProcess(3, "python -c x", False)
    assert [(d.id, d.evidence["stopped"]) for d in stopped_processes([main, engine, worker])] == [
        ("HANG01", [1]),
        ("ENG06", [2]),
    ]
    assert stopped_processes([worker]) == []


def test_a_stopped_run_is_recognized_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            start = {"process": process.pid, "machine": socket.gethostname()}
            run = run_at(tmp_path / "run", time.time(), **start)
            hang = {"event": "hang", "seconds": 600, "doing": "all threads are idle", "report": "hang_0.txt"}
            with (run.folder / "run.log").open() as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                result = examine(run.folder)
                assert (result.status, result.is_healthy, result.diagnoses) == ("running", True, [])
                os.kill(process.pid, signal.SIGSTOP)
                while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                    time.sleep(0.01)
                for _ in range(2):
                    result = examine(run.folder)
                    assert (result.status, [d.id for d in result.diagnoses]) == ("running", ["HANG01"])
                    assert f"`kill -CONT {process.pid}`" in result.diagnoses[0].remedy
                    add_events(run, hang)  # what the run itself saw of it
        finally:
            process.kill()
        process.wait()
        with (run.folder / "run.log").open() as held:  # by a process that it started
            fcntl.flock(held, fcntl.LOCK_EX)
            assert examine(run.folder).status == "killed"
            elsewhere = run_at(tmp_path / "run", time.time(), process=process.pid, machine="another")
            assert examine(elsewhere.folder).status == "running"


def add_events(run: RecordedRun, *events: dict[str, Any]) -> RecordedRun:
    with (run.folder / "events.jsonl").open("ab") as file:
        file.writelines(orjson.dumps(event) + b"\n" for event in events)
    return RecordedRun.read(run.folder)


def test_a_run_of_another_machine_without_an_end_may_go_on_there(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", time.time() - 9, process=4711, machine="far-away")
    result = examine(run.folder)
    assert (result.status, [each.id for each in result.diagnoses]) == ("unknown", ["KILL01"])
    assert "in progress on far-away" in result.diagnoses[0].cause
    assert "run the doctor on far-away; without process 4711 there" in result.diagnoses[0].remedy


@pytest.mark.parametrize(
    ("words", "event", "expected"),
    [
        ([], "step", "nothing was saved: use --save"),
        (["--save", "x"], "step", "nothing was saved in x"),
        (["--save", "x"], "save", "resume with --load x"),
        (["--save", "x", "--load", "y"], "step", "nothing was saved since --load y"),
    ],
)
def test_a_killed_run_names_the_checkpoint_from_which_it_continues(
    tmp_path: Path, words: list[str], event: str, expected: str
) -> None:
    run = add_events(run_at(tmp_path / "run", 0, 5), {"time": 6, "event": event, "step": 1})
    (run.folder / "config.json").write_text(parse(["--hf-checkpoint", "none", *words]).to_json())
    found = {each.id: each for each in examine(run.folder).diagnoses}
    assert expected in found["KILL01"].remedy


def test_steps_that_a_run_in_progress_cannot_record_are_reported(tmp_path: Path) -> None:
    now = time.time()
    run = run_at(tmp_path / "run", *(now - 20 + step for step in range(12)))
    with (run.folder / "run.log").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        [found] = examine(run.folder).diagnoses
        assert found.id == "CHECK01"
        assert "metrics.jsonl lacks 11 of 11 steps" in found.finding
        rows = [{"step": step} for step in range(1, 10)]
        (run.folder / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        assert examine(run.folder).diagnoses == []
