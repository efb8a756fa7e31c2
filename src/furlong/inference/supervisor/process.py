"""Server processes: the machines that start them (`Host`, and `LocalHost` for this one), their ports, logs and ends.

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
import itertools
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from furlong.errors import ENGINE_EXITED, ENGINE_KILLED, ConfigError, EngineError, Loss
from furlong.inference.sglang.server import ServerInfo, SglangServer

T = TypeVar("T")

FIRST_PORT = 15_000
LAST_PORT = 65_000
STOP_S = 3.0  # between SIGTERM and SIGKILL: engines hold nothing that must be kept, and SGLang takes its time
POLL_S = 0.02
START_POLL_S = 0.2  # between two looks at a starting server
READY_TIMEOUT_S = 5.0  # for it to answer /health
MAX_PAUSE_S = 2.0  # between two /health requests, each of which is a line in the log of the server
PAUSE_FRAC = 0.125  # of the time that the start has taken
TAIL_LINES = 30
TAIL_BYTES = 1 << 18
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
SUCCESSFUL = re.compile(r'"[A-Z]+ /\S* HTTP/[\d.]+" 2\d\d|"GET /health HTTP/[\d.]+" 503')  # and early health checks
STARTED_AGAIN = "--- furlong starts this again; what is above is of an earlier process\n"
START_ADVICE = "See there what it waits for, or raise --sglang-server-start-timeout"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")

# Runs in the process before the program: the kernel kills it when its parent thread exits (PR_SET_PDEATHSIG, 1).
_GUARD = (
    "import ctypes,os,signal,sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit('the program that started this is gone')\n"
    "try: os.execvp(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error: sys.exit(f'cannot execute {sys.argv[2]}: {error.strerror}')\n"
)


class HostProcess(ABC):
    """A process started by a host."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Process id and machine, for messages."""

    @abstractmethod
    async def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it); None while it runs."""

    @abstractmethod
    async def stop(self, grace_s: float = STOP_S) -> None:
        """Stop its process group: SIGTERM, then SIGKILL after `grace_s` seconds. Returns when it is gone."""

    @abstractmethod
    async def log_tail(self) -> list[str]:
        """The last lines of its log; before them the message of its first exception, if that is further up."""


class Host(ABC):
    """A machine that can start processes. `address`: host name or address of servers on it, loopback if it is this."""

    address: str

    @abstractmethod
    async def reserve_ports(self, count: int, *, first: int | None = None) -> list[int]:
        """Reserve `count` free consecutive ports, starting at `first` if it is not None.

        They stay bound until `start` hands them over or `release_ports` frees them. Raises ConfigError if `first` is
        taken.
        """

    @abstractmethod
    async def release_ports(self, ports: Sequence[int]) -> None:
        """Release reserved ports that no process will use."""

    @abstractmethod
    async def start(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, ports: Sequence[int] = ()
    ) -> HostProcess:
        """Start `command` with `env` added to the environment; append stdout and stderr to `log`.

        `ports` are reserved ports that it will bind; they are released just before the start. A command that cannot be
        executed exits with code 1 and the reason in the log.
        """


@dataclass(frozen=True)
class HostGpus:
    """GPUs `first_gpu` .. `first_gpu + num_gpus - 1` of one host; its CPUs if `num_gpus` is 0."""

    host: Host
    first_gpu: int = 0
    num_gpus: int = 0


class LocalProcess(HostProcess):
    """A child of this process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def where(self) -> str:  # noqa: D102
        return f"process {self.pid}"

    async def poll(self) -> int | None:  # noqa: D102
        return self._process.poll()

    async def stop(self, grace_s: float = STOP_S) -> None:  # noqa: D102
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

    async def log_tail(self) -> list[str]:  # noqa: D102
        text = tail(self._log, 1 << 20)
        # The process that serves HTTP often only reports that another one is gone: the reason is the first exception.
        raised = itertools.dropwhile(lambda line: "Traceback (most recent call last)" not in line, text)
        first = next((line for line in itertools.islice(raised, 1, None) if line and line[0] != " "), "")
        return [*([first] if first and first not in text[-TAIL_LINES:] else []), *text[-TAIL_LINES:]]


class LocalHost(Host):
    """This machine. Processes are killed when the thread that started them exits."""

    def __init__(self) -> None:
        self.address = loopback_address()
        self._reserved: dict[int, socket.socket] = {}
        self._handed_over: set[int] = set()  # to processes that may not have bound them yet

    async def reserve_ports(self, count: int, *, first: int | None = None) -> list[int]:  # noqa: D102
        if first is not None:
            ports = list(range(first, first + count))
            if not self._bind(ports):
                raise ConfigError(f"port {first} is taken; use another port, or stop the process that has it")
            return ports
        low, high = port_range()
        num_ranges = (high - low) // count
        start = secrets.randbelow(num_ranges)
        for offset in range(num_ranges):
            begin = low + (start + offset) % num_ranges * count
            ports = list(range(begin, begin + count))
            if not self._handed_over.intersection(ports) and self._bind(ports):
                return ports
        raise EngineError(
            f"no {count} consecutive ports are free between {low} and {high}; stop processes that use them"
        )

    def _bind(self, ports: Sequence[int]) -> bool:
        bound: dict[int, socket.socket] = {}
        for port in ports:
            # bound to "", it occupies a port of every address
            reserved = _dual_stack() if _has_ipv6() else socket.socket()
            try:
                if port in self._reserved:
                    raise OSError
                reserved.bind(("", port))
            except OSError:
                for other in (reserved, *bound.values()):
                    other.close()
                return False
            bound[port] = reserved
        self._reserved |= bound
        return True

    async def release_ports(self, ports: Sequence[int]) -> None:  # noqa: D102
        for port in ports:
            if (reserved := self._reserved.pop(port, None)) is not None:
                reserved.close()

    async def start(  # noqa: D102
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, ports: Sequence[int] = ()
    ) -> LocalProcess:
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


def loopback_address() -> str:
    """Return 127.0.0.1, or ::1 on a machine without IPv4."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"


@functools.cache
def _has_ipv6() -> bool:
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


def port_range() -> tuple[int, int]:
    """Range of server ports: below the kernel's ephemeral ports if there is room, so that they do not collide."""
    try:
        ephemeral = int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        ephemeral = LAST_PORT
    return FIRST_PORT, ephemeral if ephemeral > FIRST_PORT + 1000 else LAST_PORT


def last_text(path: Path) -> str:
    """The end of a log, from the start of its last process; "" if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace").rpartition(STARTED_AGAIN)[2]
    except FileNotFoundError:
        return ""


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of the last process of a log, without colors and successful requests; [] if there is no log."""
    return [line for line in _COLOR.sub("", last_text(path)).splitlines() if not SUCCESSFUL.search(line)][-lines:]


async def unless_lost(work: Coroutine[Any, Any, T], loss: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which needs a server, or `loss`, which ends or raises once the server is lost."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(loss)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await (tasks[0] if tasks[0].done() else tasks[1])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(eq=False)
class ServerProcess:
    """The processes of one engine or router; the first one serves HTTP at `url`.

    bootstrap_port: of a prefill engine, for decode engines.
    """

    name: str
    url: str
    processes: Sequence[HostProcess]
    api_key: str | None = None
    bootstrap_port: int | None = None
    started_s: float = field(default_factory=time.monotonic)

    @property
    def where(self) -> str:
        """Name, address and process ids, for messages."""
        return f"{self.name} at {self.url} ({', '.join(process.where for process in self.processes)})"

    async def exit_loss(self) -> Loss | None:
        """How the first ended process ended, with the end of its log; None while all of them run."""
        for process in self.processes:
            code = await process.poll()
            if code is not None:
                end = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                failure = ENGINE_KILLED if -code in (signal.SIGKILL, signal.SIGTERM) else ENGINE_EXITED
                reason, name = f"{process.where} {end}", f"{self.name} at {self.url}"
                return Loss(reason, failure, name, await self._log_of(process))
        return None

    async def log_end(self) -> str:
        """The last lines of the log of the process that serves HTTP."""
        return await self._log_of(self.processes[0])

    async def _log_of(self, process: HostProcess) -> str:
        lines = [f"    {line}" for line in await process.log_tail() if line.strip()]
        return "\n".join(["the last lines of its log:", *lines]) if lines else "its log is empty"

    async def while_starting(self, work: Coroutine[Any, Any, T], timeout_s: float, *, advice: str = START_ADVICE) -> T:
        """Await `work`, which needs the starting server.

        Raises EngineError with its log if a process exits, or if it takes over `timeout_s`.
        """

        async def loss() -> T:
            while (loss := await self.exit_loss()) is None:
                if time.monotonic() - self.started_s > timeout_s:
                    log = await self.log_end()
                    raise EngineError(f"{self.where} did not answer within {timeout_s:g} s; {log}\n{advice}")
                await asyncio.sleep(START_POLL_S)
            raise loss.error(suffix="\nThe engine failed to start; its log shows why")

        return await unless_lost(work, loss())

    async def wait_until_ready(self) -> None:
        """Return when /health answers 200."""
        server = SglangServer(self.url, ServerInfo.read({}), api_key=self.api_key)
        try:
            while True:
                try:
                    await server.ask("/health", timeout_s=READY_TIMEOUT_S)
                    return
                except EngineError:
                    seconds = PAUSE_FRAC * (time.monotonic() - self.started_s)
                    await asyncio.sleep(min(max(seconds, START_POLL_S), MAX_PAUSE_S))
        finally:
            await server.close()

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Stop all processes; returns when they are gone."""
        await asyncio.gather(*(process.stop(grace_s) for process in self.processes))
