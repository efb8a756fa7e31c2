"""The servers of an `HttpEngine`: membership, health, load balancing and load statistics.

A supervisor adds and removes servers while requests run; a request that finds no server waits for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

from furlong.core.metric import Metrics, maximum, mean
from furlong.errors import ENGINE_HANGS, ENGINE_UNANSWERED, EngineError, Loss
from furlong.inference.sglang.server import SglangServer

logger = logging.getLogger(__name__)

TOKEN_TIMEOUT_S = 30.0  # for a server to generate a token
POLL_S = 0.02  # between two looks whether a server was removed
MAX_AFFINITIES = 65_536  # sessions and prompts with a known server; the oldest are forgotten
MAX_IMBALANCE = 64  # requests above the least loaded server, up to which a known server is preferred


class ServerPool:
    """Servers, optionally with an sglang-router in front of them.

    Arguments are those of `HttpEngine`. `failure` is raised by every request once it is set. `num_lost` counts lost
    servers, `num_sent` the requests that servers have not answered yet.
    """

    def __init__(
        self,
        servers: Sequence[SglangServer],
        router: SglangServer | None,
        *,
        needs_router: bool,
        is_supervised: bool,
        gives_up_unanswered: bool = True,
    ) -> None:
        self.servers, self.router = list(servers), router
        self.failure: EngineError | None = None
        self.is_closed = False
        self.num_lost = self.num_sent = 0
        self.idle = asyncio.Event()  # no server has a request
        self.idle.set()
        self._needs_router, self.is_supervised = needs_router, is_supervised
        self._gives_up_unanswered = gives_up_unanswered
        self._known: OrderedDict[object, SglangServer] = OrderedDict()  # server of a session or prompt
        self._changed = asyncio.Event()
        self._num_awaiting = 0
        self._generation_check: asyncio.Future[bool] | None = None
        self._counted_s, self._busy_s = time.monotonic(), 0.0
        self._num_samples = 0  # taken by `note_load`, behind a router

    # -- membership --------------------------------------------------------------------------------------------

    def use_router(self, router: SglangServer) -> None:
        """Send requests through this router."""
        self.router = router
        self._changed.set()

    async def leave_router(self, loss: Loss) -> None:
        """Send requests to the servers directly, including those that the lost router had.

        If servers need a router, requests wait for the next one.
        """
        router, self.router = self.router, None
        if router is not None:
            router.lost = loss
            await router.close()

    def add(self, server: SglangServer) -> None:
        """Add a server. It receives weights at once, and requests unless it is `stale`."""
        self.servers.append(server)
        self._changed.set()

    def notify_change(self) -> None:
        """Wake requests that wait for a usable server."""
        self._changed.set()

    async def remove(self, server: SglangServer) -> None:
        """Remove a lost server."""
        self.servers.remove(server)
        await server.close()

    async def wait_until_removed(self, servers: Sequence[SglangServer]) -> None:
        """Wait until the supervisor has stopped and removed these lost servers, so that their memory is free."""
        while self.is_supervised and any(server in self.servers for server in servers):
            self.check_open()
            await asyncio.sleep(POLL_S)

    def mark_lost(self, server: SglangServer, loss: Loss) -> None:
        """Stop using a server; its requests go to other servers."""
        if server.lost is not None:
            return
        server.lost = loss
        self.num_lost += 1
        logger.error(
            "engine %s is lost (%s); its requests go to the remaining %d of %d",
            server.url, loss.reason, len(self.alive()), len(self.servers),
        )  # fmt: skip

    async def close(self) -> None:
        """Close the connections; the servers keep running."""
        for server in [*self.servers, *([self.router] if self.router else [])]:
            await server.close()

    # -- health ------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise EngineError if no request can be answered any more."""
        if self.failure is not None:
            raise self.failure
        if self.is_closed:
            raise EngineError("this HttpEngine is closed; build a new one")

    def alive(self) -> list[SglangServer]:
        """The servers that are not known to be lost."""
        return [server for server in self.servers if not server.lost]

    async def usable(self) -> list[SglangServer]:
        """Wait for servers that can take requests and return them. Raises EngineError if there will be none."""

        def find() -> list[SglangServer]:
            is_waiting = self._needs_router and self.router is None
            return [] if is_waiting else [server for server in self.servers if server.is_usable]

        return await self._wait_for(find)

    async def wait_until_weights_needed(self) -> None:
        """Return when no server can take requests and one waits for a weight update."""
        while any(s.is_usable for s in self.servers) or not any(s.awaits_weights for s in self.alive()):
            self._changed.clear()
            await self._changed.wait()

    async def reachable(self) -> list[SglangServer]:
        """Wait for servers that pass a health check and return them. Raises EngineError if there will be none.

        Lost servers have been removed on return: one that is still alive would answer the router with old weights. No
        server generates a token for a health check: SGLang would die when an update flushes its cache.
        """
        self.check_open()
        await asyncio.gather(*(self.check_health(server, "before a weight update") for server in self.alive()))
        await self.wait_until_removed([server for server in self.servers if server.lost])
        self._num_awaiting += 1
        try:
            alive = await self._wait_for(self.alive)
            while any(server.has_pending_probe for server in alive):
                await asyncio.sleep(POLL_S)
                alive = await self._wait_for(self.alive)
            return alive
        finally:
            self._num_awaiting -= 1

    @property
    def is_awaited(self) -> bool:
        """Whether a weight update waits for a server because none is left."""
        return self._num_awaiting > 0

    async def any_lost(self, servers: Iterable[SglangServer], unanswered: Mapping[str, Loss] | None = None) -> bool:
        """Check the health of these servers; returns whether one of them is lost.

        `unanswered` gives, by URL, why a server did not load weights. With `gives_up_unanswered` such a server is lost
        even if it passes its health check, which SGLang answers for a process that does not compute.
        """
        checked = list(servers)
        given_up = (unanswered or {}) if self._gives_up_unanswered else {}
        for server in checked:
            if server.url in given_up:
                self.mark_lost(server, given_up[server.url])
        await asyncio.gather(*(self.check_health(server, "after a weight update") for server in checked))
        return any(server.lost for server in checked)

    async def check_health(self, server: SglangServer, why: str) -> None:
        """Mark a server as lost if it fails its health check."""
        now_s = time.monotonic()  # requests that fail together share one check
        async with server.health_lock:
            if not server.lost and not await server.is_alive(since_s=now_s):
                self.mark_lost(server, Loss(f"it does not answer: {why}", ENGINE_UNANSWERED))

    async def check_generation(self, server: SglangServer) -> bool:
        """Mark servers behind `server` as lost that generate no token; returns whether there were any.

        Concurrent calls share one check.
        """
        if self._generation_check is None:
            self._generation_check = asyncio.ensure_future(self._check_generation(list(self.behind(server))))
        task = self._generation_check
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and self._generation_check is task:
                self._generation_check = None

    async def _check_generation(self, servers: Sequence[SglangServer]) -> bool:
        before = self.num_lost
        usable = [server for server in servers if server.is_usable]
        errors = await asyncio.gather(*(server.generation_error(TOKEN_TIMEOUT_S) for server in usable))
        for server, error in zip(usable, errors, strict=True):
            if error:
                self.mark_lost(server, Loss(f"it generates nothing: {error}", ENGINE_HANGS))
        return self.num_lost > before

    async def _wait_for(self, find: Callable[[], list[SglangServer]]) -> list[SglangServer]:
        """Wait until `find` returns servers. Raises EngineError if it never will."""
        while not (servers := find()):
            self.check_open()  # also before the first wait: earlier notifications are not repeated
            if not self.is_supervised:
                why = {each.url: each.lost.reason if each.lost else each.stale for each in self.servers}
                reasons = "; ".join(f"{url} ({reason})" for url, reason in why.items())
                raise EngineError(f"no engine is left: {reasons}. Restart them and resume the run with --load")
            self._changed.clear()
            await self._changed.wait()
        self.check_open()
        return servers

    # -- load balancing ----------------------------------------------------------------------------------------

    def choose(self, usable: Sequence[SglangServer], prompt: Sequence[int], session: str | None) -> SglangServer:
        """The router, if there is one, or one of the `usable` servers.

        The samples of a prompt, and the turns of a session, stay on the server that has the prefix in its cache unless
        that overloads it.
        """
        if self.router is not None:
            return self.router
        keys: list[object] = [] if session is None else [session]
        keys.append(hash(tuple(prompt)))
        least = min(usable, key=lambda server: server.placed)
        known = [self._known[key] for key in keys if key in self._known]
        near = [server for server in known if server in usable and server.placed <= least.placed + MAX_IMBALANCE]
        chosen = near[0] if near else least
        for key in keys:
            self._known[key] = chosen
            self._known.move_to_end(key)
        while len(self._known) > MAX_AFFINITIES:
            self._known.popitem(last=False)
        return chosen

    def behind(self, server: SglangServer) -> list[SglangServer]:
        """The servers that may answer a request to `server`: itself, or all of them if it is the router."""
        return self.servers if server is self.router else [server]

    def caches_late(self, server: SglangServer) -> bool:
        """Whether computing a shared prompt before sending its requests saves time.

        Behind a router only if it sends them to the same server.
        """
        return server.keeps_together and all(behind.info.caches_late for behind in self.behind(server))

    def oldest_version(self, server: SglangServer) -> int | None:
        """Weight version for a request sent now; behind a router, the oldest of all servers."""
        versions = [s.version for s in self.behind(server) if s.is_usable]
        return None if None in versions or not versions else min(v for v in versions if v is not None)

    def newest_version(self, server: SglangServer) -> int | None:
        """Newest weight version that any server that may have answered has, or is loading."""
        return max((s.newest_label for s in self.behind(server) if s.newest_label is not None), default=None)

    # -- load statistics ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def count_request(self, server: SglangServer) -> Generator[None]:
        """Count a request as running on the server until the context exits."""
        self._count_load()
        server.running += 1
        self.num_sent += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._count_load()
            server.running -= 1
            self.num_sent -= 1
            if not self.num_sent:
                self.idle.set()

    def take_load(self) -> Metrics:
        """Requests on the busiest server and on average, over the time since the last call in which any ran.

        Behind a router, which hides the server of a request: means over the samples of `note_load`.
        """
        self._count_load()
        busy_s, self._busy_s = self._busy_s, 0.0
        num_samples, self._num_samples = self._num_samples, 0
        alive = [server for server in self.servers if not server.lost]
        if self.router is None:
            loads = [server.load_s / busy_s for server in alive] if busy_s else []
        else:
            loads = [server.load_samples / num_samples for server in alive] if num_samples else []
        for server in self.servers:
            server.load_s, server.load_samples = 0.0, 0
        if not loads:
            return {}
        return {"engine/requests/max": maximum(max(loads)), "engine/requests/mean": mean(sum(loads) / len(loads))}

    def note_load(self, servers: Sequence[SglangServer], requests: Sequence[int]) -> None:
        """Add one sample of the number of requests on each server."""
        if any(requests):
            self._num_samples += 1
            for server, count in zip(servers, requests, strict=True):
                server.load_samples += count

    def _count_load(self) -> None:
        """Integrate the load of each server up to now; called before each change."""
        now_s = time.monotonic()
        seconds, self._counted_s = now_s - self._counted_s, now_s
        if self.num_sent:
            self._busy_s += seconds
            for server in self.servers:
                server.load_s += server.running * seconds
