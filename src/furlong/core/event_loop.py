"""Run coroutines as a group, call blocking functions in daemon threads, and find code that blocks the event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from furlong.core.user_code import frame_place, user_frame

T = TypeVar("T")


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    If one raises, or this call is cancelled, the others are cancelled and awaited before the error propagates. Unlike
    `asyncio.TaskGroup`, it raises the error itself.

    >>> async def plus_one(number: int) -> int:
    ...     return number + 1
    >>> asyncio.run(gather_or_cancel(map(plus_one, [1, 2])))
    [2, 3]
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.cancelling():  # a second cancel would interrupt its cleanup
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def finish(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Await a coroutine to its end although this call is cancelled, which raises then. Raises TimeoutError."""
    task, cancelled = asyncio.create_task(asyncio.wait_for(work, timeout_s)), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from task.exception()
    return task.result()


def call_in_thread(call: Callable[[], Any], *, name: str) -> asyncio.Future[tuple[Any, BaseException | None]]:
    """Run `call` in a new daemon thread; the future is (value, exception). Called on an event loop.

    A call that hangs occupies its thread until the process ends, and cannot block its exit.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(result: tuple[Any, BaseException | None]) -> None:
        if not answer.done():
            answer.set_result(result)

    def run() -> None:
        try:
            result = (call(), None)
        except BaseException as error:  # noqa: BLE001  passed to the event loop, where it becomes an outcome
            result = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


class LoopProbe:
    """Finds out whether the event loop runs. Call it from another thread than that of the loop, the main thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._has_run = threading.Event()
        self._has_run.set()

    def blocked_at(self) -> str | None:
        """Return the user's line that the loop has run since the last call; None if there is none, or if it runs."""
        if not self._has_run.is_set():
            frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  documented, for debuggers
            frame = user_frame(frames.get(threading.main_thread().ident or 0))
            return None if frame is None else frame_place(frame)
        self._has_run.clear()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._has_run.set)
        return None
