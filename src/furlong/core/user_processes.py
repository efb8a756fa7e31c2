"""Ends the processes that user code starts in the process of a run, and those that they start."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shlex
import sys
import sysconfig
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil

from furlong.core.text import abbreviate

logger = logging.getLogger(__name__)

# Inherited by the processes that are started. Ray does not copy it to workers, unlike FURLONG_*.
MARK = "_FURLONG_STARTED_BY"
_KILLED_WITHIN_S = 5
_PASSES = 6  # a process may start another one while it is looked for
_MAX_CHARS = 120  # of a command that is logged
_PACKAGES = (str(Path(__file__).parent.parent), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


@contextlib.contextmanager
def ending_user_processes() -> Generator[None]:
    """Kill every process that was started here in the body and still runs after it, and log their commands.

    These are the descendants of this process, and (Linux) processes with its mark in their environment whose parent
    has exited. Processes that ran before, and helpers of Python and of installed packages, which end by themselves,
    are not touched. Only for a program that starts nothing else meanwhile, such as `furlong train`.
    """
    mark, before = secrets.token_hex(8), set(_descendants())
    os.environ[MARK] = mark
    try:
        yield
    finally:
        os.environ.pop(MARK, None)
        ended: dict[psutil.Process, str] = {}
        num_empty = 0
        for _ in range(_PASSES):
            found = _started_since(before, mark)
            num_empty = 0 if found.keys() - ended.keys() else num_empty + 1
            if num_empty == 2:  # a process that forks during one pass is seen by the next
                break
            ended |= found
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(list(found), timeout=_KILLED_WITHIN_S)
        if ended:
            shown = abbreviate([f"{command} (process {process.pid})" for process, command in ended.items()])
            count = f"{len(ended)} process{'es' * (len(ended) != 1)}"
            logger.warning("killed %s that user code had started and that still ran: %s", count, shown)


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _started_since(before: set[psutil.Process], mark: str) -> dict[psutil.Process, str]:
    """Return the processes to kill, with their commands."""
    found: dict[psutil.Process, str] = {}
    left_alone: set[int] = {process.pid for process in before} | _helpers_of_python()
    for process in [*_descendants(), *_marked(mark)]:  # parents come before their children
        if process in found or process in before:
            continue
        try:
            words = process.cmdline()
            is_helper = process.pid in left_alone or process.ppid() in left_alone or _is_of_package(words)
            if is_helper or process.status() == psutil.STATUS_ZOMBIE:
                left_alone.add(process.pid)
                continue
            found[process] = _shown(words or [process.name()])
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or belongs to another user
            continue
    return found


def _marked(mark: str) -> list[psutil.Process]:
    """Return the other processes that inherited the mark, oldest first; they have left the tree of this process."""
    if sys.platform != "linux":
        return []
    text, found = f"{MARK}={mark}".encode(), list[psutil.Process]()
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # of other users, or ended
            if pid != os.getpid() and text in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(pid))
    return sorted(found, key=lambda process: process.create_time())


def _helpers_of_python() -> set[int]:
    """Return the processes that `multiprocessing` keeps to clean up after this one; they end with it."""
    tracker: Any = sys.modules.get("multiprocessing.resource_tracker")
    server: Any = sys.modules.get("multiprocessing.forkserver")
    pids = [
        getattr(getattr(tracker, "_resource_tracker", None), "_pid", None),
        getattr(getattr(server, "_forkserver", None), "_forkserver_pid", None),
    ]
    return {pid for pid in pids if pid is not None}


def _is_of_package(words: list[str]) -> bool:
    """Return whether the program or its script is a file of furlong or an installed package, as of Ray and W&B."""
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    return any(word.startswith(_PACKAGES) for word in (*words[:1], script))


def _shown(words: list[str]) -> str:
    command = shlex.join(words)
    return command if len(command) <= _MAX_CHARS else f"{command[:_MAX_CHARS]}..."
