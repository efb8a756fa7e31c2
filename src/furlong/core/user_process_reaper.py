"""Kills the processes that user code started in the process of a run, after that process was killed with SIGKILL.

Run as a script, without furlong or site-packages: `python -I -S user_process_reaper.py RUN MARK VARIABLE PACKAGE...`.
stdin is a pipe from the process RUN, which writes a line if it ends by itself. Otherwise the processes are killed that
`core.user_processes` marks with MARK, except for helpers of the packages. User code may close the pipe while the run
lives, so that RUN must have ended, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

GRACE_S = 2.0  # for processes that end by themselves
_KILLED_WITHIN_S = 5.0
_ENDS_BY_ITSELF = b"multiprocessing.resource_tracker"  # after it has freed shared memory


def main(run: int, mark: str, variable: str, packages: Sequence[str]) -> None:
    """Wait for the end of the run, then kill its processes."""
    if sys.stdin.buffer.read():
        return
    while os.getppid() == run:
        time.sleep(0.05)
    ends = time.monotonic() + GRACE_S
    while left := _processes(mark, variable, packages):
        now = time.monotonic()
        if now > ends + _KILLED_WITHIN_S:
            return
        for pid in left if now > ends else ():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _processes(mark: str, variable: str, packages: Sequence[str]) -> list[int]:
    """Return the live processes with the mark in their environment, or in the name of a mapping."""
    found: list[int] = []
    entry, mapping = f"{variable}={mark}".encode(), f"/memfd:{mark} ".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if int(folder.name) == os.getpid() or (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z":
                continue
            is_marked = entry in (folder / "environ").read_bytes().split(b"\0")
            if not is_marked and mapping not in (folder / "maps").read_bytes():
                continue
            words = (folder / "cmdline").read_bytes().split(b"\0")
            program = [words[0], next((word for word in words[1:] if not word.startswith(b"-")), b"")]
            of_package = any(word.startswith(os.fsencode(each)) for word in program for each in packages)
            if not of_package and not any(_ENDS_BY_ITSELF in word for word in words):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
