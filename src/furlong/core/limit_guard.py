"""Refuses user code that lowers a resource limit of the process of the run, where it does so.

Until the function that lowers `RLIMIT_AS` or `RLIMIT_NOFILE` returns, any other thread of the process may fail, and a
thread that starts then may leave the one that started it waiting forever. So the change must not happen at all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
from collections.abc import Callable, Generator
from typing import Any

from furlong.core.process_state import LIMITS, lowered_limit


@contextlib.contextmanager
def limits_stay(refuse: Callable[[str], None]) -> Generator[None]:
    """In the body, call `refuse` with place and change before user code lowers a limit of this process; it may raise.

    Only calls of `resource.setrlimit` and `prlimit` are seen. Forked processes may lower theirs.
    """
    pid, setrlimit, prlimit = os.getpid(), resource.setrlimit, resource.prlimit

    def check(number: int, limits: Any) -> None:
        name = next((name for name in LIMITS if getattr(resource, name) == number), None)
        if (
            name is None
            or os.getpid() != pid
            or (text := lowered_limit(name, limits, resource.getrlimit(number))) is None
        ):
            return
        if (place := _user_place()) is not None:
            refuse(f"{place} {text}")

    @functools.wraps(setrlimit)
    def checked(number: int, limits: Any, /) -> None:
        check(number, limits)
        setrlimit(number, limits)

    @functools.wraps(prlimit)
    def checked_of(process: int, number: int, *limits: Any) -> tuple[int, int]:
        if limits and process in (0, pid):
            check(number, limits[0])
        return prlimit(process, number, *limits)

    resource.setrlimit, resource.prlimit = checked, checked_of
    try:
        yield
    finally:
        resource.setrlimit, resource.prlimit = setrlimit, prlimit


def _user_place() -> str | None:
    """Return `file:line` of the innermost frame in a file of the user; None if none calls."""
    from furlong.core.user_code import is_user_file  # imports `process_guard`

    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
