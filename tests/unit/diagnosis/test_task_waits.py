"""What a hanging run's tasks and threads wait for: the user's function, and whether the engine owes it an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from furlong.core.sample import Sample
from furlong.core.tracing import Heartbeat
from furlong.diagnosis.hang_watchdog import HangWatchdog
from furlong.interfaces import Completion, Engine, SamplingParams
from furlong.rollout.agent import policy
from furlong.rollout.policy import Policy
from furlong.rollout.user_samples import call_generate_function

SECONDS = 0.3


class NeverAnswers:
    caches_prefixes, scored_temperatures = False, None

    async def generate(self, *_: Any, **__: Any) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError


class AnswersSoon:
    """Answers after a moment in which the event loop is idle: a report never finds it inside this engine."""

    caches_prefixes, scored_temperatures = False, None

    async def generate(self, *_: Any, **__: Any) -> Completion:
        await asyncio.sleep(0.002)
        return Completion(tokens=[1], log_probs=[0.0], versions=[0], finish_reason="stop")


async def asks(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    await policy().generate([1])
    return sample


async def asks_for_ever(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    while True:
        await policy().generate([1])


async def waits_for_a_tool(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    await asyncio.Event().wait()
    return sample


async def loops(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    until = time.monotonic() + 4 * SECONDS
    while time.monotonic() < until:
        torch.zeros(64, 64).softmax(-1)
    return sample


def call(function: Callable[..., Any], engine: Any) -> Coroutine[Any, Any, Any]:
    sample = Sample(index=0, tokens=[1, 2])
    served: Engine = engine
    return call_generate_function(
        function, sample, SamplingParams(), Policy(served, None, "s"), args=None, evaluation=False
    )


class Events:
    stop_requested = False

    def __init__(self) -> None:
        self.hang: dict[str, Any] = {}
        self.blocked: list[dict[str, Any]] = []

    def notify(self, event: str, **fields: Any) -> None:
        if event == "blocked":
            self.blocked.append(fields)
        if event == "hang":
            self.hang = self.hang or fields


def report_of(folder: Path, *calls: tuple[Callable[..., Any], Any], running: int = 0) -> dict[str, Any]:
    """The event of a run in which only these functions run."""
    events = Events()

    async def run(hang: HangWatchdog) -> None:
        tasks = [asyncio.create_task(call(*each)) for each in calls]
        hang.attach(tasks[0])
        for _ in range(200):
            await asyncio.sleep(0.02)
            if events.hang:
                break
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with HangWatchdog(folder, seconds=SECONDS, observer=events, depths=lambda: {"engine running": running}) as hang:
        asyncio.run(run(hang))
    return events.hang


def test_a_function_that_waits_for_the_engine_is_named_with_its_line(tmp_path: Path) -> None:
    event = report_of(tmp_path, (asks, NeverAnswers()), (asks, NeverAnswers()), running=2)
    assert "2 x asks (diagnosis/test_task_waits.py:" in event["doing"]
    assert "in policy().generate" in event["doing"]
    assert event["requests"] == 0
    assert "policy().generate" in (tmp_path / "hang_0.txt").read_text()


def test_a_slow_tool_is_not_blamed_on_the_engine(tmp_path: Path) -> None:
    event = report_of(tmp_path, (waits_for_a_tool, NeverAnswers()))
    assert "1 x waits_for_a_tool (" in event["doing"]
    assert "policy().generate" not in event["doing"]
    event = report_of(tmp_path, (waits_for_a_tool, NeverAnswers()), (asks, NeverAnswers()), running=1)
    assert all(name in event["doing"] for name in ("waits_for_a_tool", "asks"))


def test_a_function_that_never_ends_has_its_number_of_requests(tmp_path: Path) -> None:
    for attempt in range(5):  # the report may come before the first request is finished
        (folder := tmp_path / str(attempt)).mkdir()
        event = report_of(folder, (asks_for_ever, AnswersSoon()), running=1)
        if event["requests"] and "asks_for_ever (" in event["doing"]:
            break
    assert event["requests"] > 0
    assert "asks_for_ever (" in event["doing"]


def test_an_endless_loop_is_named_by_its_function_and_not_by_an_operator(tmp_path: Path) -> None:
    event = report_of(tmp_path, (loops, AnswersSoon()))
    assert "MainThread is in loops (diagnosis/test_task_waits.py:" in event["doing"]


def test_a_line_that_blocks_the_event_loop_is_reported_once_before_the_run_counts_as_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("furlong.diagnosis.hang_watchdog.BLOCKED_S", 0.1)
    events = Events()

    async def run(hang: HangWatchdog) -> None:
        hang.attach(task := asyncio.create_task(call(loops, AnswersSoon())))
        await asyncio.gather(task, return_exceptions=True)

    with HangWatchdog(tmp_path, seconds=SECONDS, observer=events) as hang:
        asyncio.run(run(hang))
    event, *_ = events.blocked
    assert {each["where"].partition(" (")[0] for each in events.blocked} == {
        "loops"
    }  # a line of it, on a busy machine two
    assert event["where"].startswith("loops (")
    assert "test_task_waits.py:" in event["where"]
    assert event["seconds"] >= 0.1


def test_heartbeats_count_and_age_and_notes_are_no_progress() -> None:
    beats = Heartbeat()
    beats.note("request")
    assert (beats.notes(), beats.last(), beats.counts()) == ({"request": 1}, 0, {})
    for name in ("a", "a", "b"):
        beats.beat(name)
    assert beats.counts() == {"a": 2, "b": 1}
    assert 0 <= beats.ages()["b"] <= beats.ages()["a"]
    beats.reset()
    assert (beats.counts(), beats.notes()) == ({}, {})
