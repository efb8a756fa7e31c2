"""Monitors of the servers in a pool: their load behind a router, and servers that stop answering."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from furlong.errors import EngineError
from furlong.inference.sglang.in_flight import GENERATE
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_pool import TOKEN_TIMEOUT_S, ServerPool

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 2.0  # between two load samples
LOAD_TIMEOUT_S = 2.0  # for a server to report its load
SILENT_S = 30.0  # without an answer, before a server is probed

OnEvent = Callable[..., None]


@dataclass(eq=False)
class LoadMonitor:
    """Samples the load of each server while requests run behind a router, which does not report it.

    `ServerPool.take_load` returns the means. A sample that a server does not answer counts for none of them.
    """

    pool: ServerPool

    async def check(self) -> None:
        """Wait for the interval and take one sample."""
        await asyncio.sleep(LOAD_INTERVAL_S)
        if self.pool.router is None or not self.pool.num_sent:
            return
        servers = [server for server in self.pool.alive() if server.is_usable]
        counts = [count for count in await asyncio.gather(*map(num_requests, servers)) if count is not None]
        if len(counts) == len(servers):
            self.pool.note_load(servers, counts)


async def num_requests(server: SglangServer) -> int | None:
    """Running and queued requests of a server; None if it does not report them."""
    try:
        answer = await server.ask("/v1/loads", timeout_s=LOAD_TIMEOUT_S)
        return sum(int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"]) for rank in answer["loads"])
    except (EngineError, KeyError, TypeError, ValueError) as error:
        logger.debug("%s does not report its load: %s", server.url, error)
        return None


@dataclass(eq=False)
class SilenceMonitor:
    """Reports servers that accept requests and do not answer: stopped, asleep, or stuck in a kernel.

    It stops nothing; without it such a server shows only when its requests time out, hours later. It is not needed
    with --use-fault-tolerance, where health checks find hanging engines.

    A server that has owed an answer for `SILENT_S` seconds is asked for a token, or for its health if generation is
    not what it owes. If that is not answered either, `on_event` is called with `engine_silent` (url, running, asked,
    seconds, health): running requests, path of the oldest one, seconds since its last answer, and the error of the
    probe. It is called again each time the silence has doubled.
    """

    pool: ServerPool
    on_event: OnEvent
    _reported: dict[SglangServer, float] = field(default_factory=dict[SglangServer, float], init=False)

    async def check(self) -> None:
        """Wait for the interval and check each server once."""
        await asyncio.sleep(SILENT_S / 4)
        await asyncio.gather(*(self._check(server) for server in self.pool.alive()))

    async def _check(self, server: SglangServer) -> None:
        owed = server.oldest_unanswered() or self._owed_by_router()
        answered_s = server.answered_s
        if owed is None or time.monotonic() - max(answered_s, owed[1]) < SILENT_S:
            if self._reported.pop(server, None) is not None:
                logger.info("%s answers again", server.url)
            return
        path, asked_s = owed
        health = await (server.generation_error(TOKEN_TIMEOUT_S) if path == GENERATE else _health_error(server))
        now_s = time.monotonic()
        if not health:
            server.answered_s = now_s
        seconds = now_s - max(answered_s, asked_s)
        if server.lost or server.answered_s > answered_s or seconds < 2 * self._reported.get(server, 0.0):
            return
        self._reported[server] = seconds
        router = self.pool.router
        self.on_event(
            "engine_silent",
            url=server.url,
            running=server.running if router is None else router.running,
            asked=path,
            seconds=round(seconds, 1),
            health=health,
        )

    def _owed_by_router(self) -> tuple[str, float] | None:
        """The oldest unanswered request of the router, which any server may have."""
        return None if self.pool.router is None else self.pool.router.oldest_unanswered()


async def _health_error(server: SglangServer) -> str:
    """Why the server does not answer its health check; "" if it does."""
    try:
        await server.ask("/health", timeout_s=TOKEN_TIMEOUT_S)
    except EngineError as error:
        return str(error)
    return ""
