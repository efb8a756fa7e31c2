"""Ends a run whose user code takes the machine's last memory, with the line, before the kernel ends a process.

The kernel ends the process that it chooses, which may be another program's. Limits of the process (`RLIMIT_AS`,
`RLIMIT_DATA`) are no alternative: engines and CUDA reserve far more addresses than they use, and inherit them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import psutil

from furlong.core.user_code import exit_process
from furlong.core.user_processes import kill_user_processes
from furlong.diagnosis.hang_watchdog import running_user_code
from furlong.interfaces import Observer
from furlong.machine import MemoryUse

logger = logging.getLogger(__name__)

PERIOD_S = 0.2
MAX_FAILURES = 25  # looks in a row that fail before the watchdog does
FULL = 0.85  # fraction of the limit from which on growth counts
TAKEN = 0.1  # fraction of the limit that this process took since
ENDED = 1  # exit code
GIB = 2**30


def _own_bytes() -> int:
    return psutil.Process().memory_info().rss


class MemoryWatchdog:
    """Looks at memory from a thread of its own. Use as a context manager around the run.

    The run ends if less than `reserve` of the machine's or control group's memory is left, this process grew by `TAKEN`
    of it since `FULL` was in use, and a thread executes user code. `end` does not return.
    """

    def __init__(
        self,
        *,
        reserve: float,
        observer: Observer,
        machine: Callable[[], MemoryUse | None] = MemoryUse.of_machine,
        own_bytes: Callable[[], int] = _own_bytes,
        end: Callable[[], object] | None = None,
    ) -> None:
        self._reserve, self._observer, self._machine, self._own_bytes = reserve, observer, machine, own_bytes
        self._end = end or _end
        self._before: int | None = None  # bytes of this process at the last look below `FULL`
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> MemoryWatchdog:
        if self._reserve:
            self._thread = threading.Thread(target=self._watch, name="furlong-memory-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        failures = 0
        while not self._done.wait(PERIOD_S):
            try:
                is_too_much, failures = self._is_too_much(), 0
            except Exception:  # user code may have replaced a function, or taken all descriptors, for a moment
                failures += 1
                if failures == MAX_FAILURES:
                    raise
                continue
            if is_too_much:
                self._end()
                return

    def _is_too_much(self) -> bool:
        """Look once; report user code that took the last memory."""
        use = self._machine()
        if use is None:
            return False
        if self._before is None or use.share < FULL:
            self._before = self._own_bytes()
            return False
        grown = self._own_bytes() - self._before
        if use.share <= 1 - self._reserve or grown < TAKEN * use.limit or (place := running_user_code()) is None:
            return False
        message = (
            f"{place} took {grown / GIB:.1f} GiB, and {use.whose} has {(use.limit - use.used) / GIB:.1f} of "
            f"{use.limit / GIB:.1f} GiB left; ending the run, as the kernel would end any process "
            f"(--hook-memory-reserve {self._reserve:g})"
        )
        logger.error("%s", message)
        self._observer.notify("failed", error="MemoryError", message=message)
        return True


def _end() -> None:
    """Memory may not suffice to end in good order."""
    kill_user_processes()
    exit_process(ENDED)
