"""`HttpEngine`: the Engine port over servers that speak SGLang's HTTP protocol.

A request takes these steps: it waits at the gate, which a pause closes; a server is chosen (`engines.router`); it waits
for one of the server's slots; it is sent; the answer is checked. If no answer comes, the server is asked whether it
lives: one that does not is not used again in this run, and the request is sent to another. That is safe because nothing
of an answer was taken, and with a `sampling_seed` the second answer is the one that the first would have been.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from furlong.core.metric import Metrics, maximum, mean
from furlong.core.routing import Routes, RoutingShape, routes_from_text
from furlong.core.weights import WeightSource
from furlong.engines.router import Placement
from furlong.engines.sglang_server import UNKNOWN_VERSION, SglangServer, UnreachableError
from furlong.errors import DataError, EngineError, SyncError
from furlong.ports import Completion, PauseMode, SamplingParams

logger = logging.getLogger(__name__)

ATTEMPTS = 6  # to get an answer from servers that are alive
BACKOFF_S = 0.1  # before the second attempt; doubles
ABORT_S = 5.0  # for a server to answer requests that were aborted; then they end here with nothing
GENERATE = "/generate"

Load = Callable[[WeightSource, int], Awaitable[dict[str, str]]]


class TextTokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`."""
        ...


@dataclass(eq=False)
class _Flight:
    """A request on its way. `given_up` is set when it was aborted and its server did not answer."""

    rid: str
    session: str | None
    prompt: list[int]
    params: SamplingParams
    server: SglangServer | None = None
    call: asyncio.Task[Any] | None = None
    version: int | None = None
    is_sent: bool = False
    is_aborted: bool = False
    given_up: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


class HttpEngine:
    """Generate with servers that this process does not run.

    Args:
        servers: Where weights go, and requests too unless there is a `router`.
        router: An sglang-router in front of the servers, which then chooses among them.
        tokenizer: Makes the text where servers answer with token ids only.
        load: Carries weights to the servers for `load_weights` (`LocalSync.load`).
        needs_router: No server answers a request alone: some prefill, others decode.
        is_kept: A fleet watches the servers: it adds others for those that are lost, or says with `fail` that the run
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
        is_kept: bool = False,
        needs_router: bool = False,
        routing: RoutingShape | None = None,
    ) -> None:
        self.servers = list(servers)
        self._router, self._tokenizer, self._load = router, tokenizer, load
        self._is_kept, self._needs_router, self._routing = is_kept, needs_router, routing
        self._placement = Placement()
        self._changed = asyncio.Event()  # servers, or `_failure`
        self._num_lost = 0
        self._failure: EngineError | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._is_held = False
        self._num_awaiting = 0
        self._paused: list[SglangServer] = []
        self._flights: set[_Flight] = set()
        self._num_sent = 0
        self._counted_s, self._busy_s = time.monotonic(), 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._run, self._counter = uuid.uuid4().hex[:12], itertools.count()
        self._closed = False

    # -- the port ----------------------------------------------------------------------------------------------

    async def generate(self, prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:
        """Complete `prompt`. Raises EngineError with the server's reason, or naming the servers if none is left."""
        self._check_open()
        started = time.perf_counter()
        flight = _Flight(f"furlong-{self._run}-{next(self._counter)}", session, prompt, params)
        self._flights.add(flight)
        try:
            return await self._answer(flight, started)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._check_open()
            assert flight.given_up
            return Completion([], [], [], "abort", latency_s=time.perf_counter() - started)
        finally:
            self._flights.discard(flight)
            flight.done.set()

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. New requests wait here until `resume`; what happens to those that were sent is the mode.

        "finish" waits for their answers. "hold" is SGLang's `retract`: they wait in the server, and their cache is
        computed again. "abort" is SGLang's `abort`: they answer with what they have.
        """
        self._check_open()
        if mode not in ("finish", "hold", "abort"):
            raise EngineError(f"pause mode is {mode!r}, wants finish, hold or abort")
        self._gate.clear()
        if mode == "finish":
            await self._idle.wait()  # a request that has to be sent again does so after `resume`
            return
        self._paused = self._alive()
        flights = list(self._flights)
        word = "retract" if mode == "hold" else "abort"
        if mode == "abort":
            for flight in flights:
                flight.is_aborted = True
        await asyncio.gather(*(self._tell(server, server.pause(word)) for server in self._paused))
        if mode == "abort":
            await self._end(flights)

    async def resume(self) -> None:
        """Go on after `pause`. Raises EngineError if a server refuses."""
        self._check_open()
        paused, self._paused = [server for server in self._paused if not server.lost], []
        await asyncio.gather(*(self._tell(server, server.resume()) for server in paused))
        self._gate.set()

    async def _tell(self, server: SglangServer, command: Awaitable[None]) -> None:
        """Await a command to a server; one that died of something else meanwhile need not obey it."""
        try:
            await command
        except UnreachableError as error:
            await self._look_at(server, str(error))
            if not server.lost:
                raise

    async def abort(self, sessions: Collection[str]) -> None:
        """End the requests of these sessions; each answers with what it has, or with nothing if it was not sent."""
        if isinstance(sessions, str):
            raise EngineError(f"abort takes a collection of sessions, got the string {sessions!r}; pass a list")
        self._check_open()
        wanted = frozenset(sessions)
        await self._end([flight for flight in self._flights if flight.session in wanted])

    async def load_weights(self, source: WeightSource, version: int) -> dict[str, str]:
        """Load weights into every server by the transport that the engine was built with."""
        self._check_open()
        if self._load is None:
            raise SyncError("this HttpEngine was built without a way to carry weights; give it LocalSync.load")
        return await self._load(source, version)

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Have all servers give back the memory of these tags. Raises EngineError while requests run."""
        self._check_open()
        if num_running := self._num_sent if self._is_held else len(self._flights):
            raise EngineError(f"{num_running} requests are under way; an engine keeps its memory until they end")
        await asyncio.gather(*(self._tell(server, server.release_memory(tags)) for server in self._alive()))

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Have all servers take memory for these tags again."""
        self._check_open()
        await asyncio.gather(*(self._tell(server, server.resume_memory(tags)) for server in self._alive()))

    @property
    def is_awaited(self) -> bool:
        """Whether a publication waits because no server is left."""
        return self._num_awaiting > 0

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Send nothing meanwhile; requests wait. Raises SyncError if one is with a server."""
        if self._num_sent:
            raise SyncError(f"{self._num_sent} requests are with other engines, which cannot give their memory away")
        was_open, self._is_held = self._gate.is_set(), True
        self._gate.clear()
        try:
            yield
        finally:
            self._is_held = False
            if was_open:
                self._gate.set()

    async def close(self) -> None:
        """End running requests with an EngineError and close the connections. The servers go on."""
        self._closed = True
        flights = list(self._flights)
        self._gate.set()
        for flight in flights:
            if flight.call is not None and not flight.given_up:
                flight.call.cancel()
        await _all_done(flights)
        for server in [*self.servers, *([self._router] if self._router else [])]:
            await server.close()

    # -- servers that come and go ------------------------------------------------------------------------------

    def use_router(self, router: SglangServer) -> None:
        """Send requests through this router from now on."""
        self._router = router
        self._changed.set()

    async def leave_router(self, why: str) -> None:
        """Send requests to the servers directly from now on, also those that the router had: it is gone.

        Where they need a router they wait for the next one.
        """
        router, self._router = self._router, None
        if router is not None:
            router.lost = why
            await router.close()

    def add(self, server: SglangServer) -> None:
        """Use one more server: for weights at once, for requests if it is not `stale`."""
        self.servers.append(server)
        self._changed.set()

    def announce(self) -> None:
        """Look again for usable servers: one has its weights now."""
        self._changed.set()

    async def remove(self, server: SglangServer) -> None:
        """Forget a server that is lost."""
        self.servers.remove(server)
        await server.close()

    def lose(self, server: SglangServer, why: str) -> None:
        """Do not use a server any more; requests that it does not answer go to others."""
        if server.lost:
            return
        server.lost = why
        self._num_lost += 1
        logger.error(
            "engine %s is lost (%s); its requests go to the %d of %d that are left",
            server.url, why, len(self._alive()), len(self.servers),
        )  # fmt: skip

    def fail(self, error: EngineError) -> None:
        """End every request, and all that come, with this error."""
        if self._failure is not None:
            return
        self._failure = error
        self._changed.set()
        self._gate.set()
        for flight in self._flights:
            if flight.call is not None and not flight.given_up:
                flight.call.cancel()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise EngineError("the engine's connections are closed; build a new one")

    def _alive(self) -> list[SglangServer]:
        return [server for server in self.servers if not server.lost]

    async def _wait_for(self, find: Callable[[], list[SglangServer]]) -> list[SglangServer]:
        """The servers that `find` finds, as soon as there is one. Raises EngineError if none will come."""
        while not (found := find()):
            if not self._is_kept:
                reasons = "; ".join(f"{server.url} ({server.lost or server.stale})" for server in self.servers)
                raise EngineError(f"no engine is left: {reasons}. Start them again and resume the run with --load")
            self._changed.clear()
            await self._changed.wait()
            self._check_open()
        return found

    async def _usable(self) -> list[SglangServer]:
        def find() -> list[SglangServer]:
            is_waiting = self._needs_router and self._router is None
            return [] if is_waiting else [server for server in self.servers if server.is_usable]

        return await self._wait_for(find)

    # -- one request -------------------------------------------------------------------------------------------

    async def _answer(self, flight: _Flight, started: float) -> Completion:
        """Send the request until a server has answered it."""
        body: dict[str, Any] = {
            "input_ids": flight.prompt,
            "sampling_params": sampling_json(flight.params),
            "return_logprob": True,
            "stream": False,
        }
        if flight.params.return_routed_experts:
            body["return_routed_experts"] = True
        attempt = 0
        while not flight.is_aborted:
            attempt += 1
            num_lost, body["rid"] = self._num_lost, flight.rid
            flight.call = asyncio.ensure_future(self._send(flight, body))
            try:
                reply = await flight.call
                completion = self._completion(flight, reply, time.perf_counter() - started)
                if completion.finish_reason != "abort" or flight.is_aborted:
                    return completion
                raise UnreachableError(f"{self._name(flight)} aborted a request by itself: {_why(reply)}")
            except UnreachableError as error:
                flight.rid = f"furlong-{self._run}-{next(self._counter)}"  # the one before may be known to an engine
                if await self._is_explained(flight, error, num_lost):
                    attempt = 0
                elif attempt >= ATTEMPTS:
                    raise EngineError(f"no answer after {attempt} attempts; the last: {error}") from error
                else:
                    logger.warning(
                        "request %s is sent again, attempt %d of %d: %s", flight.rid, attempt + 1, ATTEMPTS, error
                    )
                    await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
        return Completion([], [], [], "abort", latency_s=time.perf_counter() - started)

    async def _send(self, flight: _Flight, body: dict[str, Any]) -> Any:
        await self._gate.wait()
        self._check_open()
        usable = await self._usable()
        await self._gate.wait()
        server = self._router or self._placement.choose(usable, flight.prompt, flight.session)
        flight.server = server
        server.placed += 1
        try:
            async with server.slots:
                await self._gate.wait()
                self._check_open()
                if server.lost:
                    raise UnreachableError(f"{server.url} was lost before the request was sent: {server.lost}")
                headers = None
                if self._router is not None:
                    headers = {"X-SMG-Routing-Key": flight.session or str(hash(tuple(flight.prompt)))}
                flight.is_sent, flight.version = True, self._oldest_version(server)
                self._count_load()
                server.running += 1
                self._num_sent += 1
                self._idle.clear()
                try:
                    return await server.ask(GENERATE, body, timeout_s=server.timeout_s, headers=headers)
                finally:
                    flight.is_sent = False
                    self._count_load()
                    server.running -= 1
                    self._num_sent -= 1
                    if not self._num_sent:
                        self._idle.set()
        finally:
            server.placed -= 1

    async def _is_explained(self, flight: _Flight, error: UnreachableError, num_lost: int) -> bool:
        """Whether a request failed because a server was lost since it was sent, so that it goes to another at once."""
        server = flight.server
        assert server is not None
        suspects = self._alive() if server is self._router else [server]
        await asyncio.gather(*(self._look_at(suspect, str(error)) for suspect in suspects))
        if not (server.lost or (server is self._router and self._num_lost > num_lost)):
            return False
        await self._usable()  # raises if this was the last one
        logger.debug("request %s is sent again, to another engine: %s", flight.rid, error)
        if server is self._router:
            await asyncio.sleep(BACKOFF_S)  # it may not know yet
        return True

    async def _look_at(self, server: SglangServer, why: str) -> None:
        """Take a server out of use if it does not answer its health check."""
        now_s = time.monotonic()  # requests that fail together look once
        async with server.looking:
            if not server.lost and not await server.is_alive(since_s=now_s):
                self.lose(server, f"does not answer: {why}")

    async def reachable(self) -> list[SglangServer]:
        """The servers that answer; weights go to these. Raises EngineError if there is none."""
        self._check_open()
        await asyncio.gather(*(self._look_at(server, "before a weight update") for server in self._alive()))
        self._num_awaiting += 1
        try:
            return await self._wait_for(self._alive)
        finally:
            self._num_awaiting -= 1

    def _count_load(self) -> None:
        """Add the time since the last change to what each server has run; called before each change."""
        now_s = time.monotonic()
        seconds, self._counted_s = now_s - self._counted_s, now_s
        if self._num_sent:
            self._busy_s += seconds
            for server in self.servers:
                server.load_s += server.running * seconds

    def take_load(self) -> Metrics:
        """Requests that the busiest engine, and that an engine on average, ran while any ran since the last call.

        Nothing where a router hides which engine has which request.
        """
        self._count_load()
        busy_s, self._busy_s = self._busy_s, 0.0
        loads = [server.load_s for server in self.servers if not server.lost]
        for server in self.servers:
            server.load_s = 0.0
        if not busy_s or not loads or self._router is not None:
            return {}
        return {
            "engine/requests/max": maximum(max(loads) / busy_s),
            "engine/requests/mean": mean(sum(loads) / len(loads) / busy_s),
        }

    async def any_lost(self, servers: Iterable[SglangServer]) -> bool:
        """Whether one of these servers does not answer any more."""
        found = list(servers)
        await asyncio.gather(*(self._look_at(server, "after a weight update") for server in found))
        return any(server.lost for server in found)

    def _completion(self, flight: _Flight, reply: Any, seconds: float) -> Completion:
        """Check and translate an answer. Raises EngineError for one that cannot be trained on."""
        try:
            meta = reply["meta_info"]
            rows = meta.get("output_token_logprobs") or []
            tokens, log_probs = [int(row[1]) for row in rows], [row[0] for row in rows]
            reason = meta["finish_reason"]["type"]
            label = str(meta["weight_version"])
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise EngineError(
                f"{self._name(flight)} answered without {error}; furlong speaks the protocol of SGLang 0.5.16"
            ) from error
        given = reply.get("output_ids")
        if given is not None and list(given) != tokens:
            raise EngineError(
                f"{self._name(flight)} answered {len(given)} tokens with log-probs of {len(tokens)} others; "
                "they must be the same"
            )
        if reason not in ("stop", "length", "abort"):
            raise EngineError(f"{self._name(flight)} answered with finish_reason {reason!r}")
        if not all(isinstance(value, float | int) and math.isfinite(value) for value in log_probs):
            raise EngineError(
                f"{self._name(flight)} answered a log-prob that is no finite number; its weights are broken"
            )
        self._check_version(flight, label)
        text = reply.get("text") or ""
        if not text and self._tokenizer is not None:
            text = self._tokenizer.decode(tokens, skip_special_tokens=flight.params.skip_special_tokens)
        return Completion(
            tokens=tokens,
            log_probs=log_probs,
            versions=_versions(flight, meta, label, len(tokens)),
            finish_reason=reason,
            text=text,
            cached_tokens=int(meta.get("cached_tokens") or 0),
            latency_s=seconds,
            routed_experts=self._routes(flight, meta, len(tokens), is_aborted=reason == "abort")
            if flight.params.return_routed_experts
            else None,
        )

    def _routes(self, flight: _Flight, meta: dict[str, Any], num_tokens: int, *, is_aborted: bool) -> Routes | None:
        """Read where the tokens went. Raises EngineError if the server does not say, or not for all of them.

        A request that was aborted may know less; what continues it tells the rest.
        """
        name, text = self._name(flight), meta.get("routed_experts")
        if self._routing is None:
            raise EngineError("routed experts were asked for, but this client was not told the model's routing")
        if text is None:
            if is_aborted:
                return None
            raise EngineError(
                f"{name} answered without routed_experts; start the server with --enable-return-routed-experts. A "
                "router in front of it must hand that field on"
            )
        try:
            routes = routes_from_text(text, self._routing, name)
        except DataError as error:
            raise EngineError(str(error)) from error
        wanted = len(flight.prompt) + num_tokens - 1
        if len(routes) != wanted and not (is_aborted and len(routes) < wanted):
            raise EngineError(
                f"{name} answered routed experts of {len(routes)} tokens for {len(flight.prompt)} + {num_tokens} "
                f"tokens; all but the last have some, {wanted}"
            )
        return routes

    def _oldest_version(self, server: SglangServer) -> int | None:
        """The version that a request sent now meets: behind a router, the oldest of any server."""
        versions = [s.version for s in (self.servers if server is self._router else [server]) if s.is_usable]
        return None if None in versions or not versions else min(v for v in versions if v is not None)

    def _check_version(self, flight: _Flight, label: str) -> None:
        server = flight.server
        assert server is not None
        newest = [s.version for s in (self.servers if server is self._router else [server]) if s.version is not None]
        if flight.version is None or not newest:
            return
        number = _number(label)
        if not flight.version <= number <= max(newest):
            raise EngineError(
                f"{server.url} answered with weight version {label!r}, but it was given {flight.version} .. "
                f"{max(newest)}: it was restarted, or somebody else updates it; nothing of this answer is used"
            )

    def _name(self, flight: _Flight) -> str:
        assert flight.server is not None
        return f"POST {flight.server.url}{GENERATE}"

    # -- ending requests early ---------------------------------------------------------------------------------

    async def _end(self, flights: Iterable[_Flight]) -> None:
        """Abort requests and wait until they have answered; what is not answered in time ends with nothing.

        An abort may overtake its request on the way to the server, so it is repeated until the request is done.
        """
        left = [flight for flight in flights if not flight.done.is_set()]
        deadline, pause_s = time.monotonic() + ABORT_S, 0.001
        while left:
            for flight in left:
                flight.is_aborted = True
                if not flight.is_sent or time.monotonic() > deadline:
                    self._give_up(flight)
            sent = [flight for flight in left if flight.is_sent and not flight.given_up]
            await asyncio.gather(*(self._abort_one(flight) for flight in sent))
            await _all_done([flight for flight in left if flight.given_up])
            left = [flight for flight in left if not flight.done.is_set()]
            if left:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.2)

    def _give_up(self, flight: _Flight) -> None:
        if flight.given_up:
            return  # a second cancellation would interrupt the closing of its connection
        flight.given_up = True
        if flight.is_sent:
            logger.warning("request %s was aborted, but its engine did not answer in %g s", flight.rid, ABORT_S)
        if flight.call is not None:
            flight.call.cancel()

    async def _abort_one(self, flight: _Flight) -> None:
        """Tell the server that has the request, or all of them behind a router."""
        server = flight.server
        targets = self._alive() if server is self._router or server is None else [server]
        for target in targets:
            try:
                await target.command("/abort_request", rid=flight.rid, timeout_s=ABORT_S)
            except EngineError as error:
                logger.warning("an abort was not done: %s", error)  # the request is given up below, or fails by itself


def sampling_json(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as SGLang names them."""
    values: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "min_new_tokens": params.min_new_tokens,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
        "no_stop_trim": params.no_stop_trim,
    }
    if params.stop:
        values["stop"] = list(params.stop)
    if params.stop_token_ids:
        values["stop_token_ids"] = list(params.stop_token_ids)
    if params.sampling_seed is not None:
        values["sampling_seed"] = params.sampling_seed
    return values


def _number(label: str) -> int:
    """The version that a label names; labels that are no numbers are of weights that nobody published."""
    return int(label) if label.isdigit() else UNKNOWN_VERSION


def _versions(flight: _Flight, meta: dict[str, Any], label: str, count: int) -> list[int]:
    per_token = meta.get("token_versions")
    if per_token is not None and len(per_token) == count:
        return [int(version) for version in per_token]
    return [_number(label) if flight.version is None else flight.version] * count


def _why(reply: Any) -> str:
    return str(reply["meta_info"]["finish_reason"].get("message", "no reason given"))


async def _all_done(flights: Iterable[_Flight]) -> None:
    for flight in flights:
        await flight.done.wait()
