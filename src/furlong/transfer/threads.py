"""Daemon threads for work that may block without end, such as collectives."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

EXIT_S = 5.0  # the program waits at its end, in total
_running: set[threading.Thread] = set()


def in_thread(work: Callable[[], T], name: str = "furlong-sync") -> asyncio.Future[T]:
    """Run `work` in a daemon thread with the caller's CUDA device. At exit the program waits `EXIT_S` for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]  set whenever there is no error

    def run() -> None:
        result, error = None, None
        try:
            if device is not None:
                torch.cuda.set_device(device)
            result = work()
        except Exception as failure:  # noqa: BLE001  raised where the future is awaited
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing awaits the future
            loop.call_soon_threadsafe(settle, result, error)
        _running.discard(threading.current_thread())

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running.add(thread)
    thread.start()
    return future


@atexit.register
def _wait_for_threads() -> None:
    # Python ends a thread that returns from C++ during shutdown, and its destructors abort the process ("terminate
    # called without an active exception").
    deadline = time.monotonic() + EXIT_S
    for thread in list(_running):
        thread.join(max(deadline - time.monotonic(), 0.0))
