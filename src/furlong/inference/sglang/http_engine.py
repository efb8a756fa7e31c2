"""`HttpEngine`: the Engine port over servers that speak SGLang's HTTP protocol.

A request takes these steps: it waits at the gate, which a pause closes; a server is chosen (`inference.sglang.server_pool`); it
waits for one of the server's slots; it is sent; the answer is checked (`inference.sglang.messages`). If no answer comes,
the server is asked whether it lives: one that does not is not used again in this run, and the request is sent to
another. That is safe because nothing of an answer was taken, and with a `sampling_seed` the second answer is the one
that the first would have been.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from furlong.core.metric import Metrics
from furlong.core.routing import RoutingShape
from furlong.core.weights import WeightSource
from furlong.errors import EngineError, EngineTimeoutError, NoAnswerError, SyncError, UnreachableError
from furlong.inference.sglang.in_flight import GENERATE, Flight, Flights, all_done
from furlong.inference.sglang.messages import (
    AnswerReader,
    TextTokenizer,
    abort_reason,
    body_of,
    cached_tokens,
    prefix_body,
)
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_pool import ServerPool
from furlong.interfaces import Completion, Engine, PauseMode, SamplingParams

logger = logging.getLogger(__name__)

ATTEMPTS = 9  # to get an answer from servers that are alive
BACKOFF_S = 0.1  # before the second attempt; doubles, so that all take 26 s: a router may be started again meanwhile
TELL_S = 5.0  # between two lines about requests that are made again

Load = Callable[[WeightSource, int], Awaitable[dict[str, str]]]


class HttpEngine(Engine):
    """Generate with servers that this process does not run.

    Args:
        servers: Where weights go, and requests too unless there is a `router`.
        router: An sglang-router in front of the servers, which then chooses among them.
        tokenizer: Makes the text where servers answer with token ids only.
        load: Carries weights to the servers for `load_weights` (`LocalSync.load`).
        needs_router: No server answers a request alone: some prefill, others decode.
        gives_up_unanswered: Whether a server that left a weight update unanswered is lost although it passes its health
            check, because a supervisor replaces it.
        is_supervised: A fleet watches the servers: it adds others for those that are lost, or says with `fail` that the run
            cannot go on. Until then requests wait.
        routing: How the model sends tokens to experts, for requests that ask for those.

    Token versions: `furlong serve` reports one for each token. SGLang reports one for the request, as of its end; all
    tokens then get the version that the server had when the request was sent, the oldest that can be true, so that
    staleness is never understated for a request that was held during an update.

    A version that the servers were never given is an error: the server was restarted, or somebody else updates it.
    """

    def __init__(
        self,
        servers: Sequence[SglangServer],
        *,
        router: SglangServer | None = None,
        tokenizer: TextTokenizer | None = None,
        load: Load | None = None,
        is_supervised: bool = False,
        gives_up_unanswered: bool = True,
        needs_router: bool = False,
        routing: RoutingShape | None = None,
    ) -> None:
        self.pool = ServerPool(
            servers,
            router,
            needs_router=needs_router,
            is_supervised=is_supervised,
            gives_up_unanswered=gives_up_unanswered,
        )
        self._reader = AnswerReader(tokenizer, routing)
        self._load = load
        self._flights = Flights(self.pool)
        self._gate = asyncio.Event()
        self._gate.set()
        self._is_held = False
        self._paused: list[SglangServer] = []
        self._num_repeated, self._told_s = 0, -math.inf

    @property
    def servers(self) -> list[SglangServer]:
        """The servers that there are, lost ones too until they are removed."""
        return self.pool.servers

    # -- the port ----------------------------------------------------------------------------------------------

    async def generate(self, prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:
        """Complete `prompt`. Raises EngineError with the server's reason, or naming the servers if none is left."""
        self.pool.check_open()
        started = time.perf_counter()
        with self._flights.one(session, prompt, params) as flight:
            try:
                return await self._answer(flight, started)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                self.pool.check_open()
                assert flight.given_up
                return Completion([], [], [], "abort", latency_s=time.perf_counter() - started)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. New requests wait here until `resume`; what happens to those that were sent is the mode.

        "finish" waits for their answers. "hold" is SGLang's `retract`: they wait in the server, and their cache is
        computed again. "abort" is SGLang's `abort`: they answer with what they have.
        """
        self.pool.check_open()
        if mode not in ("finish", "hold", "abort"):
            raise EngineError(f"pause mode is {mode!r}, wants finish, hold or abort")
        self._gate.clear()
        if mode == "finish":
            await self.pool.idle.wait()  # a request that has to be sent again does so after `resume`
            return
        self._paused = self.pool.alive()
        flights = self._flights.all()
        word = "retract" if mode == "hold" else "abort"
        if mode == "abort":
            for flight in flights:
                flight.is_aborted = True
        await self._tell(self._paused, lambda server: server.pause(word))
        if mode == "abort":
            await self._flights.end(flights)

    async def resume(self) -> None:
        """Go on after `pause`. Raises EngineError if a server refuses."""
        self.pool.check_open()
        paused, self._paused = [server for server in self._paused if not server.lost], []
        await self._tell(paused, lambda server: server.resume())
        self._gate.set()

    async def abort(self, sessions: Collection[str]) -> None:
        """End the requests of these sessions; each answers with what it has, or with nothing if it was not sent."""
        if isinstance(sessions, str):
            raise EngineError(f"abort takes a collection of sessions, got the string {sessions!r}; pass a list")
        self.pool.check_open()
        await self._flights.end(self._flights.of(sessions))

    async def load_weights(self, source: WeightSource, version: int) -> dict[str, str]:
        """Load weights into every server by the transport that the engine was built with."""
        self.pool.check_open()
        if self._load is None:
            raise SyncError("this HttpEngine was built without a way to carry weights; give it LocalSync.load")
        return await self._load(source, version)

    async def close(self) -> None:
        """End running requests with an EngineError and close the connections. The servers go on."""
        self.pool.is_closed = True
        self._gate.set()
        await all_done(self._flights.cancel())
        await self.pool.close()

    # -- memory ------------------------------------------------------------------------------------------------

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Have all servers give back the memory of these tags; one that is lost by then has been ended.

        Raises EngineError while requests run.
        """
        self.pool.check_open()
        if num_running := self.pool.num_sent if self._is_held else len(self._flights):
            raise EngineError(f"{num_running} requests are under way; an engine keeps its memory until they end")
        servers = self.pool.alive()
        await self._tell(servers, lambda server: server.release_memory(tags))
        await self.pool.ended([server for server in servers if server.lost])

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Have all servers take memory for these tags again."""
        self.pool.check_open()
        await self._tell(self.pool.alive(), lambda server: server.resume_memory(tags))

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Send nothing meanwhile; requests wait. Raises SyncError if one is with a server."""
        if num_sent := self.pool.num_sent:
            raise SyncError(f"{num_sent} requests are with other engines, which cannot give their memory away")
        was_open, self._is_held = self._gate.is_set(), True
        self._gate.clear()
        try:
            yield
        finally:
            self._is_held = False
            if was_open:
                self._gate.set()

    # -- servers -----------------------------------------------------------------------------------------------

    async def reachable(self) -> list[SglangServer]:
        """The servers that answer; weights go to these. Raises EngineError if there is none."""
        return await self.pool.reachable()

    async def wait_until_weights_needed(self) -> None:
        """Return when every server was lost and its replacements wait for weights."""
        await self.pool.wait_until_weights_needed()

    @property
    def is_awaited(self) -> bool:
        """Whether a publication waits because no server is left."""
        return self.pool.is_awaited

    async def any_lost(self, servers: Iterable[SglangServer], unanswered: Mapping[str, str] | None = None) -> bool:
        """Whether one of these servers does not answer any more. Those with a URL in `unanswered` are given up."""
        return await self.pool.any_lost(servers, unanswered)

    def take_load(self) -> Metrics:
        """How many requests engines ran since the last call (`ServerPool.take_load`)."""
        return self.pool.take_load()

    def fail(self, error: EngineError) -> None:
        """End every request, and all that come, with this error."""
        if self.pool.failure is not None:
            return
        self.pool.failure = error
        self.pool.announce()
        self._gate.set()
        self._flights.cancel()

    async def _tell(self, servers: Sequence[SglangServer], command: Callable[[SglangServer], Awaitable[None]]) -> None:
        """Give a command to all of these; one that died of something else meanwhile, or hangs, need not obey it.

        Its health checks rest, so that nobody else finds out. One that gives no answer is lost whatever they say, if
        another takes its place: SGLang's answer for a process that does not compute, and whether the command was done
        is not known.
        """

        async def tell(server: SglangServer) -> None:
            try:
                await command(server)
            except NoAnswerError as error:
                if self.pool.is_supervised:
                    what = "hangs" if isinstance(error, EngineTimeoutError) else "gave no answer"
                    self.pool.lose(server, f"{what}: {error}")
                await self.pool.look_at(server, str(error))
                if not server.lost:
                    raise

        await asyncio.gather(*(tell(server) for server in servers))

    # -- one request -------------------------------------------------------------------------------------------

    async def _answer(self, flight: Flight, started: float) -> Completion:
        """Send the request until a server has answered it."""
        body = body_of(flight)
        attempt = 0
        while not flight.is_aborted:
            attempt += 1
            num_lost, body["rid"] = self.pool.num_lost, flight.rid
            flight.call = asyncio.ensure_future(self._send(flight, body))
            try:
                reply = await flight.call
                assert flight.server is not None
                completion = self._reader.completion(
                    flight,
                    reply,
                    newest=self.pool.newest_version(flight.server),
                    seconds=time.perf_counter() - started,
                )
                if completion.finish_reason != "abort" or flight.is_aborted:
                    return completion
                raise UnreachableError(f"{flight.where} aborted a request by itself: {abort_reason(reply)}")
            except UnreachableError as error:
                flight.rid = self._flights.new_rid()  # the one before may be known to an engine
                if await self._is_explained(flight, error, num_lost, is_last=attempt >= ATTEMPTS):
                    attempt = 0
                elif attempt >= ATTEMPTS:
                    whose = self._whose(flight, str(error), body["rid"])
                    raise EngineError(f"no answer after {attempt} attempts; the last: {error}{whose}") from error
                else:
                    self._tell_repeated(attempt + 1, error)
                    await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
        return Completion([], [], [], "abort", latency_s=time.perf_counter() - started)

    def _whose(self, flight: Flight, said: str, rid: str) -> str:
        """Where to look for the reason of a failure behind a router, which names engines only if it misses them."""
        if flight.server is not self.pool.router:
            return ""
        if any(server.url in said for server in self.pool.servers):
            return "; look in the log of that engine"
        engines = ", ".join(server.url for server in self.pool.alive())
        return (
            f". The router says so for itself or for one of its engines; look in its log and in those of {engines}. "
            f"With --router-log-level debug its log names the engine of each request; this one was {rid}"
        )

    def _tell_repeated(self, attempt: int, error: UnreachableError) -> None:
        """Log that a request is made again: at most one line in `TELL_S` seconds, with how many there were."""
        self._num_repeated += 1
        if (now_s := time.monotonic()) < self._told_s + TELL_S:
            return
        logger.warning(
            "requests are made again (%d since this was last said); the last, attempt %d of %d: %s",
            self._num_repeated, attempt, ATTEMPTS, error,
        )  # fmt: skip
        self._num_repeated, self._told_s = 0, now_s

    async def _send(self, flight: Flight, body: dict[str, Any]) -> Any:
        pool = self.pool
        await self._gate.wait()
        pool.check_open()
        usable = await pool.usable()
        await self._gate.wait()
        server = flight.server = pool.choose(usable, flight.prompt, flight.session)
        flight.cached_tokens = None
        server.placed += 1
        headers = None
        if pool.router is not None:
            headers = {"X-SMG-Routing-Key": flight.session or str(flight.key), "X-Request-Id": flight.rid}
        may_lead = pool.caches_late(server)
        try:
            async with (
                server.slots,
                server.turns.turn(flight.key, len(flight.prompt), may_lead=may_lead) as turn,
            ):
                ask = partial(server.ask, GENERATE, timeout_s=server.timeout_s, headers=headers, on_sent=turn.pass_on)
                await self._until_open(server)
                if turn.leads:
                    with pool.asked(server):
                        flight.cached_tokens = cached_tokens(await ask(prefix_body(body)))
                    turn.let_follow()
                    await self._until_open(server)
                flight.is_sent, flight.version = True, pool.oldest_version(server)
                try:
                    with pool.asked(server):
                        return await ask(body)
                finally:
                    flight.is_sent = False
        finally:
            server.placed -= 1

    async def _until_open(self, server: SglangServer) -> None:
        """Wait while generation is paused. Raises what is in the way of every request, or of one to this server."""
        await self._gate.wait()
        self.pool.check_open()
        if server.lost:
            raise UnreachableError(f"{server.url} was lost before the request was sent: {server.lost}")

    async def _is_explained(self, flight: Flight, error: UnreachableError, num_lost: int, *, is_last: bool) -> bool:
        """Whether a request failed because a server was lost since it was sent, so that it goes to another at once.

        After the last attempt servers that live are asked for a token, too.
        """
        server, pool = flight.server, self.pool
        assert server is not None
        suspects = pool.alive() if server is pool.router else [server]
        await asyncio.gather(*(pool.look_at(suspect, str(error)) for suspect in suspects))
        was_lost = server.lost or (server is pool.router and pool.num_lost > num_lost)
        if not was_lost and not (is_last and await pool.examine(server)):
            return False
        await pool.usable()  # raises if this was the last one
        logger.debug("request %s is sent again, to another engine: %s", flight.rid, error)
        if server is pool.router:
            await asyncio.sleep(BACKOFF_S)  # it may not know yet
        return True
