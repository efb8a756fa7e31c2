"""Reaper of a run: kills what user code started in the process of the run, when that process ends in any way.

Run as a script, without furlong or site-packages: `python -I -S process_reaper.py CONTROL MARK INODE`. CONTROL is a
pipe whose end is that of the run. Processes of the run have MARK (`NAME=value`) in their environment, or, if they were
forked without a new program, have inherited the pipe with the inode INODE.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

GRACE_S = 2.0  # for processes that end by themselves
_KILLED_WITHIN_S = 5.0
_SPARED = b"multiprocessing.resource_tracker"  # frees shared memory, and ends with its parent


def main(control: int, mark: str, inode: int) -> int:
    """Wait for the end of the run, then kill its processes. Returns how many are left."""
    os.read(control, 1)
    ends = time.monotonic() + GRACE_S
    while left := _processes(mark.encode(), inode):
        now = time.monotonic()
        if now > ends + _KILLED_WITHIN_S:
            break
        for pid in left if now > ends else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return len(left)


def _processes(mark: bytes, inode: int) -> list[int]:
    """Return the live processes of the run."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z":
                continue
            is_marked = mark in (folder / "environ").read_bytes().split(b"\0")
            if (is_marked or _has_pipe(folder, inode)) and _SPARED not in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def _has_pipe(folder: Path, inode: int) -> bool:
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) == f"pipe:[{inode}]":
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
