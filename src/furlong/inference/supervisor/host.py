"""Where servers run. A `Host` is one machine that starts processes; `LocalHost` is this one, without any cluster.

Every method of the protocol is a coroutine because the machine may be another one: `cluster` has a host that is an
actor there. What a caller can rely on: a process that was started has its own group and its own log, it does not
outlive the program that started it, and `stop` returns when nothing of it is left.

    host = LocalHost()
    [port] = await host.reserve_ports(1)
    process = await host.start(["furlong", "serve", "--port", str(port), ...], log=Path("engine-0.log"), ports=[port])
    ...
    await process.stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
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
from furlong.inference.supervisor.log_tail import STARTED_AGAIN, end_of_log

FIRST_PORT = 15_000
LAST_PORT = 65_000
STOP_S = 10.0  # for a process to end by itself after SIGTERM
POLL_S = 0.02
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")

# Runs before the program in its process: the kernel ends it when the thread that started it does (PR_SET_PDEATHSIG, 1).
_GUARD = (
    "import ctypes,os,signal,sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit('the program that started this is gone')\n"
    "try: os.execvp(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error: sys.exit(f'cannot execute {sys.argv[2]}: {error.strerror}')\n"
)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HostProcess(Protocol):
    """A process that a host has started."""

    @property
    def where(self) -> str:
        """Process id and machine, for messages."""
        ...

    async def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it), None while it runs."""
        ...

    async def stop(self, grace_s: float = STOP_S) -> None:
        """End it and all processes of its group: SIGTERM, after `grace_s` seconds SIGKILL. Returns when it is gone."""
        ...

    async def log_tail(self, lines: int = 30) -> list[str]:
        """The last lines of its log; before them its first exception, if it is further up."""
        ...

    async def other_listener(self, port: int) -> str:
        """Who listens at a port of its machine in its place, in words; "" if it does itself, or nobody is seen."""
        ...


class Host(Protocol):
    """One machine on which processes can be started."""

    @property
    def address(self) -> str:
        """Name or address by which servers on it are reached, "127.0.0.1" where everything is on one machine."""
        ...

    async def reserve_ports(self, count: int, *, first: int | None = None) -> list[int]:
        """Reserve `count` free ports with consecutive numbers, beginning at `first` if that is given.

        They stay bound, so that nobody else gets them, until `start` hands them over or `release_ports` frees them.
        Raises ConfigError naming the process that holds a wanted port.
        """
        ...

    async def release_ports(self, ports: Sequence[int]) -> None:
        """Free reserved ports that no process will use."""
        ...

    async def start(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, ports: Sequence[int] = ()
    ) -> HostProcess:
        """Start `command` with `env` added to the environment; stdout and stderr are appended to `log`.

        `ports` are reserved ports that it will bind: they are freed at the last moment. A command that cannot be
        executed ends with exit code 1 and the reason in the log.
        """
        ...


@dataclass(frozen=True)
class HostGpus:
    """GPUs `first_gpu` .. `first_gpu + num_gpus - 1` of one machine; without GPUs it is a place on its CPUs."""

    host: Host
    first_gpu: int = 0
    num_gpus: int = 0


class LocalProcess:
    """Implements `HostProcess` for a child of this process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""
        return self._process.pid

    @property
    def where(self) -> str:
        """Process id and machine, for messages."""
        return f"process {self.pid}"

    async def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it), None while it runs."""
        return self._process.poll()

    async def stop(self, grace_s: float = STOP_S) -> None:
        """End it and all processes of its group: SIGTERM, after `grace_s` seconds SIGKILL. Returns when it is gone."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while self._process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
        self._signal(signal.SIGKILL)  # also what the process has left behind
        while self._process.poll() is None:
            await asyncio.sleep(POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def log_tail(self, lines: int = 30) -> list[str]:
        """The last lines of its log; before them its first exception, if it is further up."""
        return end_of_log(self._log, lines)

    async def other_listener(self, port: int) -> str:
        """Who listens at a port of this machine in its place, in words; "" if it does itself, or nobody is seen."""
        return await asyncio.to_thread(_other_listener, port, self.pid)


class LocalHost:
    """Implements `Host` on this machine. Processes end with the thread that started them, however that ends."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}
        self._given: set[int] = set()  # to processes that may not have bound them yet

    async def reserve_ports(self, count: int, *, first: int | None = None) -> list[int]:
        """Reserve `count` free ports with consecutive numbers, beginning at `first` if that is given."""
        if first is not None:
            wanted = list(range(first, first + count))
            if (taken := self._bind(wanted)) is not None:
                raise ConfigError(
                    f"port {taken} is taken by {holder(taken)[0]}; give another port, or end that process"
                )
            return wanted
        low, high = port_range()
        places = (high - low) // count
        start = secrets.randbelow(places)
        for offset in range(places):
            begin = low + (start + offset) % places * count
            ports = list(range(begin, begin + count))
            if not self._given.intersection(ports) and self._bind(ports) is None:
                return ports
        raise EngineError(f"no {count} consecutive ports are free between {low} and {high}")

    def _bind(self, ports: Sequence[int]) -> int | None:
        """Hold these ports, all or none; returns the first that is taken."""
        bound: dict[int, socket.socket] = {}
        for port in ports:
            held = socket.socket()
            try:
                if port in self._held:
                    raise OSError
                held.bind(("", port))
            except OSError:
                for other in (held, *bound.values()):
                    other.close()
                return port
            bound[port] = held
        self._held |= bound
        return None

    async def release_ports(self, ports: Sequence[int]) -> None:
        """Free reserved ports that no process will use."""
        for port in ports:
            if (held := self._held.pop(port, None)) is not None:
                held.close()

    async def start(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, ports: Sequence[int] = ()
    ) -> LocalProcess:
        """Start `command`; see `Host.start`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        guarded = [sys.executable, "-S", "-E", "-c", _GUARD, str(os.getpid()), *command]
        self._given.update(ports)
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


def port_range() -> tuple[int, int]:
    """Ports that servers may get: below those that the kernel gives to outgoing connections, where there is room."""
    try:
        ephemeral = int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        ephemeral = LAST_PORT
    return FIRST_PORT, ephemeral if ephemeral > FIRST_PORT + 1000 else LAST_PORT


def holder(port: int) -> tuple[str, int | None]:
    """The process that has a port of this machine, in words and as an id; None where the system does not tell."""
    try:
        found = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port]
        pids = [c.pid for c in found if c.pid and c.status == psutil.CONN_LISTEN] or [c.pid for c in found if c.pid]
        if not pids:
            return "a process of another user, or a connection that is being closed", None
        return f"process {pids[0]} ({_program(psutil.Process(pids[0]))})", pids[0]
    except psutil.Error as error:
        return f"a process that cannot be seen ({type(error).__name__})", None


def _program(process: psutil.Process) -> str:
    """What a process runs, without its options and what follows them: it may be somebody's key.

    `python -m sglang.launch_server --api-key KEY` is `python -m sglang.launch_server`.
    """
    words = process.cmdline() or [process.name()]
    first_option = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    named = first_option + 2 if words[first_option : first_option + 1] == ["-m"] else first_option
    return " ".join(words[:named])[:120]


def _other_listener(port: int, pid: int) -> str:
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in family:
            process.num_fds()  # raises if what it has open cannot be seen
        listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:  # it has ended, which is found out elsewhere, or nothing can be seen
        return ""
    found = {c.pid for c in listening if c.laddr and c.laddr.port == port}
    return holder(port)[0] if found and found.isdisjoint(process.pid for process in family) else ""
