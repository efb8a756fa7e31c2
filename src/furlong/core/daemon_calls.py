"""Calls of blocking functions in daemon threads, which cannot block the exit of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from furlong.core.forked_processes import forks_end_here


def call_in_thread(call: Callable[[], Any], *, name: str) -> asyncio.Future[tuple[Any, BaseException | None]]:
    """Run `call` in a new daemon thread; the future is (value, exception). Called on an event loop.

    A call that hangs occupies its thread until the process ends.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(result: tuple[Any, BaseException | None]) -> None:
        if not answer.done():
            answer.set_result(result)

    def run() -> None:
        try:
            with forks_end_here():
                result = (call(), None)
        except BaseException as error:  # noqa: BLE001  passed to the event loop, where it becomes an outcome
            result = (None, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer
