"""The sglang-router that a run starts in front of its engines."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from furlong.core.addresses import host_and_port
from furlong.core.process_environment import api_key_environment
from furlong.errors import ENGINE_HANGS, EngineError, Loss
from furlong.inference.sglang.engine_answers import label, read_workers
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_info import ServerInfo
from furlong.inference.supervisor.engine_process import POLL_S, ServerProcess
from furlong.inference.supervisor.host import Host
from furlong.inference.supervisor.server_launch import argv_from_options, module_command

logger = logging.getLogger(__name__)

START_S = 120.0  # for the router to answer
UPDATE_S = 60.0  # for it to add or remove an engine
FAILED = 500  # status of its answer when an engine breaks a connection

# The client retries requests and the replica set checks health, so the router must do neither.
DEFAULT_OPTIONS: Mapping[str, Any] = {
    "disable_retries": True,
    "disable_circuit_breaker": True,
    "disable_health_check": True,
    "balance_abs_threshold": 10,
    "balance_rel_threshold": 1.2,
    "log_level": "warn",
    "assignment_mode": "min_load",
}


@dataclass(eq=False)
class SglangRouter:
    """The process of a router. `options` are those of sglang-router; they override `DEFAULT_OPTIONS`.

    With `is_split` some engines prefill and others decode, and the router pairs one of each for a request.
    """

    host: Host
    policy: str
    log: Path
    concurrency: int
    timeout_s: float = 14400.0
    api_key: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_split: bool = False
    _port: int | None = field(default=None, init=False)
    _process: ServerProcess | None = field(default=None, init=False)
    _client: SglangServer | None = field(default=None, init=False)

    async def reserve(self) -> tuple[str, int]:
        """Choose its address before the first start; it stays the same over restarts. Returns host and port."""
        [self._port] = await self.host.reserve_ports(1)
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
        command = module_command("sglang_router.launch_router", self.api_key)
        command += argv_from_options({**DEFAULT_OPTIONS, **self.options, **values})
        logger.info("router: %s", shlex.join(command))
        process = await self.host.start(
            command, env=api_key_environment(self.api_key), log=self.log, ports=[http, prometheus]
        )
        url = f"http://{host_and_port(self.host.address, http)}"
        self._process = ServerProcess("the router", url, [process], self.api_key)
        self._client = SglangServer(
            url,
            ServerInfo.read({}),
            api_key=self.api_key,
            concurrency=self.concurrency,
            timeout_s=self.timeout_s,
            busy=(FAILED,),
            keeps_together=self.policy == "cache_aware" and not self.is_split,
        )
        await self._process.while_starting(self._answers(), START_S, advice="See there what it waits for")
        await self._process.check_port()
        return self._client

    async def _answers(self) -> None:
        """Wait until it answers."""
        while True:
            try:
                await self._connection.ask("/workers", timeout_s=POLL_S * 10)
            except EngineError as error:
                logger.debug("the router is not ready: %s", error)
                await asyncio.sleep(POLL_S)
            else:
                return

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
        if self.api_key:
            body["api_key"] = self.api_key
        await self._connection.ask("/workers", body)
        await self._wait_for_worker(server.url, present=True)

    async def remove(self, url: str) -> None:
        """Remove an engine; returns when the router sends it no more requests."""
        for worker in await self._workers():
            if worker["url"].rstrip("/") == url:
                number = label(worker, "id", f"GET {self._connection.url}/workers")
                await self._connection.ask(f"/workers/{quote(number, safe='')}", method="DELETE")
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

    async def _workers(self) -> list[dict[str, Any]]:
        answer = await self._connection.ask_object("/workers")
        return read_workers(answer, f"GET {self._connection.url}/workers")

    async def _wait_for_worker(self, url: str, *, present: bool) -> None:
        """Wait until the router sends requests to an engine, or no longer knows it.

        It lists an engine before it marks it as healthy, and refuses requests (503) as long as none is.
        """
        deadline = time.monotonic() + UPDATE_S
        while True:
            listed = [worker for worker in await self._workers() if worker["url"].rstrip("/") == url]
            if any(worker.get("is_healthy", True) for worker in listed) if present else not listed:
                return
            if time.monotonic() > deadline:
                raise EngineError(f"the router did not {'add' if present else 'remove'} {url} within {UPDATE_S:g} s")
            await asyncio.sleep(POLL_S / 4)
