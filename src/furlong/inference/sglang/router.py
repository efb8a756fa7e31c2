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

from furlong.core.process_environment import api_key_environment
from furlong.errors import EngineError
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_info import ServerInfo
from furlong.inference.supervisor.host import Host
from furlong.inference.supervisor.server_launch import LOOK_S, LaunchedEngine, module_command, words_of

logger = logging.getLogger(__name__)

START_S = 120.0  # for the router to answer
JOIN_S = 60.0  # for it to take an engine in, or to let it go
FAILED = 500  # what it answers when an engine breaks a connection

# The client repeats requests, and the fleet finds engines that are dead: the router does neither, nor does it guess.
SETTINGS: Mapping[str, Any] = {
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
    """Implements `fleet.Front`. `options` are sglang-router's own, by name; they go before `SETTINGS`.

    If `is_split`, some engines prefill and others decode, and it joins one of each for a request.
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
    _process: LaunchedEngine | None = field(default=None, init=False)
    _client: SglangServer | None = field(default=None, init=False)

    async def reserve(self) -> tuple[str, int]:
        """Choose where it will be, before it is started and whenever it is started again; returns host and port."""
        [self._port] = await self.host.reserve_ports(1)
        return self.host.address, self._port

    async def start(self) -> SglangServer:
        """Start it and return the client of requests. Raises EngineError with its log if it does not come up."""
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
        command += words_of({**SETTINGS, **self.options, **values})
        logger.info("router: %s", shlex.join(command))
        process = await self.host.start(
            command, env=api_key_environment(self.api_key), log=self.log, ports=[http, prometheus]
        )
        url = f"http://{self.host.address}:{http}"
        self._process = LaunchedEngine("the router", url, [process], self.api_key)
        self._client = SglangServer(
            url,
            ServerInfo.read({}),
            api_key=self.api_key,
            concurrency=self.concurrency,
            timeout_s=self.timeout_s,
            busy=(FAILED,),
            keeps_together=self.policy == "cache_aware" and not self.is_split,
        )
        deadline = time.monotonic() + START_S
        while True:
            if why := await self.death():
                raise EngineError(why)
            try:
                await self._client.ask("/workers", timeout_s=LOOK_S * 10)
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise EngineError(f"the router did not answer within {START_S:g} s: {error}") from error
                await asyncio.sleep(LOOK_S)
                continue
            await self._process.check_own()
            return self._client

    async def death(self) -> str:
        """How its process ended, with the last lines of its log; "" while it runs."""
        assert self._process is not None
        return await self._process.death()

    async def hangs(self, timeout_s: float) -> str:
        """Why it does not answer in time; "" if it does."""
        try:
            await self._asked.ask("/workers", timeout_s=timeout_s)
        except EngineError as error:
            return f"the router hangs: {error}"
        return ""

    async def add(self, server: SglangServer) -> None:
        """Send requests to this engine, too; returns when the router does."""
        body: dict[str, Any] = {"url": server.url, "worker_type": server.role}
        if server.bootstrap_port is not None:
            body["bootstrap_port"] = server.bootstrap_port
        if self.api_key:
            body["api_key"] = self.api_key
        await self._asked.ask("/workers", body)
        await self._until(server.url, joined=True)

    async def remove(self, url: str) -> None:
        """Send no more requests to this engine; returns when the router does not."""
        for worker in await self._workers():
            if str(worker["url"]).rstrip("/") == url:
                await self._asked.ask(f"/workers/{worker['id']}", method="DELETE")
                await self._until(url, joined=False)

    async def close(self) -> None:
        """End it; it may be started again, at the same address."""
        if self._port is not None:
            await self.host.release_ports([self._port])
        if self._process is not None:
            await self._process.stop(1.0)
        if self._client is not None:
            await self._client.close()

    @property
    def _asked(self) -> SglangServer:
        assert self._client is not None
        return self._client

    async def _workers(self) -> list[dict[str, Any]]:
        return list((await self._asked.ask("/workers"))["workers"])

    async def _until(self, url: str, *, joined: bool) -> None:
        deadline = time.monotonic() + JOIN_S
        while any(str(worker["url"]).rstrip("/") == url for worker in await self._workers()) is not joined:
            if time.monotonic() > deadline:
                raise EngineError(f"the router did not {'take in' if joined else 'let go'} {url} within {JOIN_S:g} s")
            await asyncio.sleep(LOOK_S / 4)
