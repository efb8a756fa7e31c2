"""First process of a sandbox: runs the commands of the driver one after the other, and reads and writes files.

It is a script of the standard library, run as process 1 of the namespaces that bubblewrap makes. Requests come on
stdin and replies go to stdout, as frames: two lengths, a JSON object, and bytes. It also measures memory and processes
while a command runs, and kills every other process of the namespace at the end of the command.

Commands cannot reach it, so they cannot forge a reply. Started by root, they run as another user. Otherwise they have
the same uid, but this process is not dumpable, which forbids ptrace and all of /proc/1, and the kernel drops signals
to process 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import PurePosixPath
from typing import Any

HEADER = struct.Struct(">II")  # bytes of JSON, bytes after it
WORK = "/tmp/work"
_TMPFS = ("/tmp", WORK, "/dev/shm")
_SAMPLE_S = 0.05  # between two looks at memory and the number of processes
_THOROUGH = 5  # every how many looks descriptors and mappings are counted
_CONFIRMED_AFTER_S = 0.01
_INODE_BYTES = 2048  # with a name of 250 characters
_ONE_FILE_MAPPING = 32 << 20  # mappings of files and reserved addresses up to this size are not examined
_MAPPING_BYTES, _WATCH_BYTES = 4096, 8192  # they take about 200; those that fit into a limit are quickly counted
_OPEN_BYTES, _FDINFO_BYTES = 8 << 10, 8 << 20
_MOST_BYTES = {"/proc/": 64 << 10, "/dev/pts/ptmx": 1 << 20, "anon_inode:inotify": 8 << 20}  # kept for an open file
_MAPPINGS_BYTES = 1 << 20  # about 10,000 mappings; a program with PyTorch has 2,000
_PDEATHSIG, _DUMPABLE, _CAPBSET_DROP, _CAPABILITY_VERSION = 1, 4, 24, 0x20080522
_TASKS_PER_PROCESS = 8
_SIGNALS = 4096  # pending ones and timers
_SOCK_DIAG, _SOCKET_MEMORY, _TIME_WAIT, _FAILED, _DONE = 4, 7, 6, 2, 3  # of netlink
_LISTINGS, _REAPED = 8, 1000  # at most, of a look at the processes, and of processes that have ended


def main() -> None:
    """Serve requests until the end of stdin, which ends all processes of the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_DUMPABLE, 0, 0, 0, 0) != 0 or os.getpid() != 1:
        raise OSError(ctypes.get_errno(), "this is not a sandbox")
    for capability in range(64):  # only root's namespace has any; fails beyond the last one
        libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel drops signals to process 1 that have no handler
    os.umask(0o022)
    setup, _ = _receive()
    if setup["uid"] is not None:
        os.setgroups([])
        os.chown(WORK, setup["uid"], setup["uid"])  # Git refuses folders of others
    box = _Box(setup, libc)
    _send({"ready": True})
    while True:
        request, data = _receive()
        if request["op"] != "cancel":  # it has ended the command before it
            _send(*box.answer(request, data))


def _receive() -> tuple[dict[str, Any], bytes]:
    header, body = HEADER.unpack(_exactly(HEADER.size))
    return json.loads(_exactly(header)), _exactly(body)


def _exactly(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        if not (part := os.read(0, min(count - len(data), 1 << 20))):
            os._exit(0)
        data += part
    return bytes(data)


def _send(reply: dict[str, Any], data: bytes = b"") -> None:
    view = memoryview(frame(reply, data))
    while view:
        view = view[os.write(1, view) :]


def frame(message: dict[str, Any], data: bytes = b"") -> bytes:
    """Encode a message."""
    header = json.dumps(message).encode()
    return HEADER.pack(len(header), len(data)) + header + data


class _Box:
    """Commands and files. setup: uid of commands (None: that of this process), limits, and `has_network`."""

    def __init__(self, setup: dict[str, Any], libc: ctypes.CDLL) -> None:
        self._uid, self._limits, self._libc = setup["uid"], setup["limits"], libc
        self._has_network = setup["has_network"]
        kernel = [int(word) for word in re.findall(r"\d+", os.uname().release)[:2]]
        self._max_tasks: int | None = None  # with threads
        if self._uid is not None or kernel >= [5, 14]:  # older kernels count those of the user outside, too
            self._max_tasks = self._limits["max_processes"] * _TASKS_PER_PROCESS + 2 * (os.cpu_count() or 1)
        with socket.socket(socket.AF_UNIX) as probe:  # commands cannot change the sizes of their buffers
            sizes = [probe.getsockopt(socket.SOL_SOCKET, name) for name in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
        self._socket_bytes = 2 * max(sizes)  # the last message may be as long as the buffer
        self._slab, self._kernel = 0, 0  # kernel objects of the machine at the start of the command, of the command
        self._folders = {path: os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in _TMPFS}
        self._work = self._folders[WORK]
        self._wake, signaled = os.pipe()
        os.set_blocking(signaled, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(signaled, warn_on_full_buffer=False)

    def answer(self, request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        """Run a command, or read or write a file with the rights of commands, none of which runs then."""
        with self._as_user():  # commands may have taken the rights of their folders away
            for path, number in self._folders.items():
                if path == WORK or self._uid is None:
                    os.fchmod(number, 0o755 if path == WORK else 0o1777)
        if request["op"] == "exec":
            return self._execute(request, data)
        try:
            with self._as_user():
                if request["op"] == "read":
                    return {}, read_file(self._work, request["path"], self._limits["file_bytes"])
                write_file(self._work, request["path"], data)
                return {}, b""
        except FileNotFoundError as error:
            return {"absent": str(error)}, b""
        except (OSError, ValueError) as error:
            return {"refused": str(error)}, b""

    @contextlib.contextmanager
    def _as_user(self) -> Generator[None]:
        if self._uid is None:
            yield
            return
        os.setegid(self._uid)
        os.seteuid(self._uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)
            self._libc.prctl(_PDEATHSIG, signal.SIGKILL)  # a change of the user resets it

    def _execute(self, request: dict[str, Any], stdin: bytes) -> tuple[dict[str, Any], bytes]:
        """Run a command to its end, to a limit, or until the driver cancels it; no other process is left."""
        user: dict[str, Any] = {}
        if self._uid is not None:
            user = {"user": self._uid, "group": self._uid, "extra_groups": []}
        try:
            child = subprocess.Popen[bytes](
                ["/bin/sh", "-c", request["command"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, cwd=WORK, env=request["environment"], start_new_session=True,
                preexec_fn=self._limit, **user,
            )  # fmt: skip
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return {"code": None, "reason": f"the command cannot be started: {error}", "out": 0}, b""
        assert child.stdout is not None
        assert child.stderr is not None
        streams = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray()}
        for number in streams:
            os.set_blocking(number, False)  # a command can read its own output, too
        code, reason = self._watch(child, streams, stdin, request["timeout_s"], request["output_bytes"])
        self._kill_all()
        for number, kept in streams.items():
            while _take(number, kept, request["output_bytes"]):
                pass
        child.stdout.close()
        child.stderr.close()
        child.returncode = 0  # it was waited for here
        out, err = streams.values()
        return {"code": None if reason else code, "reason": reason, "out": len(out)}, bytes(out + err)

    def _watch(
        self, child: subprocess.Popen[bytes], streams: dict[int, bytearray], stdin: bytes, timeout_s: float, kept: int
    ) -> tuple[int | None, str]:
        """Pass input and output on until the command ends. Returns its code, and why it has to be killed."""
        assert child.stdin is not None
        sink, unsent, is_open = child.stdin.fileno(), memoryview(stdin), set(streams)
        os.set_blocking(sink, False)
        deadline, next_look, looks = time.monotonic() + timeout_s, time.monotonic(), 0
        self._slab = _slab_bytes()
        with child.stdin:
            while True:
                now = time.monotonic()
                if now >= deadline:
                    return None, f"not finished within {timeout_s:g} s"
                if now >= next_look:
                    if self._exceeded(is_thorough=looks % _THOROUGH == 0):
                        time.sleep(_CONFIRMED_AFTER_S)  # a process that starts a program shares its memory with it
                        if reason := self._exceeded(is_thorough=True):
                            return None, reason
                    looks += 1
                    next_look = time.monotonic() + _SAMPLE_S
                writes = [] if child.stdin.closed else [sink]
                wait_s = max(0.0, min(deadline, next_look) - time.monotonic())
                readable, writable, _ = select.select([0, self._wake, *is_open], writes, [], wait_s)
                if 0 in readable:  # the driver cancels the command
                    return None, "ended by the caller"
                for number in is_open.intersection(readable):
                    if _take(number, streams[number], kept) == 0:
                        is_open.discard(number)
                if writable:
                    try:
                        unsent = unsent[os.write(sink, unsent[: 1 << 16]) :]
                    except BlockingIOError:  # a command has filled its input itself
                        continue
                    except BrokenPipeError:  # a command need not read its input
                        unsent = unsent[:0]
                    if not unsent:
                        child.stdin.close()
                if self._wake in readable:
                    os.read(self._wake, 4096)
                if (code := _reap(child.pid)) is not None:
                    return code, ""

    def _limit(self) -> None:
        """Set the limits of a command, in its process before its program begins."""
        limits = self._limits
        numbers = {
            "RLIMIT_CORE": 1,  # no file, and no program that the machine's core_pattern names
            "RLIMIT_CPU": limits["cpu_s"],
            "RLIMIT_DATA": limits["memory_bytes"],  # reserved addresses do not count, as those of Go and Node.js
            "RLIMIT_FSIZE": limits["file_bytes"],
            "RLIMIT_NOFILE": limits["open_files"],
            "RLIMIT_NPROC": self._max_tasks,
            "RLIMIT_SIGPENDING": _SIGNALS,
        }
        for name, number in numbers.items():
            if number is not None:
                hard = resource.getrlimit(getattr(resource, name))[1]
                lowered = number if hard == resource.RLIM_INFINITY else min(number, hard)
                resource.setrlimit(getattr(resource, name), (lowered, lowered))
        self._libc.capset(struct.pack("II", _CAPABILITY_VERSION, 0), bytes(24))  # the inheritable ones are left

    def _kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all but this process; none of them can fork any more
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _exceeded(self, *, is_thorough: bool) -> str:
        """Return the limit that the processes exceed together, "" if none. is_thorough: count kernel objects anew."""
        used, kernel, is_hidden, shared, seen = 0, 0, False, dict[str, int](), {"1"}
        limit = self._limits["memory_bytes"]
        for listing in range(_LISTINGS):  # memory may have gone to a child of a process that ended before it was read
            processes = [name for name in os.listdir("/proc") if name.isdigit() and name not in seen]
            if listing == 0 and len(processes) > self._limits["max_processes"]:
                return f"{len(processes)} processes, the limit is {self._limits['max_processes']}"
            for name in processes:
                with contextlib.suppress(OSError):  # it has ended
                    path, sizes = _status(name)
                    used += _private_bytes(path, sizes, shared)
                    if is_thorough and sizes and kernel <= limit:
                        try:
                            size, hides = _kernel_bytes(path, limit)
                        except PermissionError:  # it is not dumpable
                            size, hides = self._limits["open_files"] * _OPEN_BYTES, True
                        kernel, is_hidden = kernel + size, is_hidden or hides
            if not processes:
                break
            seen.update(processes)
        if is_hidden:  # rare, so that others who take such memory meanwhile do not matter
            kernel += max(0, _slab_bytes() - self._slab)
        if is_thorough:
            self._kernel = kernel
        used += self._kernel + sum(shared.values())
        for number in self._folders.values():  # the sizes of files have a separate limit
            filesystem = os.statvfs(number)
            used += (filesystem.f_files - filesystem.f_ffree) * _INODE_BYTES
        if not self._has_network:
            used += _socket_bytes(self._socket_bytes)
        return f"{used >> 20} MiB of memory, the limit is {limit >> 20} MiB" if used > limit else ""


def _status(pid: str) -> tuple[str, dict[str, int]]:
    """Return the folder in /proc of a living thread of a process, and the sizes in its status, empty if none lives."""
    for task in os.listdir(f"/proc/{pid}/task"):  # a main thread that has ended has no memory, unlike the others
        rows = dict[str, str]()
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/status", encoding="latin-1") as file:
            next(file)  # its name, which may be anything
            rows = dict(line.split(":", 1) for line in file)
        sizes = {name: int(value.split()[0]) << 10 for name, value in rows.items() if value.endswith("kB\n")}
        if sizes:
            return f"/proc/{pid}/task/{task}", sizes
    return f"/proc/{pid}", {}


def _private_bytes(path: str, sizes: dict[str, int], shared: dict[str, int]) -> int:
    """Return the memory of a process; `shared` gets shared anonymous mappings, which may be resident nowhere."""
    used = sum(sizes.get(name, 0) for name in ("RssAnon", "VmSwap", "VmPTE", "HugetlbPages"))
    counted = sum(sizes.get(name, 0) for name in ("VmData", "VmStk", "VmExe", "VmLib"))
    if (others := sizes.get("VmSize", 0) - counted) > _ONE_FILE_MAPPING:
        try:
            with open(f"{path}/maps", encoding="latin-1") as file:
                lines = file.readlines(_MAPPINGS_BYTES)
                if file.readline():
                    raise PermissionError
        except PermissionError:  # a process that hides its mappings, or makes so many that they take long to read
            lines, shared[path] = [], others
        for line in lines:
            if line.endswith("/dev/zero (deleted)\n") and line.split(None, 2)[1][3] == "s":
                addresses, _, offset, _, inode, _ = line.split(None, 5)
                start, end = (int(word, 16) for word in addresses.split("-"))
                key = f"{inode} {offset}"  # children share the mappings of their parent
                shared[key] = max(shared.get(key, 0), end - start)
    return used


def _kernel_bytes(path: str, limit: int) -> tuple[int, bool]:
    """Return what the kernel may keep for mappings and descriptors of a process, and whether some are out of sight.

    Watches of epoll and locks of files are lines in fdinfo. Descriptors in messages that were not received (`scm_fds`)
    may have any number of them. Counting ends after the limit.
    """
    used, is_hidden = 0, False
    with open(f"{path}/maps", "rb") as file:
        while used <= limit and (part := file.read(1 << 20)):
            used += part.count(b"\n") * _MAPPING_BYTES
    for number in os.listdir(f"{path}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed
            link = os.readlink(f"{path}/fd/{number}")
            with open(f"{path}/fdinfo/{number}", "rb", buffering=0) as file:
                text = file.read()
            used += (text.count(b"\ntfd:") + text.count(b"\nlock:")) * _WATCH_BYTES
            used += max([size for kind, size in _MOST_BYTES.items() if link.startswith(kind)], default=_OPEN_BYTES)
            if "/fdinfo/" in link:  # its text stays in memory
                used += _FDINFO_BYTES
            is_hidden = is_hidden or (b"\nscm_fds:" in text and b"\nscm_fds: 0\n" not in text)
        if used > limit:
            break
    return used, is_hidden


def _slab_bytes() -> int:
    """Return the size of the machine's kernel objects."""
    with open("/proc/meminfo") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith("SUnreclaim")), 0)


def _take(number: int, kept: bytearray, limit: int) -> int | None:
    """Add output to the end that is kept; returns its length, None if there is none yet."""
    try:
        part = os.read(number, 1 << 16)
    except BlockingIOError:
        return None
    kept += part
    del kept[:-limit]
    return len(part)


def _socket_bytes(of_each: int) -> int:
    """Return what sockets may keep, and what those of TCP, whose buffers grow, do keep.

    A byte in a queue may take a kilobyte, which /proc/net/tcp does not show.
    """
    with open("/proc/net/sockstat") as file:
        used = int(file.readline().split()[2]) * of_each
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        try:
            used += _tcp_bytes(family)
        except OSError:  # a kernel without CONFIG_INET_DIAG
            with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{name}") as file:
                next(file)
                used += sum(int(number, 16) for line in file for number in line.split()[4].split(":"))
    return used


def _tcp_bytes(family: int) -> int:
    """Return the memory of the queues of TCP sockets, as the kernel reports it by netlink. Raises OSError."""
    used, kind, states = 0, 0, 0xFFF & ~(1 << _TIME_WAIT)
    body = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_SOCKET_MEMORY - 1), states)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as diag:
        diag.send(struct.pack("=IHHII", 16 + len(body), 20, 0x301, 0, 0) + body)
        while kind != _DONE:
            messages = diag.recv(1 << 16)
            while messages:
                length, kind = struct.unpack_from("=IH", messages)
                if kind == _FAILED:
                    raise OSError("this kernel does not list TCP sockets")
                attributes, messages = messages[16 + 72 : length], messages[(length + 3) & ~3 :]
                while attributes:
                    size, name = struct.unpack_from("=HH", attributes)
                    if name == _SOCKET_MEMORY:
                        received, _, _, _, _, queued = struct.unpack_from("=6I", attributes, 4)
                        used += received + queued
                    attributes = attributes[(size + 3) & ~3 :]
    return used


def _reap(pid: int) -> int | None:
    """Wait for processes that have ended; return the exit code of `pid` if it is one of them."""
    for _ in range(_REAPED):  # a command that makes them faster than this must not stop the clock
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if ended == 0:
            return None
    return None


# -- files in a folder that a command may have filled with links ------------------------------------------------------


def write_file(root: int, path: str, data: bytes) -> None:
    """Write a file below a folder (a descriptor) without following links; its folders are made.

    Raises ValueError for a path outside, a link, or another kind of file, and OSError.
    """

    def write(folder: int, name: str) -> None:
        number = _open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, folder, path)
        with os.fdopen(number, "wb") as file:
            file.write(data)

    _at(root, path, write, makes=True)


def read_file(root: int, path: str, limit: int) -> bytes:
    """Return the content of a file below a folder without following links.

    Raises FileNotFoundError, and ValueError for a path outside, a link, another kind of file, or a larger one.
    """

    def read(folder: int, name: str) -> bytes:
        number = _open(name, os.O_RDONLY | os.O_NONBLOCK, folder, path)
        with os.fdopen(number, "rb") as file:
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
                raise ValueError(f"{path} in the sandbox is not a file of at most {limit} bytes")
            return file.read(limit)

    return _at(root, path, read)


def _at(root: int, path: str, use: Callable[[int, str], Any], *, makes: bool = False) -> Any:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise ValueError(f"{path!r} is not a path in the sandbox; give one relative to its working directory")
    folder = os.dup(root)
    try:
        for part in parts[:-1]:
            if makes:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            inner = _open(part, os.O_RDONLY | os.O_DIRECTORY, folder, path)
            os.close(folder)
            folder = inner
        return use(folder, parts[-1])
    finally:
        os.close(folder)


def _open(name: str, flags: int, folder: int, path: str) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=folder)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path} in the sandbox") from None
    except OSError as error:  # a link, or a file where a folder is expected
        raise ValueError(
            f"{path} in the sandbox: {name} cannot be opened ({error.strerror}); links are refused"
        ) from error


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:  # the driver shows it
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise
