"""Ends the processes that user code starts in the process of the run, also if the run gets SIGKILL (Linux)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from pathlib import Path

RUN_MARK = "_FURLONG_RUN"  # environment variable of the processes that a run starts while its reaper waits
_REAPER = str(Path(__file__).with_name("process_reaper.py"))
_open_ends: set[int] = set()  # of pipes to reapers; forked processes close theirs, so that the pipe ends with the run


class ReapedProcesses:
    """Marks the processes that this process starts from now on; `close` ends those that are left.

    A process that clears its environment, or that closes all descriptors after a fork, is not found.
    """

    def __init__(self) -> None:
        mark = secrets.token_hex(8)
        control, self._open_end = os.pipe()
        self._inherited = os.pipe()
        inode = os.fstat(self._inherited[0]).st_ino
        words = [sys.executable, "-I", "-S", _REAPER, str(control), f"{RUN_MARK}={mark}", str(inode)]
        try:
            self._reaper = subprocess.Popen(
                words, pass_fds=(control,), start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        finally:
            os.close(control)
        _open_ends.add(self._open_end)
        self._before = os.environ.get(RUN_MARK)
        os.environ[RUN_MARK] = mark

    async def close(self) -> None:
        """Kill what is left, after a short time in which it may end by itself."""
        os.environ.pop(RUN_MARK)
        if self._before is not None:
            os.environ[RUN_MARK] = self._before
        for descriptor in (*self._inherited, self._open_end):
            os.close(descriptor)
        _open_ends.discard(self._open_end)
        await asyncio.to_thread(self._reaper.wait)


def _close_in_fork() -> None:
    for descriptor in _open_ends:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _open_ends.clear()


os.register_at_fork(after_in_child=_close_in_fork)
