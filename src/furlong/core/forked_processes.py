"""Ends processes that user code forks where they leave that code: they would continue the run a second time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Generator
from types import FrameType
from typing import Any, NoReturn

_exit = os._exit  # pyright: ignore[reportPrivateUsage]  `exits_raise` replaces it
_loops: list[asyncio.AbstractEventLoop] = []  # that run user code
_forked_at = "user code"  # in a forked process: where


@contextlib.contextmanager
def forks_end_here() -> Generator[None]:
    """End a process that the body forks and that leaves it, by an exception or not."""
    pid = os.getpid()
    try:
        yield
    finally:
        end_if_forked(pid)


def end_if_forked(pid: int) -> None:
    """End this process if it is not `pid` but was forked from it: without cleanup, and with exit code 1."""
    if os.getpid() != pid:
        _end()


@contextlib.contextmanager
def forks_leave_loop(loop: asyncio.AbstractEventLoop) -> Generator[None]:
    """End a process that a task or callback of the loop forks in the body, and that returns to the loop."""
    _loops.append(loop)
    try:
        yield
    finally:
        _loops.remove(loop)


class _Ending(deque[Any]):
    """Stands for the callbacks that a loop runs next; ends the process when the loop asks for them."""

    def popleft(self) -> NoReturn:
        _end()

    def __bool__(self) -> NoReturn:
        _end()


def _end() -> NoReturn:
    os.write(2, f"{_forked_at} forked, and its child process returned; call os._exit() in it\n".encode())
    _exit(1)


def _in_forked_process() -> None:
    global _forked_at
    _forked_at = _place(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    for loop in _loops:
        loop._ready = _Ending()  # pyright: ignore[reportAttributeAccessIssue]  of asyncio's loops in Python
    _loops.clear()


def _place(frame: FrameType | None) -> str:
    """Return `function (file:line)` of the user's innermost function."""
    from furlong.core.user_code import is_user_file  # imports this module

    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "user code" if frame is None else f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


os.register_at_fork(after_in_child=_in_forked_process)
