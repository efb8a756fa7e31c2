"""Where user code blocks the event loop, and coroutines that end together."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Iterable
from types import FrameType
from typing import Any, TypeVar

from furlong.core.user_code import is_user_file

T = TypeVar("T")


class LoopProbe:
    """Finds out whether the event loop runs. Call it from another thread than that of the loop, the main thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._has_run = threading.Event()
        self._has_run.set()

    @property
    def has_run(self) -> bool:
        """Whether the loop has run since the last call of `blocked_at`."""
        return self._has_run.is_set()

    def blocked_at(self) -> str | None:
        """Return the user's line that the loop has run since the last call; None if there is none, or if it runs."""
        if not self._has_run.is_set():
            frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  documented, for debuggers
            frame = user_frame(frames.get(threading.main_thread().ident or 0))
            return None if frame is None else place_of(frame)
        self._has_run.clear()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._has_run.set)
        return None


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of user code that the event loop called; None if it runs none."""
    found: FrameType | None = None
    while frame is not None:
        if is_event_loop(frame):
            return found
        if found is None and is_user_file(frame.f_code.co_filename):
            found = frame
        frame = frame.f_back
    return None


def is_event_loop(frame: FrameType) -> bool:
    """Return whether this is the frame of the event loop itself."""
    code = frame.f_code
    return code.co_name == "run_forever" and code.co_filename.endswith("asyncio/base_events.py")


def place_of(frame: FrameType) -> str:
    """Return `function (file:line)` of a frame."""
    code = frame.f_code
    return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    If one raises, or this call is cancelled, the others are cancelled and awaited before the error propagates.

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
