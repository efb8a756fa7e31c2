"""Machines that start server processes (the `Host` protocol, and `LocalHost` for this machine), and their logs.

All methods are coroutines because the machine may be remote (`cluster.ray_host`). A started process has its own
process group and log, it does not outlive the program that started it, and `stop` returns when the whole group is gone.

    host = LocalHost()
    [port] = await host.reserve_ports(1)
    process = await host.start(["furlong", "serve", "--port", str(port), ...], log=Path("engine-0.log"), ports=[port])
    ...
    await process.stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from furlong.errors import ConfigError, EngineError

FIRST_PORT = 15_000
LAST_PORT = 65_000
STOP_S = 10.0  # between SIGTERM and SIGKILL
POLL_S = 0.02
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")

TAIL_BYTES = 1 << 18
MAX_CHAINED = 4  # exceptions of one traceback that are quoted
MAX_LINE_LEN = 1000  # characters of a quoted line
SUCCESSFUL = re.compile(r'"[A-Z]+ /\S* HTTP/[\d.]+" 2\d\d|"GET /health HTTP/[\d.]+" 503')  # and early health checks
STARTED_AGAIN = "--- furlong starts this again; what is above is of an earlier process\n"
LOG_GAP = "(lines omitted; the log ends with:)"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FATAL = re.compile(r"Fatal Python error: |terminate called ")

# Runs in the process before the program: the kernel kills it when its parent thread exits (PR_SET_PDEATHSIG, 1).
_GUARD = (
    "import ctypes,os,signal,sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit('the program that started this is gone')\n"
    "try: os.execvp(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error: sys.exit(f'cannot execute {sys.argv[2]}: {error.strerror}')\n"
)


def loopback_address() -> str:
    """Return 127.0.0.1, or ::1 on a machine without IPv4."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"


@dataclass(frozen=True)
class Activity:
    """What a started process and its descendants have done so far, to compare with a later look."""

    stopped: tuple[int, ...] = ()  # ids of those that a signal has stopped (SIGSTOP)
    cpu_s: float = 0.0
    log_bytes: int = 0


class HostProcess(Protocol):
    """A process started by a host."""

    @property
    def where(self) -> str:
        """Process id and machine, for messages."""
        ...

    async def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it); None while it runs."""
        ...

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Stop its process group: SIGTERM, then SIGKILL after `grace_s` seconds. Returns when it is gone."""
        ...

    async def log_tail(self, lines: int = 30) -> list[str]:
        """The last lines of its log, preceded by its first exception if that is further up."""
        ...

    async def activity(self) -> Activity:
        """What it and its descendants have done so far."""
        ...

    async def other_listener(self, port: int) -> str:
        """Description of another process that listens on its port; "" if it listens itself, or none is visible."""
        ...


class Host(Protocol):
    """A machine that can start processes."""

    @property
    def address(self) -> str:
        """Host name or address of servers on it; a loopback address if everything runs on one machine."""
        ...

    async def reserve_ports(self, count: int, *, first: int | None = None) -> list[int]:
        """Reserve `count` free consecutive ports, starting at `first` if it is not None.

        They stay bound until `start` hands them over or `release_ports` frees them. Raises ConfigError naming the
        process that has the port `first`.
        """
        ...

    async def release_ports(self, ports: Sequence[int]) -> None:
        """Release reserved ports that no process will use."""
        ...

    async def start(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, ports: Sequence[int] = ()
    ) -> HostProcess:
        """Start `command` with `env` added to the environment; append stdout and stderr to `log`.

        `ports` are reserved ports that it will bind; they are released just before the start. A command that cannot be
        executed exits with code 1 and the reason in the log.
        """
        ...


@dataclass(frozen=True)
class HostGpus:
    """GPUs `first_gpu` .. `first_gpu + num_gpus - 1` of one host; its CPUs if `num_gpus` is 0."""

    host: Host
    first_gpu: int = 0
    num_gpus: int = 0


class LocalProcess:
    """Implements `HostProcess` for a child of this process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def where(self) -> str:
        """Process id and machine, for messages."""
        return f"process {self.pid}"

    async def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it); None while it runs."""
        return self._process.poll()

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Stop its process group: SIGTERM, then SIGKILL after `grace_s` seconds. Returns when it is gone."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while self._process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
        self._signal(signal.SIGKILL)  # also to child processes that are left
        while self._process.poll() is None:
            await asyncio.sleep(POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def log_tail(self, lines: int = 30) -> list[str]:
        """The last lines of its log, preceded by its first exception if that is further up."""
        return end_of_log(self._log, lines)

    async def activity(self) -> Activity:
        """What it and its descendants have done so far."""
        return await asyncio.to_thread(_activity, self.pid, self._log)

    async def other_listener(self, port: int) -> str:
        """Description of another process that listens on its port; "" if it listens itself, or none is visible."""
        return await asyncio.to_thread(_other_listener, port, self.pid)


class LocalHost:
    """Implements `Host` on this machine. Processes are killed when the thread that started them exits."""

    def __init__(self) -> None:
        self.address = loopback_address()
        self._reserved: dict[int, socket.socket] = {}
        self._handed_over: set[int] = set()  # to processes that may not have bound them yet

    async def reserve_ports(self, count: int, *, first: int | None = None) -> list[int]:
        """Reserve `count` free consecutive ports, starting at `first` if it is not None."""
        if first is not None:
            ports = list(range(first, first + count))
            if (taken := self._bind(ports)) is not None:
                raise ConfigError(
                    f"port {taken} is taken by {port_owner(taken)[0]}; use another port, or stop that process"
                )
            return ports
        low, high = port_range()
        num_ranges = (high - low) // count
        start = secrets.randbelow(num_ranges)
        for offset in range(num_ranges):
            begin = low + (start + offset) % num_ranges * count
            ports = list(range(begin, begin + count))
            if not self._handed_over.intersection(ports) and self._bind(ports) is None:
                return ports
        raise EngineError(
            f"no {count} consecutive ports are free between {low} and {high}; stop processes that use them"
        )

    def _bind(self, ports: Sequence[int]) -> int | None:
        """Bind all of these ports or none; returns the first one that is taken."""
        bound: dict[int, socket.socket] = {}
        for port in ports:
            reserved = _socket_of_all_addresses()
            try:
                if port in self._reserved:
                    raise OSError
                reserved.bind(("", port))
            except OSError:
                for other in (reserved, *bound.values()):
                    other.close()
                return port
            bound[port] = reserved
        self._reserved |= bound
        return None

    async def release_ports(self, ports: Sequence[int]) -> None:
        """Release reserved ports that no process will use."""
        for port in ports:
            if (reserved := self._reserved.pop(port, None)) is not None:
                reserved.close()

    async def start(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, ports: Sequence[int] = ()
    ) -> LocalProcess:
        """Start `command`; see `Host.start`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        guarded = [sys.executable, "-S", "-E", "-c", _GUARD, str(os.getpid()), *command]
        self._handed_over.update(ports)
        await self.release_ports(ports)
        with log.open("ab") as out:
            if out.tell():
                out.write(STARTED_AGAIN.encode())
                out.flush()
            process = subprocess.Popen(
                guarded,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return LocalProcess(process, log)


@functools.cache
def _has_ipv6() -> bool:
    """Whether one socket can have a port of all IPv4 and IPv6 addresses."""
    if not socket.has_dualstack_ipv6():
        return False
    with _dual_stack() as probe:
        try:
            probe.bind(("", 0))
        except OSError:  # IPv6 is disabled
            return False
    return True


def _dual_stack() -> socket.socket:
    opened = socket.socket(socket.AF_INET6)
    opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return opened


def _socket_of_all_addresses() -> socket.socket:
    """Create a socket that, bound to "", occupies a port of every address."""
    return _dual_stack() if _has_ipv6() else socket.socket()


def port_range() -> tuple[int, int]:
    """Range of server ports: below the kernel's ephemeral ports if there is room, so that they do not collide."""
    try:
        ephemeral = int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        ephemeral = LAST_PORT
    return FIRST_PORT, ephemeral if ephemeral > FIRST_PORT + 1000 else LAST_PORT


def port_owner(port: int) -> tuple[str, int | None]:
    """Description and id of the process that has a port of this machine; the id is None if it is not visible."""
    try:
        using = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port]
        pids = [c.pid for c in using if c.pid and c.status == psutil.CONN_LISTEN] or [c.pid for c in using if c.pid]
        if not pids:
            return "a process of another user, or a closing connection", None
        return f"process {pids[0]} ({_program(psutil.Process(pids[0]))})", pids[0]
    except psutil.Error as error:
        return f"a process that is not visible ({type(error).__name__})", None


def _program(process: psutil.Process) -> str:
    """The command of a process up to its options, which may contain an API key.

    `python -m sglang.launch_server --api-key KEY` becomes `python -m sglang.launch_server`.
    """
    words = process.cmdline() or [process.name()]
    first_option = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    named = first_option + 2 if words[first_option : first_option + 1] == ["-m"] else first_option
    return " ".join(words[:named])[:120]


def _activity(pid: int, log: Path) -> Activity:
    stopped, cpu_s = list[int](), 0.0
    with contextlib.suppress(psutil.NoSuchProcess):  # its exit is reported elsewhere
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess), each.oneshot():
                if each.status() == psutil.STATUS_STOPPED:
                    stopped.append(each.pid)
                times = each.cpu_times()
                cpu_s += times.user + times.system
    return Activity(tuple(stopped), cpu_s, log.stat().st_size if log.exists() else 0)


def _other_listener(port: int, pid: int) -> str:
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in family:
            process.num_fds()  # raises if its open files are not visible
        listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:  # it has exited, which is reported elsewhere, or is not visible
        return ""
    pids = {c.pid for c in listening if c.laddr and c.laddr.port == port}
    return port_owner(port)[0] if pids and pids.isdisjoint(process.pid for process in family) else ""


# Logs. The process that serves HTTP often only reports that another one is gone; the reason is further up, as the first
# exception of the log.


def last_text(path: Path) -> str:
    """The end of a log, from the start of its last process; "" if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace").rpartition(STARTED_AGAIN)[2]
    except FileNotFoundError:
        return ""


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log, without colors and successful requests; [] if there is no log."""
    return _lines(path)[-lines:]


def end_of_log(path: Path, lines: int) -> list[str]:
    """The last lines of the last process, preceded by its first exception if that is further up."""
    all_lines = _lines(path)
    last = all_lines[-lines:]
    first = first_exception(all_lines)
    if not first or first[-1] in last:
        return last
    return [*first, LOG_GAP, *last]


def first_exception(lines: Sequence[str]) -> list[str]:
    """The first exception of a log: the line that announces it, its innermost call, and the messages of its chain.

    [] if there is none. The chain are the exceptions raised while it was handled.
    """
    start = next((i for i, line in enumerate(lines) if _TRACEBACK in line or _FATAL.search(line)), None)
    if start is None:
        return []
    quoted = [lines[start][:MAX_LINE_LEN]]
    calls: list[str] = []
    is_open = _TRACEBACK in lines[start]
    for line in lines[start + 1 :]:
        if is_open and line.startswith(" "):
            calls = [line] if line.startswith("  File ") else calls
        elif is_open and line:
            quoted += [*calls, line[:MAX_LINE_LEN]]
            is_open, calls = False, []
        elif line.startswith(_TRACEBACK) and len(quoted) < 2 * MAX_CHAINED:
            is_open = True
        elif line and not line.startswith(_CHAINED):
            break
    return quoted


def _lines(path: Path) -> list[str]:
    return [line for line in _COLOR.sub("", last_text(path)).splitlines() if not SUCCESSFUL.search(line)]
