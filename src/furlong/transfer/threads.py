"""Daemon threads for work that may block without end, such as collectives."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str = "furlong-sync") -> asyncio.Future[T]:
    """Run `work` in a daemon thread with the caller's CUDA device. The program does not wait for it at exit."""
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

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
