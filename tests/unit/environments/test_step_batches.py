"""Steps of several environments in one call: what belongs to a batch, and what one environment's failure changes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from furlong.environments import Step
from furlong.environments.step_batches import WINDOW_S, StepBatches, checked_steps
from furlong.errors import RolloutError


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def steps_of(batches: StepBatches, messages: str, started: list[str] | None = None) -> list[asyncio.Task[Step]]:
    """Begin a step for each message, of the instance with the upper-case name."""
    note = lambda message: None if started is None else started.append(message)  # noqa: E731
    return [
        asyncio.create_task(batches.step(message.upper(), {"content": message}, lambda m=message: note(m)))
        for message in messages
    ]


def test_steps_within_the_window_are_one_call_and_later_ones_the_next(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("furlong.environments.step_batches.WINDOW_S", 0.2)
    calls: list[list[Any]] = []

    async def step_many(steps: list[Any]) -> list[Step]:
        calls.append([(instance, message["content"]) for instance, message in steps])
        return [Step(f"to {instance}", done=True) for instance, _ in steps]

    async def main() -> None:
        batches = StepBatches("game.py:Game", step_many)
        first = steps_of(batches, "abc")
        await asyncio.sleep(WINDOW_S / 3)
        first += steps_of(batches, "d")
        assert [step.messages for step in await asyncio.gather(*first)] == ["to A", "to B", "to C", "to D"]
        await asyncio.gather(*steps_of(batches, "e"))

    run(main())
    assert calls == [[("A", "a"), ("B", "b"), ("C", "c"), ("D", "d")], [("E", "e")]]


def test_calls_do_not_overlap_and_steps_that_arrive_during_one_are_the_next():
    running, sizes = [0], list[int]()

    async def step_many(steps: list[Any]) -> list[Step]:
        running[0] += 1
        sizes.append(len(steps))
        assert running[0] == 1
        await asyncio.sleep(0.03)
        running[0] -= 1
        return [Step(done=True)] * len(steps)

    async def main() -> None:
        batches, tasks = StepBatches("game.py:Game", step_many), list[asyncio.Task[Step]]()
        for _ in range(3):
            tasks += steps_of(batches, "ab")
            await asyncio.sleep(0.012)
        await asyncio.gather(*tasks)

    run(main())
    assert sizes == [2, 4]


def test_a_failure_of_one_environment_is_not_one_of_the_others():
    async def step_many(steps: list[Any]) -> list[Any]:
        by_message = {"a": Step(done=True, reward=1.0), "b": ValueError("a bug"), "c": 7, "d": Step("next")}
        return [by_message[message["content"]] for _, message in steps]

    async def main() -> list[Any]:
        return await asyncio.gather(*steps_of(StepBatches("game.py:Game", step_many), "abcd"), return_exceptions=True)

    a, b, c, d = run(main())
    assert (a.reward, d.messages) == (1.0, "next")
    assert isinstance(b, ValueError)
    assert isinstance(c, RolloutError)
    assert "step returned 7" in str(c)


def test_an_exception_of_the_call_fails_all_of_its_steps_and_no_later_ones():
    calls = [0]

    async def step_many(steps: list[Any]) -> list[Any]:
        calls[0] += 1
        if calls[0] == 1:
            raise ValueError("the simulator has ended")
        return [Step(done=True)] * len(steps)

    async def main() -> list[Any]:
        batches = StepBatches("game.py:Game", step_many)
        failed = await asyncio.gather(*steps_of(batches, "ab"), return_exceptions=True)
        return [*failed, *await asyncio.gather(*steps_of(batches, "ab"))]

    a, b, c, d = run(main())
    assert [str(a), str(b)] == ["the simulator has ended"] * 2
    assert c.done
    assert d.done


def test_a_call_that_nobody_waits_for_does_not_hold_up_the_next():
    hangs, started = [True], list[str]()

    async def step_many(steps: list[Any]) -> list[Step]:
        if hangs[0]:
            await asyncio.Event().wait()
        return [Step(done=True)] * len(steps)

    async def main() -> None:
        batches = StepBatches("game.py:Game", step_many)
        stuck = steps_of(batches, "ab", started)
        while len(started) < 2:
            await asyncio.sleep(0.001)
        after = steps_of(batches, "c", started)
        stuck[0].cancel()
        await asyncio.sleep(3 * WINDOW_S)
        assert started == ["a", "b"], "one episode still waits for the call"
        hangs[0] = False
        stuck[1].cancel()
        await asyncio.gather(*after)

    run(main())
    assert started == ["a", "b", "c"]


def test_any_other_number_of_values_is_refused():
    cases = [
        (None, "returned None for 2"), ([Step(done=True)], "returned 1 values for 2"), (Step(done=True), "Step"),
        ({"a": 1, "b": 2}, "{'a': 1"),
    ]  # fmt: skip
    for value, reason in cases:
        with pytest.raises(RolloutError, match="step_many returned") as raised:
            checked_steps(value, 2, "game.py:Game")
        assert reason in str(raised.value)
