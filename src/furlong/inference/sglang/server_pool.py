"""The servers of an `HttpEngine`: which there are, which of them live, and which one gets a request.

A fleet adds and removes servers while requests run; a request that finds nobody waits here for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

from furlong.core.metric import Metrics, maximum, mean
from furlong.errors import EngineError
from furlong.inference.sglang.server import SglangServer

logger = logging.getLogger(__name__)

PROBE_S = 30.0  # for a server to generate a token
POLL_S = 0.02  # between two looks whether a server was removed
MAX_AFFINITIES = 65_536  # sessions and prompts with a known server; the oldest are forgotten
MAX_IMBALANCE = 64  # requests above the least loaded server, up to which a known server is preferred


class PrefixAffinity:
    """Keeps the samples of one prompt, and the turns of one session, on one server, unless that overloads it."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, SglangServer] = OrderedDict()

    def choose(self, usable: Sequence[SglangServer], prompt: Sequence[int], session: str | None) -> SglangServer:
        """The server that has the prefix in its cache, else the least loaded one. `usable` must not be empty."""
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


class ServerPool:
    """Servers, and perhaps an sglang-router in front of them.

    Args:
        servers: Where weights go, and requests too unless there is a `router`.
        router: An sglang-router in front of the servers, which then chooses among them.
        needs_router: No server answers a request alone: some prefill, others decode.
        is_supervised: Somebody adds others for servers that are lost, or sets `failure`; requests wait until then.

    `failure` is what every request raises from then on. `num_lost` counts servers that were lost, `num_sent` the
    requests that servers have.
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
        self._affinity = PrefixAffinity()
        self._changed = asyncio.Event()
        self._num_awaiting = 0
        self._examination: asyncio.Future[bool] | None = None
        self._counted_s, self._busy_s = time.monotonic(), 0.0
        self._num_looks = 0  # of a LoadWatch, behind a router

    # -- which there are ---------------------------------------------------------------------------------------

    def use_router(self, router: SglangServer) -> None:
        """Send requests through this router from now on."""
        self.router = router
        self._changed.set()

    async def leave_router(self, why: str) -> None:
        """Send requests to the servers directly from now on, also those that the router had: it is gone.

        Where they need a router they wait for the next one.
        """
        router, self.router = self.router, None
        if router is not None:
            router.lost = why
            await router.close()

    def add(self, server: SglangServer) -> None:
        """Use one more server: for weights at once, for requests if it is not `stale`."""
        self.servers.append(server)
        self._changed.set()

    def announce(self) -> None:
        """Look again for usable servers: one has its weights now, or there will be none."""
        self._changed.set()

    async def remove(self, server: SglangServer) -> None:
        """Forget a server that is lost."""
        self.servers.remove(server)
        await server.close()

    async def ended(self, servers: Sequence[SglangServer]) -> None:
        """Wait until who keeps the servers has ended and removed these, which are lost: their memory is free then."""
        while self.is_supervised and any(server in self.servers for server in servers):
            self.check_open()
            await asyncio.sleep(POLL_S)

    def lose(self, server: SglangServer, why: str) -> None:
        """Do not use a server any more; requests that it does not answer go to others."""
        if server.lost:
            return
        server.lost = why
        self.num_lost += 1
        logger.error(
            "engine %s is lost (%s); its requests go to the %d of %d that are left",
            server.url, why, len(self.alive()), len(self.servers),
        )  # fmt: skip

    async def close(self) -> None:
        """Close the connections; the servers go on."""
        for server in [*self.servers, *([self.router] if self.router else [])]:
            await server.close()

    # -- which of them live ------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise what is in the way of every request, if anything is."""
        if self.failure is not None:
            raise self.failure
        if self.is_closed:
            raise EngineError("the engine's connections are closed; build a new one")

    def alive(self) -> list[SglangServer]:
        """Those that are not lost, as far as is known."""
        return [server for server in self.servers if not server.lost]

    async def usable(self) -> list[SglangServer]:
        """Those that may get requests, as soon as there is one. Raises EngineError if none will come."""

        def find() -> list[SglangServer]:
            is_waiting = self._needs_router and self.router is None
            return [] if is_waiting else [server for server in self.servers if server.is_usable]

        return await self._wait_for(find)

    async def wait_until_weights_needed(self) -> None:
        """Return when none may get requests, and one waits for a publication."""
        while any(s.is_usable for s in self.servers) or not any(s.awaits_publication for s in self.alive()):
            self._changed.clear()
            await self._changed.wait()

    async def reachable(self) -> list[SglangServer]:
        """Those that answer; weights go to these. Raises EngineError if there is none.

        Those that are lost have been ended by then: one that lives is in its router, and would answer with old weights.
        None generates a token for a health check: SGLang that empties its cache after an update ends itself then.
        """
        self.check_open()
        await asyncio.gather(*(self.look_at(server, "before a weight update") for server in self.alive()))
        await self.ended([server for server in self.servers if server.lost])
        self._num_awaiting += 1
        try:
            found = await self._wait_for(self.alive)
            while any(server.is_probed for server in found):
                await asyncio.sleep(POLL_S)
                found = await self._wait_for(self.alive)
            return found
        finally:
            self._num_awaiting -= 1

    @property
    def is_awaited(self) -> bool:
        """Whether a publication waits because no server is left."""
        return self._num_awaiting > 0

    async def any_lost(self, servers: Iterable[SglangServer], unanswered: Mapping[str, str] | None = None) -> bool:
        """Whether one of these servers does not answer any more.

        Those with a URL in `unanswered`, which says why, did not take weights, and are lost whatever their health check
        says: SGLang's answers for a process that does not compute.
        """
        found = list(servers)
        given_up = (unanswered or {}) if self._gives_up_unanswered else {}
        for server in found:
            if server.url in given_up:
                self.lose(server, given_up[server.url])
        await asyncio.gather(*(self.look_at(server, "after a weight update") for server in found))
        return any(server.lost for server in found)

    async def look_at(self, server: SglangServer, why: str) -> None:
        """Take a server out of use if it does not answer its health check."""
        now_s = time.monotonic()  # requests that fail together look once
        async with server.looking:
            if not server.lost and not await server.is_alive(since_s=now_s):
                self.lose(server, f"does not answer: {why}")

    async def examine(self, server: SglangServer) -> bool:
        """Take out of use what lives behind `server` and generates nothing; returns whether anything was.

        Requests that ask meanwhile share the answer.
        """
        if self._examination is None:
            self._examination = asyncio.ensure_future(self._examine(list(self.behind(server))))
        task = self._examination
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and self._examination is task:
                self._examination = None

    async def _examine(self, servers: Sequence[SglangServer]) -> bool:
        before = self.num_lost
        asked = [server for server in servers if server.is_usable]
        for server, silence in zip(asked, await asyncio.gather(*(s.is_silent(PROBE_S) for s in asked)), strict=True):
            if silence:
                self.lose(server, f"generates nothing: {silence}")
        return self.num_lost > before

    async def _wait_for(self, find: Callable[[], list[SglangServer]]) -> list[SglangServer]:
        """The servers that `find` finds, as soon as there is one. Raises EngineError if none will come."""
        while not (found := find()):
            self.check_open()  # also before the first wait: what was announced before it is not announced again
            if not self.is_supervised:
                reasons = "; ".join(f"{server.url} ({server.lost or server.stale})" for server in self.servers)
                raise EngineError(f"no engine is left: {reasons}. Start them again and resume the run with --load")
            self._changed.clear()
            await self._changed.wait()
        self.check_open()
        return found

    # -- which one gets a request ------------------------------------------------------------------------------

    def choose(self, usable: Sequence[SglangServer], prompt: Sequence[int], session: str | None) -> SglangServer:
        """Where this request goes: to the router, if there is one, or to one of the `usable` servers."""
        return self.router or self._affinity.choose(usable, prompt, session)

    def behind(self, server: SglangServer) -> list[SglangServer]:
        """The servers that may answer what is sent to `server`: itself, or all of them if it is the router."""
        return self.servers if server is self.router else [server]

    def caches_late(self, server: SglangServer) -> bool:
        """Whether it helps to have a prompt computed before several requests with it are sent.

        Behind a router only if it sends them where the first one went.
        """
        return server.keeps_together and all(behind.info.caches_late for behind in self.behind(server))

    def oldest_version(self, server: SglangServer) -> int | None:
        """The version that a request sent now meets: behind a router, the oldest of any server."""
        versions = [s.version for s in self.behind(server) if s.is_usable]
        return None if None in versions or not versions else min(v for v in versions if v is not None)

    def newest_version(self, server: SglangServer) -> int | None:
        """The last version that any server was given which may have answered."""
        return max((s.version for s in self.behind(server) if s.version is not None), default=None)

    # -- what they have to do ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def asked(self, server: SglangServer) -> Generator[None]:
        """Count a request that the server has until the block is left."""
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
        """Requests that the busiest engine, and that an engine on average, ran while any ran since the last call.

        Behind a router, which hides what engine has a request: on average over the looks of a `LoadWatch`.
        """
        self._count_load()
        busy_s, self._busy_s = self._busy_s, 0.0
        num_looks, self._num_looks = self._num_looks, 0
        alive = [server for server in self.servers if not server.lost]
        if self.router is None:
            loads = [server.load_s / busy_s for server in alive] if busy_s else []
        else:
            loads = [server.looked / num_looks for server in alive] if num_looks else []
        for server in self.servers:
            server.load_s, server.looked = 0.0, 0
        if not loads:
            return {}
        return {"engine/requests/max": maximum(max(loads)), "engine/requests/mean": mean(sum(loads) / len(loads))}

    def note_load(self, servers: Sequence[SglangServer], requests: Sequence[int]) -> None:
        """Count one look at what each of these servers has."""
        if any(requests):
            self._num_looks += 1
            for server, count in zip(servers, requests, strict=True):
                server.looked += count

    def _count_load(self) -> None:
        """Add the time since the last change to what each server has run; called before each change."""
        now_s = time.monotonic()
        seconds, self._counted_s = now_s - self._counted_s, now_s
        if self.num_sent:
            self._busy_s += seconds
            for server in self.servers:
                server.load_s += server.running * seconds
