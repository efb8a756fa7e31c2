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
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from furlong.engines.launch import Launch, LaunchedEngine, Place, start_engine
from furlong.engines.sglang_http import HttpEngine
from furlong.engines.sglang_server import PROBE_S, ServerInfo, SglangServer
from furlong.errors import ConfigError, EngineError, FurlongError, SyncError

logger = logging.getLogger(__name__)

LOOK_S = 0.1  # between two looks at the process of an engine
REPORT_S = 30.0  # between two reports of what a start waits for
RETRY_S, MAX_RETRY_S = 1.0, 60.0  # between two attempts to give an engine its weights
DEAD_S = 0.0  # grace for a process that is given up

LoadInto = Callable[[SglangServer, int], Awaitable[object]]
OnEvent = Callable[..., None]


@dataclass(frozen=True)
class Clients:
    """How this process talks to each server."""

    concurrency: int = 512
    timeout_s: float = 14400.0
    probe_s: float = PROBE_S
    min_context_len: int | None = None


@dataclass(frozen=True)
class Tolerance:
    """When an engine counts as hanging, and how often engines of a run are started again.

    A health check every `interval_s` seconds must be answered within `timeout_s`; the first comes `first_wait_s` after
    an engine is up. Checks rest while the server does not generate or loads weights.
    """

    interval_s: float = 30.0
    timeout_s: float = 30.0
    first_wait_s: float = 0.0
    max_restarts: int = 10


class Front(Protocol):
    """What stands in front of the engines and must know which of them get requests."""

    async def start(self) -> SglangServer:
        """Start it and return the client that requests go through."""
        ...

    async def death(self) -> str:
        """How it ended; "" while it runs."""
        ...

    async def hangs(self, timeout_s: float) -> str:
        """Why it does not answer in time; "" if it does."""
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
    """Who shares the devices of the engines with them (`loop.residency.Colocated`)."""

    def starting(self) -> AbstractAsyncContextManager[Callable[[SglangServer], Awaitable[None]]]:
        """Hold the devices while an engine starts on one; what is given brings its memory into the others' state."""
        ...

    def mending(self) -> AbstractAsyncContextManager[None]:
        """Hold the devices for giving one engine the weights of the others. Raises SyncError if it is not possible."""
        ...


@dataclass(eq=False)
class _Member:
    """One engine of the fleet, through all of its restarts."""

    index: int
    places: Sequence[Place]
    launched: LaunchedEngine | None = None
    server: SglangServer | None = None


@dataclass
class Fleet:
    """Starts, watches, replaces and ends the engines of a run.

    Without `tolerance`, the death of an engine ends every request with an EngineError that shows the last lines of its
    log, and with it the run.
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
    first_ranks: Sequence[int] = ()  # of each engine: the trainer rank on its first GPU, where they share GPUs
    load_into: LoadInto | None = None
    on_event: OnEvent = field(default=lambda _name, **_fields: None)
    num_restarts: int = field(default=0, init=False)
    _members: list[_Member] = field(default_factory=list[_Member], init=False)
    _keepers: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]], init=False)
    _version: int | None = field(default=None, init=False)
    _front_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def start(self) -> None:
        """Start all engines at the same time and wait until every one answers, then watch them.

        Says every 30 seconds which are missing. Raises EngineError with the log of the first that does not come up, and
        ConfigError for one whose context is too short; nothing is left running then.
        """
        started = time.perf_counter()
        self._members = [_Member(index, places) for index, places in enumerate(self.places)]
        logger.info("%d engines are being started; their logs are in %s", len(self._members), self.log_dir)
        tasks = {asyncio.create_task(self._bring_up(member)): member for member in self._members}
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, timeout=REPORT_S, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
                if pending:
                    missing = ", ".join(_shown(tasks[task]) for task in pending)
                    logger.info("%.0f s: waiting for %s", time.perf_counter() - started, missing)
            if self.front is not None:
                self.engine.use_router(await self.front.start())
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
        self._keepers = [asyncio.create_task(self._keep(member)) for member in self._members]
        if self.front is not None:
            self._keepers.append(asyncio.create_task(self._keep_front(self.front)))

    async def close(self) -> None:
        """Stop watching and end all engines; returns when they are gone."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._stop_all()

    async def _stop_all(self) -> None:
        if self.front is not None:
            await self.front.close()
        launched = [member.launched for member in self._members if member.launched is not None]
        await asyncio.gather(*(engine.stop() for engine in launched))

    # -- one engine --------------------------------------------------------------------------------------------

    async def _bring_up(self, member: _Member) -> None:
        """Start one engine and wait until it answers; `member.server` is its client then."""
        member.server = None
        member.launched = await start_engine(self.launch, member.index, member.places, log_dir=self.log_dir)
        await member.launched.wait_until_up(self.start_timeout_s)
        clients = self.clients
        server = SglangServer(
            member.launched.url,
            ServerInfo.read({}),
            api_key=self.launch.api_key,
            concurrency=clients.concurrency,
            timeout_s=clients.timeout_s,
            probe_s=clients.probe_s,
        )
        server.role, server.bootstrap_port = member.launched.role, member.launched.bootstrap_port
        if self.first_ranks:
            server.first_rank = self.first_ranks[member.index]
        server.info = info = ServerInfo.read(await server.ask("/server_info"))
        wanted = clients.min_context_len
        if wanted is not None and info.context_len is not None and info.context_len < wanted:
            await server.close()
            raise ConfigError(
                f"--rollout-max-context-len {wanted} is more than the {info.context_len} tokens of the engine at "
                f"{server.url}; lower it or --sglang-context-length {wanted}"
            )
        logger.info("engine %s: %s, dtype %s, tp %d", server.url, info.software, info.dtype, info.tp_size)
        if server.device_dtypes:
            await server.checksums()  # compiles its kernels, which the first publication would wait for
        member.server = server

    async def _admit(self, server: SglangServer) -> None:
        """Let the server get requests."""
        if server not in self.engine.servers:
            self.engine.add(server)
        if self.front is not None:
            await self._tell_front(self.front, _introduce(self.front, server))
        self.engine.announce()

    async def _keep(self, member: _Member) -> None:
        """Watch one engine, and replace it each time it is lost; what goes wrong here ends the run's requests."""
        try:
            while True:
                why = await self._loss(member)
                if self.tolerance is None:
                    raise EngineError(
                        f"{why}\nThe run cannot go on without it; --use-fault-tolerance starts it again. Look in its "
                        "log for the cause: too little memory is the most frequent"
                    )
                lost_s = time.perf_counter()
                await self._lose(member, why)
                await self._replace(member, why, lost_s)
        except FurlongError as error:
            self.engine.fail(error if isinstance(error, EngineError) else EngineError(str(error)))

    async def _tell_front(self, front: Front, command: Awaitable[None]) -> None:
        """Await a command to the router; one that has died gets to know its engines when it is started again."""
        async with self._front_lock:
            try:
                await command
            except EngineError:
                if self.tolerance is None or not await front.death():
                    raise

    async def _keep_front(self, front: Front) -> None:
        """Watch the router and start it again; meanwhile requests go to the engines directly.

        Without tolerance, or when that is too often, its end ends the run's requests.
        """
        try:
            while True:
                why = await self._front_loss(front)
                if self.tolerance is None:
                    raise EngineError(
                        f"{why}\nThe run cannot go on without it; --use-fault-tolerance starts it again, "
                        "--sglang-router-strategy direct needs none"
                    )
                lost_s = time.perf_counter()
                logger.error("router_lost: %s", why)
                self.on_event("router_lost", why=why)
                await self.engine.leave_router(why.partition(";")[0])
                self._count_restart(why)
                async with self._front_lock:
                    await front.close()
                    client = await front.start()
                    for server in self.engine.servers:
                        if server.is_usable:
                            await _introduce(front, server)
                    self.engine.use_router(client)
                seconds = time.perf_counter() - lost_s
                logger.info("router_restarted: at %s, %.1f s after it was lost", client.url, seconds)
                self.on_event("router_restarted", url=client.url, seconds=seconds)
        except EngineError as error:
            self.engine.fail(error)

    async def _front_loss(self, front: Front) -> str:
        """Wait until the router is lost; returns why: its process ended, or it hangs."""
        check_s = time.monotonic()
        while not (why := await front.death()):
            if self.tolerance is not None and time.monotonic() >= check_s + self.tolerance.interval_s:
                if why := await front.hangs(self.tolerance.timeout_s):
                    return why
                check_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
        return why

    async def _loss(self, member: _Member) -> str:
        """Wait until an engine is lost; returns why: its process ended, it hangs, or a request found nobody there."""
        assert member.launched is not None
        check_s = time.monotonic() + (self.tolerance.first_wait_s if self.tolerance else 0.0)
        while True:
            if why := await member.launched.death():
                return why
            server = member.server
            assert server is not None
            if server.lost:
                return f"{member.launched.where} {server.lost}; {await member.launched.last_lines()}"
            self._remember(server)
            if self.tolerance is not None and time.monotonic() >= check_s:
                if hanging := await self._hangs(server, self.tolerance):
                    await asyncio.sleep(LOOK_S)  # a process that just died says more
                    return (
                        await member.launched.death()
                        or f"{member.launched.where} hangs: {hanging}; {await member.launched.last_lines()}"
                    )
                check_s = time.monotonic() + self.tolerance.interval_s
            await asyncio.sleep(LOOK_S)

    def _remember(self, server: SglangServer) -> None:
        """Which version of the weights some engine has had."""
        if server.version is not None:
            self._version = max(server.version, self._version or 0)

    async def _hangs(self, server: SglangServer, tolerance: Tolerance) -> str:
        """Why a server that should generate does not; "" if it does, or should not at the moment."""
        if server.is_paused or server.released or not server.is_usable:
            return ""
        quiet = server.quiet
        try:
            await server.ask("/health_generate", timeout_s=tolerance.timeout_s)
        except EngineError as error:
            return "" if server.is_paused or server.quiet != quiet else str(error)
        return ""

    async def _lose(self, member: _Member, why: str) -> None:
        """Take an engine out of use and end it, so that the requests it has go to others."""
        server, launched = member.server, member.launched
        assert server is not None
        assert launched is not None
        self._remember(server)  # it may have got its weights since they were looked at
        self.engine.lose(server, why.partition(";")[0])
        logger.error("engine_lost: %s", why)
        self.on_event("engine_lost", engine=member.index, url=server.url, why=why)
        if self.front is not None:
            await self._tell_front(self.front, self.front.remove(server.url))
        await launched.stop(DEAD_S)
        await self.engine.remove(server)

    async def _replace(self, member: _Member, why: str, lost_s: float) -> None:
        """Start an engine again until it is up and has the current weights. Raises EngineError if that is too often."""
        while True:
            logger.info("engine %d is started again (%s)", member.index, self._count_restart(why))
            try:
                async with self._roomy() as settle:
                    server = await self._rejoin(member, settle)
                await self._give_weights(member, server)
            except FurlongError as error:
                if isinstance(error, ConfigError):
                    raise
                why = str(error)
                logger.error("engine %d did not come back: %s", member.index, why)
                await self._discard(member)
                continue
            await self._admit(server)
            seconds = time.perf_counter() - lost_s
            logger.info(
                "engine_restarted: engine %d at %s has weight version %s, %.1f s after it was lost",
                member.index, server.url, server.version, seconds,
            )  # fmt: skip
            self.on_event(
                "engine_restarted", engine=member.index, url=server.url, version=server.version, seconds=seconds
            )
            return

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

    @contextlib.asynccontextmanager
    async def _roomy(self) -> AsyncGenerator[Callable[[SglangServer], Awaitable[None]]]:
        """Hold what an engine needs to start: where it shares devices, that the trainer is off them."""
        if self.room is None:
            yield _as_it_is
        else:
            async with self.room.starting() as settle:
                yield settle

    async def _rejoin(self, member: _Member, settle: Callable[[SglangServer], Awaitable[None]]) -> SglangServer:
        """Start an engine again and use it for weights, not yet for requests if it needs the current ones."""
        await self._bring_up(member)
        server = member.server
        assert server is not None
        if self.load_into is not None:
            server.stale = "it has the weights of its folder only"
        await settle(server)
        self.engine.add(server)
        return server

    async def _give_weights(self, member: _Member, server: SglangServer) -> None:
        """Bring the current weights to an engine that has those of its folder. Raises EngineError if it dies of that.

        Where nothing is ever published, those of the folder are the current ones.
        """
        if self.load_into is None:
            return
        loading = asyncio.ensure_future(self._load_into(server, self.load_into))
        dying = asyncio.ensure_future(self._loss(member))
        try:
            await asyncio.wait({loading, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                raise EngineError(f"while it got its weights: {dying.result()}")
            loading.result()
        finally:
            for task in (loading, dying):
                task.cancel()
            await asyncio.gather(loading, dying, return_exceptions=True)
        if server.stale:
            raise EngineError(f"{server.url} did not get the current weights: {server.stale}")

    async def _load_into(self, server: SglangServer, load_into: LoadInto) -> None:
        """Load the newest weights that any engine has had, or wait for a publication that brings them.

        The trainer may have trained on since, so that only the next publication can. Raises EngineError if none comes.
        """
        began_s, wait_s = time.monotonic(), RETRY_S
        why = "nothing is published yet"
        while server.stale:
            versions = [s.version for s in self.engine.servers if s.version is not None]
            if self._version is not None:
                versions.append(self._version)
            if versions:
                try:
                    async with contextlib.nullcontext() if self.room is None else self.room.mending():
                        await load_into(server, max(versions))
                except SyncError as error:
                    why = str(error)
                    logger.info("%s waits for the next publication: %s", server.url, why)
            until_s = time.monotonic() + wait_s
            while server.stale and time.monotonic() < until_s:
                await asyncio.sleep(LOOK_S)
            wait_s = min(2 * wait_s, MAX_RETRY_S)
            if server.stale and time.monotonic() - began_s > self.start_timeout_s:
                raise EngineError(
                    f"{server.url} got no weights in {self.start_timeout_s:g} s: {why}. With --update-weight-transport "
                    "disk the last version is kept and can be loaded at any time"
                )

    async def _discard(self, member: _Member) -> None:
        """End an engine that did not come back."""
        server = member.server
        if server is not None and server in self.engine.servers:
            self.engine.lose(server, "it did not come back")
            await self.engine.remove(server)
        if member.launched is not None:
            with contextlib.suppress(ProcessLookupError):
                await member.launched.stop(DEAD_S)


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


def _shown(member: _Member) -> str:
    return f"engine {member.index}" if member.launched is None else member.launched.where
