"""`BlockingTimer` counts the time in which user code blocks the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from furlong.rollout.timers import BlockingTimer


def run(function):
    """What a function answers, and the seconds that it held."""
    held = BlockingTimer()

    async def body():
        return await held.timed(function)

    return asyncio.run(body()), held.take()


async def blocks():
    time.sleep(0.06)
    await asyncio.sleep(0)
    time.sleep(0.06)
    return "made"


async def waits():
    await asyncio.sleep(0.2)
    return "made"


def test_blocking_sleep_is_counted_and_awaited_sleep_is_not():
    answer, seconds = run(blocks)
    assert answer == "made"
    assert seconds >= 0.12
    assert run(waits)[0] == "made"

    async def both():
        held = BlockingTimer()
        await asyncio.gather(*(held.timed(waits) for _ in range(8)))
        return held.take()

    assert asyncio.run(both()) < 8 * 0.2  # for so long they waited


def test_take_resets_the_seconds():
    held = BlockingTimer()
    held.count(0.04)
    assert held.take() == 0
    held.count(1.0)
    held.count(2.0)
    assert (held.take(), held.take()) == (3.0, 0.0)


def test_errors_and_cancellation_reach_the_function_and_its_caller():
    seen = []

    async def raises():
        await asyncio.sleep(0)
        raise ValueError("mine")

    async def is_cancelled():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(ValueError, match="mine"):
        run(raises)

    async def body():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await BlockingTimer().timed(is_cancelled)

    asyncio.run(body())
    assert seen == ["cancelled"]
