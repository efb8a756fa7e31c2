"""How many requests each engine behind a router has: the engines are asked, since the router does not tell."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from furlong.errors import EngineError
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_pool import ServerPool

logger = logging.getLogger(__name__)

LOOK_S = 2.0  # between two looks
ASK_S = 2.0  # for an engine to answer


@dataclass(eq=False)
class LoadWatch:
    """Asks the servers of a pool while requests run behind a router.

    `ServerPool.take_load` has the means of what they say. An engine that does not say it counts in no look: whether it
    lives is for others to find out.
    """

    pool: ServerPool

    async def look(self) -> None:
        """Wait, and ask once."""
        await asyncio.sleep(LOOK_S)
        if self.pool.router is None or not self.pool.num_sent:
            return
        servers = [server for server in self.pool.alive() if server.is_usable]
        counts = [count for count in await asyncio.gather(*map(num_requests, servers)) if count is not None]
        if len(counts) == len(servers):
            self.pool.note_load(servers, counts)


async def num_requests(server: SglangServer) -> int | None:
    """Requests that a server runs and has waiting; None if it does not say."""
    try:
        answer = await server.ask("/v1/loads", timeout_s=ASK_S)
        return sum(int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"]) for rank in answer["loads"])
    except (EngineError, KeyError, TypeError, ValueError) as error:
        logger.debug("%s does not say how many requests it has: %s", server.url, error)
        return None
