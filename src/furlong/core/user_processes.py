"""Ends the processes that user code starts in the process of a run, and those that they start."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import secrets
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Generator
from pathlib import Path
from typing import Any

from psutil import STATUS_ZOMBIE, AccessDenied, NoSuchProcess, Process, pids, wait_procs

from furlong.core.scratch_folder import scratch_reaper
from furlong.core.text import abbreviate

logger = logging.getLogger(__name__)

# Inherited by the processes that are started. Ray does not copy it to workers, unlike FURLONG_*.
MARK = "_FURLONG_STARTED_BY"
_KILLED_WITHIN_S = 5
_PASSES = 6  # a process may start another one while it is looked for
_OWN = "from furlong."  # in commands of furlong's helpers, which a signal may leave at the moment of their start
_MAX_CHARS = 120  # of a command that is logged
_REAPER = str(Path(__file__).with_name("user_process_reaper.py"))
_PACKAGES = (str(Path(__file__).parent.parent), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


@contextlib.contextmanager
def ending_user_processes() -> Generator[None]:
    """Kill every process that was started here in the body and still runs after it, and log their commands.

    These are the descendants of this process, and (Linux) processes with its mark whose parent has exited. Processes
    that ran before, and helpers of Python and of installed packages, which end by themselves, are not touched. Only
    for a program that starts nothing else meanwhile, such as `furlong train`. May be nested.
    """
    started = _Started()
    _ACTIVE.append(started)
    try:
        yield
    finally:
        _ACTIVE.remove(started)
        started.close()
        started.kill()


def kill_user_processes() -> None:
    """Kill what the open `ending_user_processes` would kill at its end, before this process exits without it."""
    for started in reversed(_ACTIVE):
        started.kill()


class UserProcessReaper:
    """Waits in its own process to kill what user code started, if this process is killed with SIGKILL (Linux).

    Processes are those of the open `ending_user_processes`; without one, nothing is started or killed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if (mark := os.environ.get(MARK)) is None or sys.platform != "linux":
            return
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _REAPER, str(os.getpid()), mark, MARK, *_PACKAGES],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _REAPERS.add(self._process)

    def close(self) -> None:
        """End the process without killing anything."""
        if self._process is not None:
            _REAPERS.discard(self._process)
            try:
                self._process.communicate(b"\n")
            except OSError:  # user code has closed the pipe
                self._process.kill()
                self._process.wait()
            self._process = None


_REAPERS: set[subprocess.Popen[bytes]] = set()


def _close_in_fork() -> None:
    for process in _REAPERS:  # the pipe ends with the process of the run
        if process.stdin is not None:
            process.stdin.close()


os.register_at_fork(after_in_child=_close_in_fork)


class _Started:
    """The processes that were started in this process since the object was created.

    Linux: a process whose parent has exited has the mark in its environment, if it was started as a program, or shares
    a mapping with the mark as its name, if it was forked.
    """

    def __init__(self) -> None:
        self._mark, self._before = secrets.token_hex(8), {*_descendants()}
        self._outer = os.environ.get(MARK)
        self._address = _map_name(self._mark)
        os.environ[MARK] = self._mark

    def close(self) -> None:
        """Remove the mark from this process."""
        os.environ.pop(MARK, None)
        if self._outer is not None:
            os.environ[MARK] = self._outer
        if self._address is not None:
            ctypes.CDLL(None).munmap(ctypes.c_void_p(self._address), ctypes.c_size_t(mmap.PAGESIZE))

    def kill(self) -> None:
        """Kill the processes, and log their commands."""
        ended: dict[Process, str] = {}
        num_empty = 0
        for _ in range(_PASSES):
            found = self._find()
            num_empty = 0 if found.keys() - ended.keys() else num_empty + 1
            if num_empty == 2:  # a process that forks during one pass is seen by the next
                break
            ended |= found
            for process in found:
                with contextlib.suppress(NoSuchProcess):
                    process.kill()
            wait_procs(list(found), timeout=_KILLED_WITHIN_S)
        shown = [f"{command} (process {each.pid})" for each, command in ended.items() if _OWN not in command]
        if shown:
            count = f"{len(shown)} process{'es' * (len(shown) != 1)}"
            logger.warning("killed %s that user code had started and that still ran: %s", count, abbreviate(shown))

    def _find(self) -> dict[Process, str]:
        """Return the processes to kill, with their commands."""
        found: dict[Process, str] = {}
        left_alone: set[int] = {process.pid for process in self._before} | _helpers_of_python() | _helpers_of_furlong()
        for process in [*_descendants(), *_marked(self._mark)]:  # parents come before their children
            if process in found or process in self._before:
                continue
            try:
                words = process.cmdline()
                is_helper = process.pid in left_alone or process.ppid() in left_alone or _is_of_package(words)
                if is_helper or process.status() == STATUS_ZOMBIE:
                    left_alone.add(process.pid)
                    continue
                found[process] = _shown(words or [process.name()])
            except (NoSuchProcess, AccessDenied):  # it has ended, or belongs to another user
                continue
        return found


_ACTIVE: list[_Started] = []


def _descendants() -> list[Process]:
    return Process().children(recursive=True)


def _map_name(name: str) -> int | None:
    """Map a page of a memory file of this name, which processes inherit that are forked; returns its address.

    `mmap.mmap` is not used because it keeps a descriptor, which user code may close.
    """
    if sys.platform != "linux":
        return None
    file = os.memfd_create(name)
    try:
        os.ftruncate(file, mmap.PAGESIZE)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    finally:
        os.close(file)
    return None if address == ctypes.c_void_p(-1).value else address


def _marked(mark: str) -> list[Process]:
    """Return the other processes that inherited the mark, oldest first; they have left the tree of this process."""
    if sys.platform != "linux":
        return []
    variable, mapping, found = f"{MARK}={mark}".encode(), f"/memfd:{mark} ".encode(), list[Process]()
    program = os.readlink("/proc/self/exe")
    for pid in pids():
        with contextlib.suppress(OSError, NoSuchProcess):  # of other users, or ended
            folder = Path(f"/proc/{pid}")
            if pid != os.getpid() and (
                variable in (folder / "environ").read_bytes().split(b"\0")
                or (os.readlink(folder / "exe") == program and mapping in (folder / "maps").read_bytes())
            ):
                found.append(Process(pid))
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


def _helpers_of_furlong() -> set[int]:
    """Return the processes that clean up after this one, which have no command of their own at their start."""
    reaper = scratch_reaper()
    return {process.pid for process in _REAPERS} | ({reaper} if reaper is not None else set[int]())


def _is_of_package(words: list[str]) -> bool:
    """Return whether the program or its script is a file of furlong or an installed package, as of Ray and W&B."""
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    return any(word.startswith(_PACKAGES) for word in (*words[:1], script))


def _shown(words: list[str]) -> str:
    command = _OWN if any(_OWN in word for word in words) else shlex.join(words)
    return command if len(command) <= _MAX_CHARS else f"{command[:_MAX_CHARS]}..."
