"""Daemon threads for work that may block without end, such as collectives."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

EXIT_S = 5.0  # the program waits at its end, in total
_running: set[threading.Event] = set()  # of the calls; set when a call has ended
_Inbox = queue.SimpleQueue[Callable[[], Callable[[], None]]]
_idle: list[_Inbox] = []  # of threads that wait for a call


def in_thread(work: Callable[[], T], name: str = "furlong-sync") -> asyncio.Future[T]:
    """Run `work` in a daemon thread with the caller's CUDA device. At exit the program waits `EXIT_S` for it.

    Threads are used again: PyTorch keeps about 100 bytes for each thread that ever called it.
    """
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

    def run() -> Callable[[], None]:
        result, error = None, None
        threading.current_thread().name = name
        try:
            if device is not None:
                torch.cuda.set_device(device)
            result = work()
        except Exception as failure:  # noqa: BLE001  raised where the future is awaited
            error = failure
        return lambda: tell(result, error)

    def tell(result: T | None, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing awaits the future
            loop.call_soon_threadsafe(settle, result, error)
        _running.discard(ended)
        ended.set()

    ended = threading.Event()
    _running.add(ended)
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = _Inbox()
        threading.Thread(target=_serve, args=(inbox,), name=name, daemon=True).start()
    inbox.put(run)
    return future


def _serve(inbox: _Inbox) -> None:
    while True:
        _call(inbox.get(), inbox)


def _call(run: Callable[[], Callable[[], None]], inbox: _Inbox) -> None:
    tell = run()
    _idle.append(inbox)  # before `tell`, so that the next call finds this thread
    tell()


@atexit.register
def _wait_for_threads() -> None:
    # Python ends a thread that returns from C++ during shutdown, and its destructors abort the process ("terminate
    # called without an active exception").
    deadline = time.monotonic() + EXIT_S
    for ended in list(_running):
        ended.wait(max(deadline - time.monotonic(), 0.0))
