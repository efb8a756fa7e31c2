"""The engine servers of a run: started together, watched, replaced when they die, ended together.

Who needs what of it:

- `build` makes a `Fleet` of a `Launch` (what to start), of places (where) and of the `HttpEngine` that requests go
  through. `await fleet.start()` returns when every engine answers; the HttpEngine has their clients then.
- `sync` gives the callback `load_into(server, version)`, which brings the weights that the other engines serve to one
  server and proves that they arrived (`begin_loading` .. `finish_loading`). It is called for a server that was started
  again. Where the trainer's weights cannot be read at the moment, because it trains, the callback waits; it may as well
  return after a publication that covered the server, which is among `HttpEngine.reachable()` from the beginning.
- monitors give `on_event(name, **fields)`: `engines_started` (num, seconds), `engine_lost` (engine, url, why) and
  `engine_restarted` (engine, url, version, seconds); `router_lost` (why) and `router_restarted` (url, seconds).

One engine that is lost goes through these steps, in this order: it is taken out of the router, so that it gets no new
requests; its processes are killed, so that the requests it has fail and are sent to others; it is started again; it
gets the current weights, which are verified; only then it is put back into the router and gets requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from furlong.errors import ConfigError, EngineError, FurlongError, SyncError
from furlong.inference.sglang.http_engine import HttpEngine
from furlong.inference.sglang.server import SglangServer
from furlong.inference.supervisor.host import Place
from furlong.inference.supervisor.member import Clients, Member, stop_all
from furlong.inference.supervisor.server_launch import Launch

logger = logging.getLogger(__name__)

LOOK_S = 0.1  # between two looks at the process of an engine
REPORT_S = 30.0  # between two reports of what a start waits for
RETRY_S, MAX_RETRY_S = 1.0, 60.0  # between two attempts to give an engine its weights
NO_ENGINE = (
    "The run cannot go on without it; --use-fault-tolerance starts it again. Look in its log for the cause: too little "
    "memory is the most frequent"
)
NO_ROUTER = (
    "The run cannot go on without it; --use-fault-tolerance starts it again, --sglang-router-strategy direct needs none"
)

LoadInto = Callable[[SglangServer, int], Awaitable[object]]
OnEvent = Callable[..., None]


@dataclass(frozen=True)
class Tolerance:
    """When an engine counts as hanging, and how often engines of a run are started again.

    A health check every `interval_s` seconds must be answered within `timeout_s`; the first comes `first_wait_s` after
    an engine is up. Checks rest while the server does not generate or loads weights.
    """

    interval_s: float
    timeout_s: float
    max_restarts: int
    first_wait_s: float = 0.0


class Kept(Protocol):
    """What is watched, and replaced when it is lost: an engine, or the router."""

    async def death(self) -> str:
        """How it ended; "" while it runs."""
        ...

    async def hangs(self, timeout_s: float) -> str:
        """Why it does not answer in time; "" if it does, or need not."""
        ...


class Front(Kept, Protocol):
    """What stands in front of the engines and must know which of them get requests."""

    async def start(self) -> SglangServer:
        """Start it and return the client that requests go through."""
        ...

    async def close(self) -> None:
        """End it; it may be started again."""
        ...

    async def add(self, server: SglangServer) -> None:
        """Send requests to this engine, too."""
        ...

    async def remove(self, url: str) -> None:
        """Send no more requests to this engine."""
        ...


class Room(Protocol):
    """Who shares the devices of the engines with them (`loop.device_sharing.Colocated`)."""

    def starting(self) -> AbstractAsyncContextManager[Callable[[SglangServer], Awaitable[None]]]:
        """Hold the devices while an engine starts on one; what is given brings its memory into the others' state."""
        ...

    def mending(self) -> AbstractAsyncContextManager[None]:
        """Hold the devices for giving one engine the weights of the others. Raises SyncError if it is not possible."""
        ...


@dataclass
class Fleet:
    """Starts, watches, replaces and ends the engines of one model.

    Without `tolerance`, the death of an engine ends every request with an EngineError that shows the last lines of its
    log, and with it the run. `fail` ends the requests; without it those of `engine`, which a model that is not trained
    gets none of. Engines are numbered from `first_index` on over all models, in logs and in what `launch` is asked.
    """

    launch: Launch
    places: Sequence[Sequence[Place]]
    engine: HttpEngine
    log_dir: Path
    start_timeout_s: float = 1800.0
    clients: Clients = field(default_factory=Clients)
    tolerance: Tolerance | None = None
    front: Front | None = None
    room: Room | None = None  # for engines that are started again
    first_index: int = 0
    first_ranks: Sequence[int] = ()  # of each engine: the trainer rank on its first GPU, where they share GPUs
    load_into: LoadInto | None = None
    fail: Callable[[EngineError], None] | None = None
    on_event: OnEvent = field(default=lambda _name, **_fields: None)
    num_restarts: int = field(default=0, init=False)
    _members: list[Member] = field(default_factory=list[Member], init=False)
    _keepers: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]], init=False)
    _front_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def start(self) -> None:
        """Start all engines at the same time and wait until every one answers, then watch them.

        Says every 30 seconds which are missing. Raises EngineError with the log of the first that does not come up, and
        ConfigError for one whose context is too short; nothing is left running then.
        """
        started = time.perf_counter()
        ranks = self.first_ranks or [0] * len(self.places)
        where = enumerate(zip(self.places, ranks, strict=True), self.first_index)
        self._members = [Member(index, places, rank) for index, (places, rank) in where]
        logger.info("%d engines are being started; their logs are in %s", len(self._members), self.log_dir)
        tasks = {asyncio.create_task(self._bring_up(member)): member for member in self._members}
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, timeout=REPORT_S, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
                if pending:
                    missing = ", ".join(tasks[task].name for task in pending)
                    logger.info("%.0f s: waiting for %s", time.perf_counter() - started, missing)
            if self.front is not None:
                self.engine.pool.use_router(await self.front.start())
            for member in self._members:
                assert member.server is not None
                await self._admit(member.server)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop_all()
            raise
        seconds = time.perf_counter() - started
        logger.info("%d engines are up after %.1f s", len(self._members), seconds)
        self.on_event("engines_started", num=len(self._members), seconds=seconds)
        self._keepers = [
            asyncio.create_task(self._keep(member, partial(self._renew, member), NO_ENGINE)) for member in self._members
        ]
        if self.front is not None:
            renew = partial(self._renew_front, self.front)
            self._keepers.append(asyncio.create_task(self._keep(self.front, renew, NO_ROUTER)))

    async def close(self) -> None:
        """Stop watching, end all engines, and close the connections; returns when they are gone."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._stop_all()
        await self.engine.close()

    async def _stop_all(self) -> None:
        if self.front is not None:
            await self.front.close()
        await stop_all(self._members)

    # -- what is kept ------------------------------------------------------------------------------------------

    async def _keep(self, kept: Kept, renew: Callable[[str, float], Awaitable[None]], without: str) -> None:
        """Watch an engine or the router, and `renew` it each time it is lost; what goes wrong ends the run's requests.

        `renew` gets why it was lost, and when by `time.perf_counter`. `without` says what can be done where there is no
        tolerance.
        """
        try:
            while True:
                why = await self._loss(kept)
                if self.tolerance is None:
                    raise EngineError(f"{why}\n{without}")
                await renew(why, time.perf_counter())
        except FurlongError as error:
            self._end(error if isinstance(error, EngineError) else EngineError(str(error)))
        except Exception as error:  # nobody awaits this task: requests would wait for ever
            logger.exception("what runs requests cannot be watched")
            what = f"{type(error).__name__} while an engine or the router was watched or replaced: {error}"
            self._end(EngineError(f"{what}; the log has where. The same command with --load goes on"))

    def _end(self, error: EngineError) -> None:
        """End the run's requests."""
        fail = self.fail or self.engine.fail
        fail(error)

    async def _loss(self, kept: Kept) -> str:
        """Wait until it is lost; returns why: its process ended, it hangs, or a request found nobody there."""
        check_s = time.monotonic() + (self.tolerance.first_wait_s if self.tolerance else 0.0)
        while not (why := await kept.death()):
            if self.tolerance is not None and time.monotonic() >= check_s:
                if why := await kept.hangs(self.tolerance.timeout_s):
                    await asyncio.sleep(LOOK_S)  # a process that just died says more
                    return await kept.death() or why
                check_s = time.monotonic() + self.tolerance.interval_s
            await asyncio.sleep(LOOK_S)
        return why

    def _count_restart(self, why: str) -> str:
        """Count one more restart; returns `3 of 10`. Raises EngineError if that is too often."""
        assert self.tolerance is not None
        most = self.tolerance.max_restarts
        if self.num_restarts >= most:
            raise EngineError(
                f"{why}\nEngines were started again {self.num_restarts} times, which is all that "
                f"--rollout-max-engine-restarts {most} allows; the engines' logs are in {self.log_dir}"
            )
        self.num_restarts += 1
        return f"{self.num_restarts} of {most}"

    # -- the router --------------------------------------------------------------------------------------------

    async def _tell_front(self, front: Front, command: Awaitable[None]) -> None:
        """Await a command to the router; one that has died gets to know its engines when it is started again."""
        async with self._front_lock:
            try:
                await command
            except EngineError:
                if self.tolerance is None or not await front.death():
                    raise

    async def _renew_front(self, front: Front, why: str, lost_s: float) -> None:
        """Start the router again; meanwhile requests go to the engines directly. Raises EngineError: too often."""
        pool = self.engine.pool
        logger.error("router_lost: %s", why)
        self.on_event("router_lost", why=why)
        await pool.leave_router(why.partition(";")[0])
        while True:
            logger.info("the router is started again (%s)", self._count_restart(why))
            await front.close()  # who waits for its answer has the lock, and fails now
            try:
                async with self._front_lock:
                    client = await front.start()
                    for server in pool.servers:
                        if server.is_usable:
                            await _introduce(front, server)
                    pool.use_router(client)
                break
            except EngineError as error:
                why = str(error)
                logger.error("the router did not come back: %s", why)
        seconds = time.perf_counter() - lost_s
        logger.info("router_restarted: at %s, %.1f s after it was lost", client.url, seconds)
        self.on_event("router_restarted", url=client.url, seconds=seconds)

    # -- one engine --------------------------------------------------------------------------------------------

    async def _bring_up(self, member: Member) -> None:
        await member.bring_up(self.launch, self.clients, log_dir=self.log_dir, timeout_s=self.start_timeout_s)

    async def _admit(self, server: SglangServer) -> None:
        """Let the server get requests."""
        pool = self.engine.pool
        if server not in pool.servers:
            pool.add(server)
        if self.front is not None:
            await self._tell_front(self.front, _introduce(self.front, server))
        pool.announce()

    async def _renew(self, member: Member, why: str, lost_s: float) -> None:
        """Replace an engine that is lost. Raises EngineError if that was needed too often."""
        await self._lose(member, why)
        while True:
            logger.info("engine %d is started again (%s)", member.index, self._count_restart(why))
            try:
                async with self._roomy() as settle:
                    server = await self._rejoin(member, settle)
                await self._while_it_lives(member, "while it got its weights", self._give_weights(server))
                await self._while_it_lives(member, "before it got requests", self._admit(server))
            except FurlongError as error:
                if isinstance(error, ConfigError):
                    raise
                why = str(error)
                logger.error("engine %d did not come back: %s", member.index, why)
                await self._discard(member)
                continue
            seconds = time.perf_counter() - lost_s
            logger.info(
                "engine_restarted: engine %d at %s has weight version %s, %.1f s after it was lost",
                member.index, server.url, server.version, seconds,
            )  # fmt: skip
            self.on_event(
                "engine_restarted", engine=member.index, url=server.url, version=server.version, seconds=seconds
            )
            return

    async def _lose(self, member: Member, why: str) -> None:
        """Take an engine out of use and end it, so that the requests it has go to others."""
        server = member.server
        assert server is not None
        self.engine.pool.lose(server, why.partition(";")[0])
        logger.error("engine_lost: %s", why)
        self.on_event("engine_lost", engine=member.index, url=server.url, why=why)
        if self.front is not None:
            await self._tell_front(self.front, self.front.remove(server.url))
        await member.stop()
        await self.engine.pool.remove(server)

    @contextlib.asynccontextmanager
    async def _roomy(self) -> AsyncGenerator[Callable[[SglangServer], Awaitable[None]]]:
        """Hold what an engine needs to start: where it shares devices, that the trainer is off them."""
        if self.room is None:
            yield _as_it_is
        else:
            async with self.room.starting() as settle:
                yield settle

    async def _rejoin(self, member: Member, settle: Callable[[SglangServer], Awaitable[None]]) -> SglangServer:
        """Start an engine again and use it for weights, not yet for requests if it needs the current ones."""
        await self._bring_up(member)
        server = member.server
        assert server is not None
        if self.load_into is not None:
            server.stale = "it has the weights of its folder only"
        await settle(server)
        self.engine.pool.add(server)
        return server

    async def _while_it_lives(self, member: Member, when: str, work: Coroutine[Any, Any, None]) -> None:
        """Await what an engine takes part in. Raises EngineError if it dies or hangs meanwhile."""
        working = asyncio.ensure_future(work)
        dying = asyncio.ensure_future(self._loss(member))
        try:
            await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise EngineError(f"{when}: {dying.result()}")
            working.result()
        finally:
            for task in (working, dying):
                task.cancel()
            await asyncio.gather(working, dying, return_exceptions=True)

    async def _give_weights(self, server: SglangServer) -> None:
        """Bring the current weights to an engine that has those of its folder.

        Where nothing is ever published, those of the folder are the current ones.
        """
        if self.load_into is not None:
            await self._load_into(server, self.load_into)

    async def _load_into(self, server: SglangServer, load_into: LoadInto) -> None:
        """Load the newest weights that any engine has had, or wait for a publication that brings them.

        The trainer may have trained on since, so that only the next publication can. Raises EngineError if none comes,
        or if the server does not take them in time.
        """
        began_s, wait_s = time.monotonic(), RETRY_S
        why = "nothing is published yet"
        while server.stale:
            versions = [member.version for member in self._members if member.version is not None]
            if versions:
                try:
                    async with contextlib.nullcontext() if self.room is None else self.room.mending():
                        await load_into(server, max(versions))
                except SyncError as error:
                    why = str(error)
                    if server.url in error.broken:
                        raise EngineError(f"{server.url} gave no answer: {why}") from error
                    if error.late is not None and server.url in error.late["missing"]:
                        raise EngineError(f"{server.url} hangs: {why}") from error
                    logger.info("%s waits for the next publication: %s", server.url, why)
                    server.awaits_publication = self.room is None  # else the trainer gives it weights in its turn
                    self.engine.pool.announce()
            until_s = time.monotonic() + wait_s
            while server.stale and time.monotonic() < until_s:
                await asyncio.sleep(LOOK_S)
            wait_s = min(2 * wait_s, MAX_RETRY_S)
            if server.stale and time.monotonic() - began_s > self.start_timeout_s:
                raise EngineError(
                    f"{server.url} got no weights in {self.start_timeout_s:g} s: {why}. With --update-weight-transport "
                    "disk the last version is kept and can be loaded at any time"
                )

    async def _discard(self, member: Member) -> None:
        """End an engine that did not come back."""
        server, pool = member.server, self.engine.pool
        if server is not None and server in pool.servers:
            pool.lose(server, "it did not come back")
            if self.front is not None:
                await self._tell_front(self.front, self.front.remove(server.url))
            await pool.remove(server)
        await member.stop()


async def _introduce(front: Front, server: SglangServer) -> None:
    """Have the router send requests to a server, too, unless that is lost before the router has reached it."""
    adding = asyncio.ensure_future(front.add(server))
    try:
        while not adding.done() and not server.lost:
            await asyncio.wait({adding}, timeout=LOOK_S)
        if adding.done():
            adding.result()
    finally:
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)


async def _as_it_is(server: SglangServer) -> None:
    """Leave the memory of a server as it is."""
    del server
