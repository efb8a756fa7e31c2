"""What a run starts and restarts: engines (`EngineReplica`) and the router in front of them (`SglangRouter`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from furlong.config.sections import Config
from furlong.core.addresses import host_and_port
from furlong.core.process_environment import KEY, api_key_environment
from furlong.errors import ENGINE_HANGS, ConfigError, EngineError, Loss
from furlong.inference.sglang.answers import reading
from furlong.inference.sglang.server import PROBE_S, ServerInfo, SglangServer
from furlong.inference.supervisor.launch import RENDEZVOUS_PORTS, Launch, Ports, argv_from_options, module_command
from furlong.inference.supervisor.process import START_POLL_S, Host, HostGpus, HostProcess, ServerProcess

logger = logging.getLogger(__name__)

KILL_GRACE_S = 0.0  # for an engine that is replaced
EXIT_WAIT_S = 0.5  # for a process whose connections broke: the kernel closes them before its exit shows
EXIT_POLL_S = 0.02
ROUTER_START_S = 120.0  # for the router to answer
ROUTER_UPDATE_S = 60.0  # for it to add or remove an engine
FAILED = 500  # status of the router's answer when an engine breaks a connection

# The client retries requests and the replica set checks health, so the router must do neither.
ROUTER_OPTIONS: Mapping[str, Any] = {
    "disable_retries": True,
    "disable_circuit_breaker": True,
    "disable_health_check": True,
    "balance_abs_threshold": 10,
    "balance_rel_threshold": 1.2,
    "log_level": "warn",
    "assignment_mode": "min_load",
}


async def start_server(launch: Launch, index: int, placement: Sequence[HostGpus], *, log_dir: Path) -> ServerProcess:
    """Start engine `index`, one process for each node of its placement; does not wait until it is ready.

    Logs are `log_dir`/engine-INDEX.log and, for further nodes, engine-INDEX-node-N.log.
    """
    first = placement[0].host
    reserved = await first.reserve_ports(1)
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
    url = f"http://{host_and_port(first.address, http)}"
    return ServerProcess(f"engine {index}", url, processes, launch.api_key, bootstrap)


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
        config: Config,
        probe_s: float = PROBE_S,
        min_context_len: int | None = None,
    ) -> SglangServer:
        """Start it, wait until it answers, connect `server` to it and return that.

        Raises EngineError with its log if it fails to start, and ConfigError if its context is too short.
        """
        self._past_versions += self._versions()
        self.server = None
        self.process = process = await start_server(launch, self.index, self.placement, log_dir=log_dir)
        server = SglangServer(
            process.url,
            ServerInfo.read({}),
            api_key=launch.api_key,
            concurrency=config.cluster.sglang_server_concurrency,
            timeout_s=config.cluster.sglang_router_request_timeout_secs,
            probe_s=probe_s,
            report_s=config.sync.update_weight_timeout,
        )
        server.role, server.bootstrap_port, server.first_rank = launch.role, process.bootstrap_port, self.first_rank
        try:
            limit_s = config.engines.sglang_server_start_timeout
            await process.while_starting(_prepare(process, server, min_context_len), limit_s)
        except BaseException:
            await server.close()
            raise
        self.server = server
        return server

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

    async def stop(self, grace_s: float = KILL_GRACE_S) -> None:
        """Stop its processes, which may have ended already, and close the connections to it."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                await self.process.stop(grace_s)
        if self.server is not None:
            await self.server.close()


async def _prepare(process: ServerProcess, server: SglangServer, min_context_len: int | None) -> None:
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


@dataclass(eq=False)
class SglangRouter:
    """The process of a router. `options` are those of sglang-router; they override `ROUTER_OPTIONS`.

    With `is_split` some engines prefill and others decode, and the router pairs one of each for a request. api_key:
    that all clients send; None for no key, and then requests that add or remove engines need the `control_key`.
    port: None for a free one.
    """

    host: Host
    policy: str
    log: Path
    concurrency: int
    timeout_s: float = 14400.0
    api_key: str | None = None
    control_key: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_split: bool = False
    port: int | None = None
    _port: int | None = field(default=None, init=False)
    _process: ServerProcess | None = field(default=None, init=False)
    _client: SglangServer | None = field(default=None, init=False)

    async def reserve(self) -> tuple[str, int]:
        """Choose its address before the first start; it stays the same over restarts. Returns host and port."""
        [self._port] = await self.host.reserve_ports(1, first=self.port)
        return self.host.address, self._port

    async def start(self) -> SglangServer:
        """Start it and return a client for requests. Raises EngineError with its log if it fails to start."""
        http = self._port or (await self.reserve())[1]
        [prometheus] = await self.host.reserve_ports(1)
        values = {
            "host": self.host.address,
            "port": http,
            "prometheus_port": prometheus,
            "prometheus_host": self.host.address,
            "policy": self.policy,
            "request_timeout_secs": int(self.timeout_s),
            "pd_disaggregation": self.is_split,
        }
        key = self.api_key or self.control_key
        if self.api_key:
            values["api_key"] = KEY
        elif self.control_key:
            values["control_plane_api_keys"] = f"run:furlong:admin:{KEY}"
        command = module_command("sglang_router.launch_router", key)
        command += argv_from_options({**ROUTER_OPTIONS, **self.options, **values})
        logger.info("router: %s", shlex.join(command))
        process = await self.host.start(command, env=api_key_environment(key), log=self.log, ports=[http, prometheus])
        url = f"http://{host_and_port(self.host.address, http)}"
        self._process = ServerProcess("the router", url, [process], key)
        self._client = SglangServer(
            url,
            ServerInfo.read({}),
            api_key=key,
            concurrency=self.concurrency,
            timeout_s=self.timeout_s,
            busy=(FAILED,),
            keeps_together=self.policy == "cache_aware" and not self.is_split,
        )

        async def answers() -> None:
            while await self.hang_loss(START_POLL_S * 10) is not None:
                await asyncio.sleep(START_POLL_S)

        await self._process.while_starting(answers(), ROUTER_START_S, advice="See there what it waits for")
        return self._client

    async def exit_loss(self) -> Loss | None:
        """How its process ended, with the end of its log; None while it runs."""
        assert self._process is not None
        return await self._process.exit_loss()

    async def hang_loss(self, timeout_s: float) -> Loss | None:
        """Why it does not answer within `timeout_s`; None if it does."""
        try:
            await self._connection.ask("/workers", timeout_s=timeout_s)
        except EngineError as error:
            return Loss(f"it hangs: {error}", ENGINE_HANGS, "the router")
        return None

    async def add(self, server: SglangServer) -> None:
        """Add an engine; returns when the router sends requests to it."""
        body: dict[str, Any] = {"url": server.url, "worker_type": server.role}
        if server.bootstrap_port is not None:
            body["bootstrap_port"] = server.bootstrap_port
        if server.api_key:
            body["api_key"] = server.api_key
        await self._connection.ask("/workers", body)
        await self._wait_for_worker(server.url, present=True)

    async def remove(self, url: str) -> None:
        """Remove an engine; returns when the router sends it no more requests."""
        for worker in await self._workers(url):
            await self._connection.ask(f"/workers/{quote(str(worker['id']), safe='')}", method="DELETE")
            await self._wait_for_worker(url, present=False)

    async def close(self) -> None:
        """Stop it; it may be started again at the same address."""
        if self._port is not None:
            await self.host.release_ports([self._port])
        if self._process is not None:
            await self._process.stop(1.0)
        if self._client is not None:
            await self._client.close()

    @property
    def _connection(self) -> SglangServer:
        assert self._client is not None
        return self._client

    async def _workers(self, url: str) -> list[dict[str, Any]]:
        answer = await self._connection.ask_object("/workers")
        with reading(f"GET {self._connection.url}/workers", answer):
            return [worker for worker in answer["workers"] if worker["url"].rstrip("/") == url]

    async def _wait_for_worker(self, url: str, *, present: bool) -> None:
        """Wait until the router sends requests to an engine, or no longer knows it.

        It lists an engine before it marks it as healthy, and refuses requests (503) as long as none is.
        """
        deadline = time.monotonic() + ROUTER_UPDATE_S
        while True:
            listed = await self._workers(url)
            if any(worker.get("is_healthy", True) for worker in listed) if present else not listed:
                return
            if time.monotonic() > deadline:
                what = "add" if present else "remove"
                raise EngineError(f"the router did not {what} {url} within {ROUTER_UPDATE_S:g} s")
            await asyncio.sleep(START_POLL_S / 4)
