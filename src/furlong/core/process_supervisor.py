"""Supervisor of one command: starts it within limits, and ends every process that it started.

Run as a script, without furlong or site-packages: `python -I -S process_supervisor.py SPEC`. SPEC is JSON of
`supervised_process.Supervisor`. The command inherits stdin, stdout, stderr and the environment. The descriptor
`control` is a pipe whose end ends the command. The descriptor `report` gets one line of JSON when the command starts
and one when all processes have ended. The directory `deletes` is deleted then.

With `isolate` (Linux) the command runs in its own user, process, mount, IPC and network namespaces, so the kernel kills
what it started. Otherwise, and where the kernel refuses, orphans are adopted and killed one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_PDEATHSIG, _SUBREAPER, _CAPBSET_DROP, _SECUREBITS, _NO_NEW_PRIVS = 1, 36, 24, 28, 38
_LOCKED_NO_ROOT = 0b11101111  # root has no capabilities, and nothing can change that
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_SAMPLE_S = 0.05  # between two looks at memory and the number of processes
_KILLED_WITHIN_S = 5.0
_IS_LINUX = sys.platform == "linux"


def main(spec: dict[str, Any]) -> int:
    """Supervise the command of `spec`. Returns 0 when all processes have ended."""
    if spec["role"] == "init":
        _prctl(_PDEATHSIG, signal.SIGKILL)
        return _run(spec, dict(spec["missing"]), has_namespace=True)
    if not spec["isolate"]:
        return _run(spec, {}, has_namespace=False)
    try:
        _unshare(spec)
    except OSError as error:
        reason = f"the kernel refuses user namespaces: {error.strerror}"
        names = ("processes", "files", *(() if spec["network"] else ("network",)))
        return _run(spec, dict.fromkeys(names, reason), has_namespace=False)
    # again, as the first process of the namespace: the kernel kills all others when it ends
    words = [sys.executable, "-I", "-S", __file__, json.dumps({**spec, "role": "init", "missing": {}})]
    init = subprocess.Popen(words, pass_fds=(spec["control"], spec["report"]))
    for number in (spec["control"], spec["report"]):
        os.close(number)
    return init.wait()


def _unshare(spec: dict[str, Any]) -> None:
    """Enter new namespaces, in which the user and group keep their numbers. Raises OSError."""
    if not _IS_LINUX:
        raise OSError(0, f"{sys.platform} has none")
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc().unshare(_NEWUSER | _NEWPID | _NEWNS | _NEWIPC | (0 if spec["network"] else _NEWNET)), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _run(spec: dict[str, Any], missing: dict[str, str], *, has_namespace: bool) -> int:
    if has_namespace:
        missing |= _close_off(spec)
    elif _IS_LINUX:
        _prctl(_SUBREAPER, 1)
    wake, signaled = os.pipe()
    os.set_blocking(signaled, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signaled, warn_on_full_buffer=False)
    _write(spec["report"], {"missing": missing})
    directory = spec["directory"]
    if has_namespace and "files" not in missing:  # it sees its private directory as /tmp
        directory = os.path.join("/tmp", os.path.relpath(directory, spec["private"]))
    try:
        child = subprocess.Popen(
            spec["command"],
            cwd=directory,
            start_new_session=True,
            preexec_fn=_limiter(spec["limits"], drops=has_namespace),
        )
    except (OSError, subprocess.SubprocessError) as error:
        _write(spec["report"], {"code": None, "reason": f"the command cannot be started: {error}", "left": 0})
        return 0
    null = os.open(os.devnull, os.O_RDWR)  # the end of the command's pipes is that of its processes
    for number in (0, 1, 2):
        os.dup2(null, number)
    code, reason = _watch(spec, child, wake)
    left = 0 if has_namespace else _kill_descendants(child)
    _write(spec["report"], {"code": code, "reason": reason, "left": left})
    return 0


def _watch(spec: dict[str, Any], child: subprocess.Popen[bytes], wake: int) -> tuple[int | None, str]:
    """Wait for the command's end, that of the control pipe, or a limit. Returns the exit code and the reason."""
    limits = spec["limits"]
    samples = limits["memory_bytes"] or limits["max_processes"]
    while True:
        ready = select.select([spec["control"], wake], [], [], _SAMPLE_S if samples else None)[0]
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
    """Return the processes below this one, with their resident pages (Linux; empty elsewhere)."""
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
    """Kill the command's group and everything below this process; returns how many are left."""
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


def _limiter(limits: dict[str, Any], *, drops: bool) -> Callable[[], None]:
    """Return what the command's process does before its program begins. Without `drops` it keeps its privileges."""
    numbers = (
        ("RLIMIT_CORE", 0 if drops else None),
        ("RLIMIT_CPU", limits["cpu_s"]),
        ("RLIMIT_DATA", limits["memory_bytes"]),  # reserved addresses do not count, as those of Go and Node.js
        ("RLIMIT_FSIZE", limits["file_bytes"]),
        ("RLIMIT_NOFILE", limits["open_files"]),
        ("RLIMIT_NPROC", limits["max_processes"] if drops else None),  # elsewhere it counts all of the user's
    )

    def limit() -> None:
        for name, number in numbers:
            if number is not None:
                hard = resource.getrlimit(getattr(resource, name))[1]
                lowered = number if hard == resource.RLIM_INFINITY else min(number, hard)
                resource.setrlimit(getattr(resource, name), (lowered, lowered))
        if _IS_LINUX:
            _prctl(_PDEATHSIG, signal.SIGKILL)
        if drops:
            for capability in range(64):
                _libc().prctl(_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the last one
            _libc().prctl(_SECUREBITS, _LOCKED_NO_ROOT, 0, 0, 0)
            _prctl(_NO_NEW_PRIVS, 1)

    return limit


# -- files and network of a namespace ------------------------------------------------------------------------------


def _close_off(spec: dict[str, Any]) -> dict[str, str]:
    """Hide files and processes of the machine; returns what could not be done, with the reason."""
    missing: dict[str, str] = {}
    try:
        _hide_files(spec)
    except OSError as error:
        missing["files"] = f"mount: {error.strerror}"
    try:
        _mount("proc", "/proc", "proc", _NOSUID | _NODEV)
    except OSError as error:
        try:
            _mount("tmpfs", "/proc", "tmpfs", _RDONLY)  # the machine's has the environment of other processes
        except OSError:
            missing["processes"] = f"/proc: {error.strerror}"
    with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    if not spec["network"]:
        with contextlib.suppress(OSError), socket.socket() as probe:
            fcntl.ioctl(probe, 0x8914, struct.pack("16sH14s", b"lo", 1, b""))  # SIOCSIFFLAGS, IFF_UP
    return missing


def _hide_files(spec: dict[str, Any]) -> None:
    """Make all files read-only, and hide home, the caller's directory, /run and /tmp, except for `keep`."""
    hidden: list[str] = []
    kept = {path: os.open(path, os.O_PATH) for path in spec["keep"] if os.path.exists(path)}
    own = os.open(spec["private"], os.O_PATH)
    _mount(None, "/", None, _REC | _PRIVATE)
    _set_readonly("/", recursive=True)
    for path in sorted({*spec["hide"]}, key=len):
        if os.path.isdir(path) and not f"{path}/".startswith("/tmp/"):  # otherwise hidden with a folder above it
            _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV)
            hidden.append(path)
    _mount(f"/proc/self/fd/{own}", "/tmp", None, _BIND)
    _set_readonly("/tmp", readonly=False)
    for path, number in kept.items():
        is_folder = os.path.isdir(f"/proc/self/fd/{number}")
        try:
            os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
            if not is_folder and not os.path.lexists(path):
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        except OSError:  # its folder is not hidden, and therefore it is visible
            continue
        _mount(f"/proc/self/fd/{number}", path, None, _BIND | _REC)
        _set_readonly(path, recursive=True)
    for path in hidden:
        _set_readonly(path)
    if os.path.isdir("/dev/shm"):
        _mount("tmpfs", "/dev/shm", "tmpfs", _NOSUID | _NODEV)
    for number in (*kept.values(), own):
        os.close(number)


def _set_readonly(path: str, *, recursive: bool = False, readonly: bool = True) -> None:
    attributes = struct.pack("QQQQ", int(readonly), int(not readonly), 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    done = _libc().syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, len(attributes))
    _check(done, "mount_setattr")


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    _check(_libc().mount(*words, ctypes.c_ulong(flags), None), f"mount {target}")


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _check(_libc().prctl(option, value, 0, 0, 0), "prctl")


def _check(result: int, name: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def _write(report: int, record: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the caller is gone, and this process will end
        os.write(report, json.dumps(record).encode() + b"\n")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    ended = main(given)
    if given["deletes"]:
        shutil.rmtree(given["deletes"], ignore_errors=True)
    sys.exit(ended)
