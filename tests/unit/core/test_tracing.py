"""Spans of all processes in one file that a trace viewer reads."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from furlong.cli import main
from furlong.core.tracing import FOLDER, LAST, Tracer, merge


def events(path: Path) -> list[dict]:
    return json.loads(path.read_text())["traceEvents"]


@pytest.fixture
def tracer(tmp_path):
    tracer = Tracer()
    tracer.start(tmp_path / "trace", "driver")
    yield tracer
    tracer.stop()


def merged(tracer: Tracer, folder: Path) -> list[dict]:
    tracer.stop()
    count = merge(folder / "trace", folder / "trace.json")
    result = events(folder / "trace.json")
    assert len(result) == count
    return result


def test_nested_spans_lie_within_each_other_on_one_line(tracer, tmp_path):
    with tracer.span("train", rollout=3), tracer.span("step"):
        pass
    inner, outer = (e for e in merged(tracer, tmp_path) if e["ph"] == "X")
    assert (inner["name"], outer["name"], outer["args"]) == ("step", "train", {"rollout": 3})
    assert inner["tid"] == outer["tid"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_overlapping_flights_have_separate_ends(tracer, tmp_path):
    async def fly(name: int) -> None:
        with tracer.flight("generate", sample=name):
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(fly(1), fly(2))

    asyncio.run(both())
    flights = [e for e in merged(tracer, tmp_path) if e["ph"] in "be"]
    assert [e["ph"] for e in flights] == ["b", "b", "e", "e"]
    assert len({e["id"] for e in flights}) == 2


def test_a_span_that_raises_is_recorded(tracer, tmp_path):
    with pytest.raises(ValueError, match="x"), tracer.span("train"):
        raise ValueError("x")
    assert [e["name"] for e in merged(tracer, tmp_path) if e["ph"] == "X"] == ["train"]


def test_processes_and_threads_are_named(tracer, tmp_path):
    def work() -> None:
        with tracer.span("engine step"):
            pass

    thread = threading.Thread(target=work, name="furlong-engine")
    thread.start()
    thread.join()
    metadata = [e for e in merged(tracer, tmp_path) if e["ph"] == "M"]
    assert {"driver", "furlong-engine"} <= {e["args"].get("name") for e in metadata}
    assert [e["args"]["sort_index"] for e in metadata if e["name"] == "process_sort_index"] == [LAST]


def test_a_child_process_writes_to_the_same_folder(tracer, tmp_path):
    code = (
        "from furlong.core.tracing import tracer\n"
        "tracer.start_from_environment('engine')\n"
        "with tracer.span('engine step'): pass\n"
    )
    environment = {FOLDER: str(tmp_path / "trace"), "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    with tracer.span("train"):
        pass
    boxes = {e["name"]: e["pid"] for e in merged(tracer, tmp_path) if e["ph"] == "X"}
    assert len(set(boxes.values())) == 2


def test_an_incomplete_line_of_a_killed_process_is_skipped(tracer, tmp_path, capsys):
    with tracer.span("train"):
        pass
    tracer.stop()
    (file,) = (tmp_path / "trace").iterdir()
    file.write_bytes(file.read_bytes() + b'{"ph": "X", "na')
    (tmp_path / "ledger.jsonl").touch()
    assert main(["report", str(tmp_path), "--trace"]) == 0
    assert [e["name"] for e in events(tmp_path / "trace.json") if e["ph"] == "X"] == ["train"]
    assert "open it in ui.perfetto.dev" in capsys.readouterr().out


def test_a_tracer_that_was_not_started_writes_nothing(tmp_path):
    tracer = Tracer()
    with tracer.span("train"), tracer.flight("generate"):
        pass
    assert list(tmp_path.iterdir()) == []
