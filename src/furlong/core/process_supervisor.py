"""Supervisor of one command: starts it within limits, and ends every process that it started.

Run as a script, without furlong or site-packages: `python -I -S process_supervisor.py SPEC`. SPEC is JSON of
`supervised_process.Supervisor`. The command inherits stdin, stdout, stderr and the environment. The descriptor
`control` is a pipe whose end ends the command. The descriptor `report` gets one line of JSON when all processes have
ended. TMPDIR, made in the directory `temporary`, is deleted then. Orphans are adopted and killed one by one; nothing
is isolated.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

_PDEATHSIG, _SUBREAPER = 1, 36
_SAMPLE_S = 0.05  # between two looks at memory and the number of processes
_KILLED_WITHIN_S = 5.0
_IS_LINUX = sys.platform == "linux"


def _supervise(spec: dict[str, Any]) -> None:
    """Run the command of `spec` until all its processes have ended."""
    if _IS_LINUX:
        _prctl(_SUBREAPER, 1)
    wake, signaled = os.pipe()
    os.set_blocking(signaled, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signaled, warn_on_full_buffer=False)
    try:
        child = subprocess.Popen(
            spec["command"], cwd=spec["directory"], start_new_session=True, preexec_fn=_limiter(spec["limits"])
        )
    except (OSError, subprocess.SubprocessError) as error:
        _write(spec["report"], {"code": None, "reason": f"the command cannot be started: {error}", "fault": ""})
        return
    null = os.open(os.devnull, os.O_RDWR)  # the end of the command's pipes is that of its processes
    for number in (0, 1, 2):
        os.dup2(null, number)
    try:
        code, reason = _watch(spec, child, wake)
    except Exception as error:  # noqa: BLE001  stderr is closed: the report says it
        code, reason = None, f"its supervisor failed: {type(error).__name__}: {error}"
    left = _kill_descendants(child)
    fault = f"{left} processes of a command could not be killed; end them, or run it in Docker" if left else ""
    _write(spec["report"], {"code": code, "reason": reason, "fault": fault})


def _watch(spec: dict[str, Any], child: subprocess.Popen[bytes], wake: int) -> tuple[int | None, str]:
    """Wait for the command's end, that of the control pipe, or a limit. Returns the exit code and the reason."""
    limits = spec["limits"]
    samples = limits["memory_bytes"] or limits["max_processes"]
    poll = (
        select.poll()
    )  # `select` takes no descriptor above 1023, which `control` is if the caller has many connections
    poll.register(spec["control"], select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        ready = [number for number, _ in poll.poll(_SAMPLE_S * 1000 if samples else None)]
        if spec["control"] in ready:
            return None, "ended by the caller"
        if wake in ready:
            os.read(wake, 4096)
            if (code := _reap(child)) is not None:
                return code, ""
        if samples and (reason := _exceeded(limits)):
            return None, reason


def _reap(child: subprocess.Popen[bytes]) -> int | None:
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child.pid:
            code = child.returncode = os.waitstatus_to_exitcode(status)


def _exceeded(limits: dict[str, Any]) -> str:
    processes = _listed_children()
    if limits["max_processes"] and len(processes) > limits["max_processes"]:
        return f"{len(processes)} processes, the limit is {limits['max_processes']}"
    resident = sum(processes.values()) * resource.getpagesize()
    if limits["memory_bytes"] and resident > limits["memory_bytes"]:
        return f"{resident >> 20} MiB of memory, the limit is {limits['memory_bytes'] >> 20} MiB"
    return ""


def _listed_children() -> dict[int, int]:
    """Return what `_descendants` does, from the lists of children that the kernel keeps: 25 times faster.

    A process that ends meanwhile may hide another one, which the next look finds.
    """
    found, unread = dict[int, int](), [os.getpid()]
    if not os.path.exists(f"/proc/{unread[0]}/task/{unread[0]}/children"):  # an option of the kernel
        return _descendants()
    while unread:
        folder = f"/proc/{unread.pop()}/task"
        with contextlib.suppress(OSError):  # it has ended
            for task in os.listdir(folder):
                with open(f"{folder}/{task}/children") as file:
                    children = [int(word) for word in file.read().split()]
                for pid in children:
                    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
                        found[pid] = int(file.read().rpartition(b")")[2].split()[21])
                    unread.append(pid)
    return found


def _descendants() -> dict[int, int]:
    parents: dict[int, int] = {}
    pages: dict[int, int] = {}
    for name in os.listdir("/proc") if _IS_LINUX else []:
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                parents[int(name)], pages[int(name)] = int(fields[1]), int(fields[21])
    known, found = {os.getpid()}, dict[int, int]()
    while new := [pid for pid, parent in parents.items() if parent in known and pid not in known]:
        known.update(new)
        found |= {pid: pages[pid] for pid in new}
    return found


def _kill_descendants(child: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + _KILLED_WITHIN_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    while True:
        _reap(child)
        left = _descendants()
        if not left or time.monotonic() > deadline:
            return len(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _limiter(limits: dict[str, Any]) -> Callable[[], None]:
    """Return what the command's process does before its program begins."""
    numbers = (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_DATA, limits["memory_bytes"]),  # reserved addresses do not count, as those of Go and Node.js
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
    )

    def limit() -> None:
        for kind, number in numbers:
            if number is not None:
                hard = resource.getrlimit(kind)[1]
                lowered = number if hard == resource.RLIM_INFINITY else min(number, hard)
                resource.setrlimit(kind, (lowered, lowered))
        if _IS_LINUX:
            _prctl(_PDEATHSIG, signal.SIGKILL)

    return limit


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")


def _write(report: int, record: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the caller is gone, and this process will end
        os.write(report, json.dumps(record).encode() + b"\n")


def delete_tree(root: str) -> None:
    """Delete a directory of any depth: folders move up to it first, so that no path is long. Raises OSError."""
    waiting, word, count = [root], os.urandom(8).hex(), 0
    while waiting:
        folder = waiting.pop()
        os.chmod(folder, 0o700)
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                count += 1
                os.chmod(entry.path, 0o700)  # a folder that moves gets another parent written into it
                os.rename(entry.path, f"{root}/{word}{count}")
                waiting.append(f"{root}/{word}{count}")
            else:
                os.unlink(entry.path)
        if folder != root:
            os.rmdir(folder)
    os.rmdir(root)


def main(spec: dict[str, Any]) -> None:
    """Supervise the command of `spec`, with a new TMPDIR if it names a place for one."""
    if not spec["temporary"]:
        _supervise(spec)
        return
    folder = f"{spec['temporary']}/furlong-{os.urandom(8).hex()}"
    try:
        os.mkdir(folder, 0o700)
    except OSError as error:
        _write(spec["report"], {"code": None, "reason": "", "fault": f"a command's TMPDIR cannot be made: {error}"})
        return
    os.environ["TMPDIR"] = folder
    try:
        _supervise(spec)
    finally:
        with contextlib.suppress(OSError):  # nobody reads this process's stderr any more
            delete_tree(folder)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
