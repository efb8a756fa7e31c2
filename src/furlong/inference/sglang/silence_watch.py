"""Tells of servers that take requests and do not answer: stopped, asleep, or in a kernel that does not end.

Nothing is ended here. Without it such a server is noticed when its requests reach their deadline, which is hours away.
Where engines are started again (`--use-fault-tolerance`) the fleet checks them, and this is not needed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from furlong.errors import EngineError
from furlong.inference.sglang.in_flight import GENERATE
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_pool import PROBE_S, ServerPool

logger = logging.getLogger(__name__)

SILENT_S = 30.0  # without an answer, before a server is asked how it is

OnEvent = Callable[..., None]


@dataclass(eq=False)
class SilenceWatch:
    """Looks at the servers of a pool.

    A server that owes an answer for `SILENT_S` seconds is asked for a token, or where it does not generate whether it
    lives. If that does not come either, `on_event` hears `engine_silent` (url, running, asked, seconds, health): its
    requests, the oldest of them, the seconds since it last answered anything, and what became of the question. It hears
    again each time that the silence has doubled.
    """

    pool: ServerPool
    on_event: OnEvent
    _told: dict[SglangServer, float] = field(default_factory=dict[SglangServer, float], init=False)

    async def look(self) -> None:
        """Wait, and look once at each."""
        await asyncio.sleep(SILENT_S / 4)
        await asyncio.gather(*(self._look_at(server) for server in self.pool.alive()))

    async def _look_at(self, server: SglangServer) -> None:
        owed = server.oldest_owed() or self._owed_by_router()
        heard_s = server.answered_s
        if owed is None or time.monotonic() - max(heard_s, owed[1]) < SILENT_S:
            if self._told.pop(server, None) is not None:
                logger.info("%s answers again", server.url)
            return
        path, asked_s = owed
        health = await (server.is_silent(PROBE_S) if path == GENERATE else _is_dead(server))
        now_s = time.monotonic()
        if not health:
            server.answered_s = now_s
        seconds = now_s - max(heard_s, asked_s)
        if server.lost or server.answered_s > heard_s or seconds < 2 * self._told.get(server, 0.0):
            return
        self._told[server] = seconds
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
        """Behind a router, any server may owe the oldest answer."""
        return None if self.pool.router is None else self.pool.router.oldest_owed()


async def _is_dead(server: SglangServer) -> str:
    """Why the server does not say that it lives; "" if it does."""
    try:
        await server.ask("/health", timeout_s=PROBE_S)
    except EngineError as error:
        return str(error)
    return ""
