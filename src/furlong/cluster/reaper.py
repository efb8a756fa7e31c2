"""Kills leftover processes of a local Ray cluster after the program that started it has ended, even by SIGKILL.

Run as a script, without furlong or site-packages: `python -S -E reaper.py MARK FOLDER`. stdin is a pipe from the
program; when it closes, every process with MARK in its environment is killed and FOLDER is deleted.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

VARIABLE = "FURLONG_SESSION"
LIMIT_S = 10.0


def marked(mark: str) -> list[int]:
    """Return the ids of all processes that a program with this mark has started, directly or indirectly."""
    entry = f"{VARIABLE}={mark}".encode()
    processes: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if entry in file.read().split(b"\0"):
                        processes.append(int(name))
            except OSError:  # it has ended, or is another user's
                continue
    return processes


def descendants(processes: list[int]) -> list[int]:
    """Return these processes and their descendants: a program that changes its title overwrites its environment."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
    family = set(processes)
    while children := {child for child, parent in parents.items() if parent in family} - family:
        family |= children
    return sorted(family - {os.getpid()})


def main(mark: str, folder: str) -> None:
    """Wait for the end of the program, then clean up."""
    sys.stdin.buffer.read()
    deadline = time.monotonic() + LIMIT_S
    while (left := descendants(marked(mark))) and time.monotonic() < deadline:
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except OSError:  # it has ended meanwhile
                continue
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
