"""The processes of one engine server: start, readiness, exit and restarts.

`start_server` reserves ports and starts one process for each node of an engine. `EngineReplica` is one engine through
all of its restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from furlong.config.sections import ClusterFlags
from furlong.core.addresses import host_and_port
from furlong.errors import ENGINE_EXITED, ENGINE_HANGS, ENGINE_KILLED, ConfigError, EngineError, Loss
from furlong.inference.sglang.client import PROBE_S, headers_for
from furlong.inference.sglang.http_client import BrokenConnectionError, Connections, ForbiddenAnswerError
from furlong.inference.sglang.server import WEIGHT_REPORT_S, SglangServer
from furlong.inference.sglang.server_info import ServerInfo
from furlong.inference.supervisor.host import LOG_GAP, STOP_S, Host, HostGpus, HostProcess
from furlong.inference.supervisor.server_launch import RENDEZVOUS_PORTS, EngineRole, Launch, Ports
from furlong.inference.supervisor.start_watch import StartWatch

logger = logging.getLogger(__name__)

T = TypeVar("T")

TAIL_LINES = 30
HEALTH_BYTES = 1 << 20  # of an answer to /health
READY_TIMEOUT_S = 5.0  # for a starting server to answer /health
POLL_S = 0.2  # between two looks at the process of a starting server
MAX_PAUSE_S = 2.0  # between two /health requests, each of which is a line in the log of the server
PAUSE_FRAC = 0.125  # of the time that the start has taken
KILL_GRACE_S = 0.0  # for an engine that is replaced
EXIT_WAIT_S = 0.5  # for a process whose connections broke: the kernel closes them before its exit shows
EXIT_POLL_S = 0.02
START_ADVICE = "See there what it waits for, or raise --sglang-server-start-timeout"


def ready_pause(started_s: float) -> float:
    """Seconds until the next readiness check of a server that has been starting for `started_s`.

    Readiness is noticed at most an eighth of the start time and 2 s late; a start of 150 s takes under 100 checks.
    """
    return min(max(PAUSE_FRAC * started_s, POLL_S), MAX_PAUSE_S)


@dataclass(eq=False)
class ServerProcess:
    """The processes of one engine or router; the first one serves HTTP at `url`."""

    name: str
    url: str
    processes: Sequence[HostProcess]
    api_key: str | None
    role: EngineRole = "regular"
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
        lines = [line for line in await process.log_tail(TAIL_LINES) if line.strip()]
        if not lines:
            return "its log is empty"
        what = "the first exception and the last lines" if LOG_GAP in lines else "the last lines"
        return f"{what} of its log:\n" + "\n".join(f"    {line}" for line in lines)

    async def is_ready(self) -> bool:
        """Whether /health answers 200."""
        connections = Connections(self.url, headers_for(self.api_key))
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                answer = await connections.request("GET", "/health", limit_bytes=HEALTH_BYTES)
        except (BrokenConnectionError, ForbiddenAnswerError, TimeoutError) as error:
            logger.debug("%s is not ready: %s", self.url, error)
            return False
        finally:
            await connections.close()
        return answer.status == 200

    async def while_starting(self, work: Coroutine[Any, Any, T], timeout_s: float, *, advice: str = START_ADVICE) -> T:
        """Await `work`, which needs the starting server.

        Raises EngineError with its log if it exits, is stopped by a signal, does nothing or takes over `timeout_s`.
        """
        working = asyncio.ensure_future(work)
        failure = asyncio.ensure_future(self._start_failure(timeout_s, advice))
        try:
            await asyncio.wait({working, failure}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise failure.result()
            return working.result()
        finally:
            for task in (working, failure):
                task.cancel()
            await asyncio.gather(working, failure, return_exceptions=True)

    async def _start_failure(self, timeout_s: float, advice: str) -> EngineError:
        """Wait until the start fails; return why."""
        watch = StartWatch(self.processes)
        while True:
            if (loss := await self.exit_loss()) is not None:
                return loss.error(suffix="\nThe engine failed to start; its log shows why")
            if stall := await watch.stall():
                what = f"{self.where} stands still while it starts: {stall}"
                return EngineError(f"{what}; {await self.log_end()}", code=ENGINE_HANGS)
            if time.monotonic() - self.started_s > timeout_s:
                return EngineError(
                    f"{self.where} did not answer within {timeout_s:g} s; {await self.log_end()}\n{advice}"
                )
            await asyncio.sleep(POLL_S)

    async def wait_until_ready(self) -> None:
        """Return when it answers. Raises EngineError if another process does."""
        while not await self.is_ready():
            await asyncio.sleep(ready_pause(time.monotonic() - self.started_s))
        await self.check_port()

    async def check_port(self) -> None:
        """Raise EngineError if another process listens on the port of this server."""
        first = self.processes[0]
        if other := await first.other_listener(urlsplit(self.url).port or 0):
            raise EngineError(
                f"{self.name} should listen at {self.url} ({first.where}), but {other} listens there and would "
                "receive the requests and weights of this run; start the run again, it chooses other ports"
            )

    async def stop(self, grace_s: float = STOP_S) -> None:
        """Stop all processes; returns when they are gone."""
        await asyncio.gather(*(process.stop(grace_s) for process in self.processes))


async def start_server(
    launch: Launch, index: int, placement: Sequence[HostGpus], *, log_dir: Path, port: int | None = None
) -> ServerProcess:
    """Start engine `index`, one process for each node of its placement; does not wait until it is ready.

    `port` fixes the HTTP port. Logs are `log_dir`/engine-INDEX.log and, for further nodes, engine-INDEX-node-N.log.
    Raises ConfigError if a port is taken.
    """
    first = placement[0].host
    reserved = await first.reserve_ports(1, first=port)
    http = reserved[0]
    nccl = rendezvous = 0
    bootstrap: int | None = None
    if launch.needs_rendezvous:
        more = await first.reserve_ports(1 + RENDEZVOUS_PORTS)
        nccl, rendezvous = more[0], more[1]
        reserved += more
    if launch.role == "prefill":
        [bootstrap] = await first.reserve_ports(1)
        reserved.append(bootstrap)
    processes: list[HostProcess] = []
    try:
        for node, gpus in enumerate(placement):
            name = f"engine-{index}" if node == 0 else f"engine-{index}-node-{node}"
            command = launch.command(index, node, placement, Ports(http, nccl, rendezvous, bootstrap))
            logger.info("engine %d: %s", index, shlex.join(command))
            process = await gpus.host.start(
                command,
                env=launch.environment(gpus),
                log=log_dir / f"{name}.log",
                ports=reserved if node == 0 else (),
            )
            processes.append(process)
    except BaseException:
        await first.release_ports(reserved)
        await asyncio.gather(*(process.stop() for process in processes))
        raise
    return ServerProcess(
        f"engine {index}",
        f"http://{host_and_port(first.address, http)}",
        processes,
        launch.api_key,
        role=launch.role,
        bootstrap_port=bootstrap,
    )


def local_placements(host: Host, ranges: Sequence[tuple[int, int]], *, first_gpu: int | None) -> list[list[HostGpus]]:
    """Placements on one machine, from (first GPU, number of GPUs) of each engine counted from `first_gpu`.

    `first_gpu` None places them on the CPUs.
    """
    if first_gpu is None:
        return [[HostGpus(host)] for _ in ranges]
    return [[HostGpus(host, first_gpu + first, num_gpus)] for first, num_gpus in ranges]


@dataclass(eq=False)
class EngineReplica:
    """Engine `index` through all of its restarts. `first_rank` is the trainer rank on its first GPU, if colocated."""

    index: int
    placement: Sequence[HostGpus]
    first_rank: int = 0
    process: ServerProcess | None = None
    server: SglangServer | None = None
    _past_versions: list[int] = field(default_factory=list[int])

    @property
    def name(self) -> str:
        """Number and, once it was started, address and process."""
        return f"engine {self.index}" if self.process is None else self.process.where

    @property
    def version(self) -> int | None:
        """The newest weight version that it has had, also before a restart; None if it never had any."""
        return max([*self._past_versions, *self._versions()], default=None)

    def _versions(self) -> list[int]:
        return [] if self.server is None or self.server.version is None else [self.server.version]

    async def bring_up(
        self,
        launch: Launch,
        *,
        log_dir: Path,
        start_timeout_s: float,
        cluster: ClusterFlags,
        probe_s: float = PROBE_S,
        report_s: float = WEIGHT_REPORT_S,
        min_context_len: int | None = None,
    ) -> None:
        """Start it, wait until it answers and connect `server` to it.

        Raises EngineError with its log if it fails to start, and ConfigError if its context is too short.
        """
        self._past_versions += self._versions()
        self.server = None
        self.process = process = await start_server(launch, self.index, self.placement, log_dir=log_dir)
        server = SglangServer(
            process.url,
            ServerInfo.read({}),
            api_key=launch.api_key,
            concurrency=cluster.sglang_server_concurrency,
            timeout_s=cluster.sglang_router_request_timeout_secs,
            probe_s=probe_s,
            report_s=report_s,
        )
        server.role, server.bootstrap_port = process.role, process.bootstrap_port
        server.first_rank = self.first_rank
        try:
            await process.while_starting(_connect(process, server, min_context_len), start_timeout_s)
        except BaseException:
            await server.close()
            raise
        self.server = server

    async def exit_loss(self) -> Loss | None:
        """Why it is lost: its process ended, or requests could not reach it; None if neither is known."""
        assert self.process is not None
        assert self.server is not None
        loss = await self.process.exit_loss()
        if loss is not None or self.server.lost is None:
            return loss
        deadline = time.monotonic() + EXIT_WAIT_S
        while loss is None and time.monotonic() < deadline:
            await asyncio.sleep(EXIT_POLL_S)
            loss = await self.process.exit_loss()
        return loss or replace(self.server.lost, name=self.name, log_end=await self.process.log_end())

    async def hang_loss(self, timeout_s: float) -> Loss | None:
        """Why it generates no token although it should; None if it does, or should not at the moment."""
        assert self.process is not None
        assert self.server is not None
        if why := await self.server.generation_error(timeout_s):
            return Loss(f"it hangs: {why}", ENGINE_HANGS, self.name, await self.process.log_end())
        return None

    async def stop(self) -> None:
        """Kill its processes, which may have ended already."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                await self.process.stop(KILL_GRACE_S)


async def _connect(process: ServerProcess, server: SglangServer, min_context_len: int | None) -> None:
    """Wait until the engine answers and prepare it for requests. Raises ConfigError if its context is too short."""
    await process.wait_until_ready()
    server.info = info = ServerInfo.read(await server.ask_object("/server_info"), f"GET {server.url}/server_info")
    if min_context_len is not None and info.context_len is not None and info.context_len < min_context_len:
        raise ConfigError(
            f"--rollout-max-context-len {min_context_len} exceeds the context length {info.context_len} of the "
            f"engine at {server.url}; lower it or set --sglang-context-length {min_context_len}"
        )
    logger.info("engine %s: %s, dtype %s, tp %d", server.url, info.software, info.dtype, info.tp_size)
    if server.device_dtypes:
        await server.checksums()  # compiles the checksum kernels before the first weight update waits for them
    if not info.is_furlong:
        await server.freeze_objects()


async def stop_replicas(replicas: Sequence[EngineReplica]) -> None:
    """Stop the processes of these replicas, with SIGTERM first; returns when they are gone."""
    await asyncio.gather(*(replica.process.stop() for replica in replicas if replica.process is not None))
