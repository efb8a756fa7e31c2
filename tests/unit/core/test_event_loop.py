"""Coroutines that end together."""

from __future__ import annotations

import asyncio

import pytest

from furlong.core.event_loop import gather_or_cancel


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_failure_or_cancellation_leaves_nothing_running(is_cancelled):
    ended: list[int] = []

    async def work(number: int) -> None:
        try:
            if number == 1 and not is_cancelled:
                raise ValueError("one of three")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)  # what it does about its end is not interrupted
            ended.append(number)

    async def body() -> None:
        task = asyncio.create_task(gather_or_cancel(map(work, range(3))))
        if is_cancelled:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else ValueError):
            await task
        assert sorted(ended) == [0, 1, 2]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(body())
