"""`HttpEngine`: the Engine interface over servers that speak SGLang's HTTP protocol.

A request waits while generation is paused; a server is chosen (`pool`); the request waits for one of the server's slots
and for its turn (`request_queue`); it is sent (`server`); its answer is converted (`answers`). If no answer comes, the
server's health is checked: a server that fails the check is not used again, and the request is sent to another one.
That is safe because nothing of an answer was used, and with a `sampling_seed` the second answer equals the one that was
lost.
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
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from furlong.core.metric import Metrics
from furlong.core.routing import RoutingShape
from furlong.core.token_stream import TextTokenizer, TokenStream
from furlong.core.weights import WeightSource
from furlong.errors import (
    ENGINE_HANGS,
    ENGINE_UNANSWERED,
    EngineError,
    EngineTimeoutError,
    Loss,
    NoAnswerError,
    SyncError,
    UnreachableError,
)
from furlong.inference.sglang.answers import (
    AnswerReader,
    EventReader,
    abort_reason,
    cached_tokens,
    reading,
    streamed_tokens,
)
from furlong.inference.sglang.pool import ServerPool
from furlong.inference.sglang.server import GENERATE, SglangServer
from furlong.interfaces import Completion, Engine, PauseMode, SamplingParams, TokenScores

logger = logging.getLogger(__name__)

ATTEMPTS = 9  # for a request to servers that are alive
BACKOFF_S = 0.1  # before the second attempt; doubles, 26 s in all, in which a router can be restarted
RETRY_LOG_S = 5.0  # between two log lines about retries
EXTRA_TOP = 2  # most likely tokens to ask for, by the number of ids per position
WINDOW_IDS = 4  # ids in a window, by the number of ids per position
ABORT_S = 5.0  # for a server to answer aborted requests; after that they return without tokens


@dataclass(eq=False)
class InFlightRequest:
    """One request of `HttpEngine.generate`, over all attempts.

    is_abandoned: It was aborted and its server did not answer in time.
    version: Weight version of the server when the request was sent.
    prefilled: Prompt tokens that were cached before its own prompt was computed ahead; None if it was not.
    num_scored: Tokens at the end of the prompt whose log-probs are asked for, instead of a completion; with those of
        the `num_top` most likely tokens, and of `asked_ids`, at each of their positions.
    stream: Receives tokens as they are sampled.
    """

    rid: str
    session: str | None
    prompt: list[int]
    params: SamplingParams
    stream: TokenStream | None = None
    num_scored: int = 0
    num_top: int = 0
    asked_ids: Sequence[int] = ()
    server: SglangServer | None = None
    call: asyncio.Task[Any] | None = None
    version: int | None = None
    prefilled: int | None = None
    is_sent: bool = False
    is_aborted: bool = False
    is_abandoned: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @cached_property
    def key(self) -> int:
        """Equal for requests with the same prompt."""
        return hash(tuple(self.prompt))

    @property
    def where(self) -> str:
        """Method and URL, for messages."""
        assert self.server is not None
        return f"POST {self.server.url}{GENERATE}"

    def body(self) -> dict[str, Any]:
        """The body without its `rid`, which changes with each attempt."""
        body: dict[str, Any] = {
            "input_ids": self.prompt,
            "sampling_params": sampling_json(self.params),
            "return_logprob": True,
            "stream": self.stream is not None,
        }
        if self.params.return_routed_experts:
            body["return_routed_experts"] = True
        if self.num_scored:
            body["logprob_start_len"] = len(self.prompt) - self.num_scored - 1  # the first log-prob is None
        if self.num_top:
            body["top_logprobs_num"] = self.num_top
        if self.asked_ids:
            body["token_ids_logprob"] = list(self.asked_ids)
        return body

    def abandon(self) -> None:
        """Stop waiting for its answer; once, because a second cancellation interrupts the closing of its connection."""
        if not self.is_abandoned:
            self.is_abandoned = True
            if self.call is not None:
                self.call.cancel()


def sampling_json(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters under SGLang's names; absent ones are None or empty."""
    values = {name: value for name, value in asdict(params).items() if value is not None and value != ()}
    for name in ("return_routed_experts", "prefix_key"):
        values.pop(name, None)
    return values


def _windows(
    ids_RK: NDArray[np.int32], is_missing_RK: NDArray[np.bool_], most: int
) -> Generator[tuple[int, int, list[int]]]:
    """Yield ranges of positions with their missing ids in ascending order, at most `most` unless one has more."""
    start, end, ids = 0, 0, set[int]()
    for row in np.flatnonzero(is_missing_RK.any(1)).tolist():
        new: set[int] = set(ids_RK[row][is_missing_RK[row]].tolist())
        if ids and len(ids | new) > most:
            yield start, end, sorted(ids)
            ids = set[int]()
        start, end = (start if ids else row), row + 1
        ids |= new
    if ids:
        yield start, end, sorted(ids)


class HttpEngine(Engine):
    """Generate with servers in other processes.

    Args:
        servers: Receive weights, and requests too unless there is a `router`.
        router: An sglang-router in front of the servers that chooses among them.
        tokenizer: Decodes the text where servers return token ids only.
        is_supervised: An `EngineSupervisor` replaces lost servers, or calls `fail` when the run cannot continue.
            Requests wait until then.
        gives_up_unanswered: Whether a server that left a weight update unanswered is lost although it passes its
            health check, because the supervisor replaces it.
        needs_router: No server can answer a request alone: some prefill, others decode.
        routing: Expert routing of the model, for requests that return routed experts.

    Token versions: `furlong serve` reports the weight version of each token. SGLang reports one for the request, as of
    its end. All tokens then get the version that the server had when the request was sent, the oldest possible one, so
    that staleness is never understated for a request that was held during an update.

    A version that the servers were never given is an error: the server was restarted, or another program updates it.
    """

    def __init__(
        self,
        servers: Sequence[SglangServer],
        *,
        router: SglangServer | None = None,
        tokenizer: TextTokenizer | None = None,
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
        self._in_flight: set[InFlightRequest] = set()
        self._run, self._counter = uuid.uuid4().hex[:12], itertools.count()
        self._gate = asyncio.Event()  # cleared while generation is paused
        self._gate.set()
        self._is_held = False
        self._paused: list[SglangServer] = []
        self._num_retries, self._logged_s = 0, -math.inf
        self._holds = False  # requests were held in an update

    @property
    def servers(self) -> list[SglangServer]:
        """All servers, including lost ones that were not removed yet."""
        return self.pool.servers

    @property
    def caches_prefixes(self) -> bool:
        """Whether all servers are SGLang's with their prefix cache."""
        return all(server.info.has_prefix_cache and not server.info.is_furlong for server in self.servers)

    @property
    def scored_temperatures(self) -> tuple[float, ...] | None:
        """Those of SGLang's log-probs of prompts, which have no temperature; greedy is like 1. None for our servers."""
        return None if all(server.info.is_furlong for server in self.servers) else (0.0, 1.0)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all servers, or of processes on CPUs."""
        return sum(server.info.num_gpus for server in self.servers)

    # -- the Engine interface ----------------------------------------------------------------------------------

    async def generate(self, prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:
        """Complete `prompt`. Raises EngineError with the server's reason, or naming all servers if none is left."""
        if params.json_schema is not None and self.scored_temperatures is not None:
            return await self._within_schema(prompt, params, session)
        return await self._tracked(prompt, params, session, None)

    async def stream(
        self, prompt: list[int], params: SamplingParams, tokens: TokenStream, *, session: str | None = None
    ) -> Completion:
        """`generate`, and put the tokens into `tokens` as they arrive."""
        if params.json_schema is not None and self.scored_temperatures is not None:
            return await super().stream(prompt, params, tokens, session=session)
        return await self._tracked(prompt, params, session, tokens)

    async def _within_schema(self, prompt: list[int], params: SamplingParams, session: str | None) -> Completion:
        """Sample within a schema, and ask for the log-probs again: SGLang's are of the constrained distribution.

        A completion that is aborted is returned without tokens: an engine cannot continue in the middle of a schema.
        """
        lengths = [server.info.context_len for server in self.servers if server.info.context_len]
        room = min(lengths, default=len(prompt) + params.max_new_tokens + 1) - len(prompt) - 1  # what can be scored
        params = replace(params, max_new_tokens=max(1, min(params.max_new_tokens, room)))
        free = SamplingParams(max_new_tokens=0, temperature=params.temperature)
        while True:
            done = await self._tracked(prompt, params, session, None)
            if done.finish_reason != "abort":
                whole = [*prompt, *done.tokens]
                scored = await self._tracked(whole, free, session, None, num_scored=len(done.tokens))
                if scored.versions == done.versions:
                    return replace(done, log_probs=scored.log_probs)
                if scored.finish_reason != "abort":  # by other weights, after an update
                    continue
            return replace(done, tokens=[], log_probs=[], versions=[], text="", finish_reason="abort")

    async def _tracked(
        self,
        prompt: list[int],
        params: SamplingParams,
        session: str | None,
        stream: TokenStream | None,
        *,
        num_scored: int = 0,
        num_top: int = 0,
        asked_ids: Sequence[int] = (),
    ) -> Completion:
        self.pool.check_open()
        started = time.perf_counter()
        request = InFlightRequest(self._new_rid(), session, prompt, params, stream, num_scored, num_top, asked_ids)
        self._in_flight.add(request)
        aborts: list[asyncio.Task[None]] = []
        if stream is not None:
            stream.set_abort(lambda: aborts.append(asyncio.create_task(self._abort([request]))))
        try:
            completion = await self._answer(request, started)
            if stream is not None:
                stream.put(0, completion.tokens, completion.log_probs)
            return completion
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self.pool.check_open()
            assert request.is_abandoned
            return Completion([], [], [], "abort", latency_s=time.perf_counter() - started)
        finally:
            if stream is not None:
                stream.set_abort(None)
            self._in_flight.discard(request)
            if request.call is not None:
                request.call.cancel()  # of a coroutine that was closed, not cancelled
            request.done.set()

    async def score(
        self,
        tokens: Sequence[int],
        num_scored: int,
        *,
        temperature: float = 1.0,
        num_top: int = 0,
        ids_RK: NDArray[np.int32] | None = None,
    ) -> TokenScores:
        """Return log-probs of given tokens; SGLang's have temperature 1 (`scored_temperatures`).

        SGLang returns the log-probs of one list of ids at all positions of a request, so asking for those of each
        position would return R times as many as needed. Most of them are among the most likely tokens of the server,
        `EXTRA_TOP` times as many as there are ids, which one request returns. The others are asked for in windows of
        positions, as requests whose prompt is in the server's prefix cache.
        """
        if not 0 < num_scored < len(tokens):
            raise EngineError(f"{num_scored} of {len(tokens)} tokens cannot be scored; the first has no log-prob")
        params = SamplingParams(max_new_tokens=0, temperature=temperature)
        if ids_RK is None or not ids_RK.size:
            scores = await self._scored(tokens, params, num_scored, num_top)
            return replace(scores, asked_RK=np.zeros((num_scored, 0), np.float32))
        wide = max(num_top, EXTRA_TOP * ids_RK.shape[1])
        scores = await self._scored(tokens, params, num_scored, wide)
        is_same_RKT = ids_RK[:, :, None] == scores.top_ids_RK[:, None, :]
        asked_RK = np.take_along_axis(scores.top_log_probs_RK, is_same_RKT.argmax(-1), 1)
        is_missing_RK = ~is_same_RKT.any(-1)
        first, most = len(tokens) - num_scored, WINDOW_IDS * ids_RK.shape[1]

        async def fill(start: int, end: int, ids: list[int]) -> None:
            known = await self._scored(tokens[: first + end], params, end - start, 0, ids)
            places = np.searchsorted(ids, ids_RK[start:end]).clip(max=len(ids) - 1)
            found = np.take_along_axis(known.asked_RK, places, 1)
            asked_RK[start:end] = np.where(is_missing_RK[start:end], found, asked_RK[start:end])

        await asyncio.gather(*(fill(*window) for window in _windows(ids_RK, is_missing_RK, most)))
        return TokenScores(
            scores.log_probs_R, scores.top_ids_RK[:, :num_top], scores.top_log_probs_RK[:, :num_top], asked_RK
        )

    async def _scored(
        self, tokens: Sequence[int], params: SamplingParams, num_scored: int, num_top: int, ids: Sequence[int] = ()
    ) -> TokenScores:
        while True:  # an update may abort it
            done = await self._tracked(
                list(tokens), params, None, None, num_scored=num_scored, num_top=num_top, asked_ids=ids
            )
            if done.scores is not None and len(done.tokens) == num_scored:
                return done.scores

    def _new_rid(self) -> str:
        return f"furlong-{self._run}-{next(self._counter)}."  # SGLang aborts all whose id begins with that of an abort

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. New requests wait for `resume`; `mode` decides about those that were sent.

        "finish" waits for their answers. "hold" is SGLang's `retract`: they wait in the server, which recomputes their
        KV cache. "abort" is SGLang's `abort`: they return the tokens they have.
        """
        self.pool.check_open()
        if mode not in ("finish", "hold", "abort"):
            raise EngineError(f"pause mode is {mode!r}; use finish, hold or abort")
        self._gate.clear()
        if mode == "finish":
            await self.pool.idle.wait()  # a request that must be sent again waits for `resume`
            return
        self._paused = self.pool.alive()
        requests = list(self._in_flight)
        sglang_mode = "retract" if mode == "hold" else "abort"
        self._holds = self._holds or mode == "hold"
        if mode == "abort":
            for request in requests:
                request.is_aborted = True
        await self._command_all(self._paused, lambda server: server.pause(sglang_mode))
        if mode == "abort":
            await self._abort(requests)

    async def resume(self) -> None:
        """Generate again after `pause`. Raises EngineError if a server refuses."""
        self.pool.check_open()
        paused, self._paused = [server for server in self._paused if not server.lost], []
        await self._command_all(paused, lambda server: server.resume())
        self._gate.set()

    async def abort(self, sessions: Collection[str]) -> None:
        """Abort the requests of these sessions; each returns the tokens it has, none if it was not sent."""
        if isinstance(sessions, str):
            raise EngineError(f"abort expects a collection of sessions, got the string {sessions!r}; pass a list")
        self.pool.check_open()
        names = frozenset(sessions)
        await self._abort([request for request in self._in_flight if request.session in names])

    async def load_weights(self, source: WeightSource, version: int) -> dict[str, str]:  # noqa: ARG002
        """Raise SyncError: servers get their weights from a weight transport (`weight_sync.remote_sync`)."""
        raise SyncError("an HttpEngine does not load weights itself; send them with LocalSync or RemoteSync")

    async def wait_until_weights_needed(self) -> None:
        """Return when every server was lost and its replacements wait for weights."""
        await self.pool.wait_until_weights_needed()

    async def close(self) -> None:
        """Fail running requests with EngineError and close the connections. The servers keep running."""
        self.pool.is_closed = True
        self.pool.notify_change()
        self._gate.set()
        for request in self._cancel_all():
            await request.done.wait()
        await self.pool.close()

    # -- device memory -----------------------------------------------------------------------------------------

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Have all servers release the memory of these tags; a server lost meanwhile has been stopped on return.

        Raises EngineError while requests run.
        """
        self.pool.check_open()
        if num_running := self.pool.num_sent if self._is_held else len(self._in_flight):
            raise EngineError(f"{num_running} requests are in flight; engines release memory only when idle")
        servers = self.pool.alive()
        await self._command_all(servers, lambda server: server.release_memory(tags))
        await self.pool.wait_until_removed([server for server in servers if server.lost])

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Have all servers allocate the memory of these tags again."""
        self.pool.check_open()
        await self._command_all(self.pool.alive(), lambda server: server.resume_memory(tags))

    @contextlib.contextmanager
    def hold_requests(self) -> Generator[None]:
        """Send no requests meanwhile; new ones wait. Raises SyncError if a server has one."""
        if num_sent := self.pool.num_sent:
            raise SyncError(f"other engines run {num_sent} requests and cannot release their memory")
        was_open, self._is_held = self._gate.is_set(), True
        self._gate.clear()
        try:
            yield
        finally:
            self._is_held = False
            if was_open:
                self._gate.set()

    # -- servers -----------------------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether a weight update waits for a server because none is left."""
        return self.pool.is_awaited

    def take_load(self) -> Metrics:
        """Load of the servers since the last call (`ServerPool.take_load`)."""
        return self.pool.take_load()

    def fail(self, error: EngineError) -> None:
        """Fail all requests, running and future, with this error."""
        if self.pool.failure is not None:
            return
        self.pool.failure = error
        self.pool.notify_change()
        self._gate.set()
        self._cancel_all()

    async def _command_all(
        self, servers: Sequence[SglangServer], command: Callable[[SglangServer], Awaitable[None]]
    ) -> None:
        """Send a command to all of these servers; an error of one that died or hangs meanwhile is ignored.

        Health checks are off during these commands, so nothing else would notice. In a supervised pool a server that
        does not answer is lost even if it passes its health check: SGLang answers that for a process that does not
        compute, and whether the command was executed is unknown.
        """

        async def send(server: SglangServer) -> None:
            try:
                await command(server)
            except NoAnswerError as error:
                if self.pool.is_supervised:
                    is_late = isinstance(error, EngineTimeoutError)
                    reason = f"it {'hangs' if is_late else 'gave no answer'}: {error}"
                    self.pool.mark_lost(server, Loss(reason, ENGINE_HANGS if is_late else ENGINE_UNANSWERED))
                await self.pool.check_health(server, str(error))
                if not server.lost:
                    raise

        await asyncio.gather(*(send(server) for server in servers))

    # -- one request -------------------------------------------------------------------------------------------

    def _cancel_all(self) -> list[InFlightRequest]:
        requests = list(self._in_flight)
        for request in requests:
            if request.call is not None and not request.is_abandoned:
                request.call.cancel()
        return requests

    async def _abort(self, requests: Iterable[InFlightRequest]) -> None:
        """Abort requests and wait for their answers; those not answered in time return without tokens.

        An abort may overtake its request on the way to the server, so it is repeated until the request is done.
        """
        left = [request for request in requests if not request.done.is_set()]
        deadline, pause_s = time.monotonic() + ABORT_S, 0.001
        while left:
            is_late = time.monotonic() > deadline
            if is_late and (silent := [request for request in left if request.is_sent and not request.is_abandoned]):
                logger.warning("%d aborted requests were not answered within %g s", len(silent), ABORT_S)
            for request in left:
                request.is_aborted = True
                if not request.is_sent or is_late:
                    request.abandon()
            sent = [request for request in left if request.is_sent and not request.is_abandoned]
            refused = [error for errors in await asyncio.gather(*map(self._send_abort, sent)) for error in errors]
            if refused:  # these requests are abandoned later, or fail on their own
                logger.warning("%d aborts were refused; the last: %s", len(refused), refused[-1])
            for request in left:
                if request.is_abandoned:
                    await request.done.wait()
            left = [request for request in left if not request.done.is_set()]
            if left:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.2)

    async def _send_abort(self, request: InFlightRequest) -> list[EngineError]:
        refused: list[EngineError] = []
        server = request.server
        targets = self.pool.alive() if server is self.pool.router or server is None else [server]
        for target in targets:
            try:
                await target.command("/abort_request", rid=request.rid, timeout_s=ABORT_S)
            except EngineError as error:
                refused.append(error)
        return refused

    async def _answer(self, request: InFlightRequest, started: float) -> Completion:
        body = request.body()
        attempt = 0
        while not request.is_aborted:
            attempt += 1
            num_lost, body["rid"] = self.pool.num_lost, request.rid
            request.call = asyncio.ensure_future(self._send(request, body))
            try:
                reply = await request.call
                assert request.server is not None
                completion = self._reader.completion(
                    reply,
                    where=request.where,
                    prompt_len=len(request.prompt),
                    params=request.params,
                    num_scored=request.num_scored,
                    version=request.version,
                    newest=self.pool.newest_version(request.server),
                    prefilled=request.prefilled,
                    latency_s=time.perf_counter() - started,
                )
                if completion.finish_reason != "abort" or request.is_aborted:
                    return completion
                raise UnreachableError(f"{request.where} aborted a request on its own: {abort_reason(reply)}")
            except UnreachableError as error:
                request.rid = self._new_rid()  # a server may know the previous one
                if await self._is_explained(request, error, num_lost, is_last=attempt >= ATTEMPTS):
                    attempt = 0
                elif attempt >= ATTEMPTS:
                    hint = self._log_hint(request, str(error), body["rid"])
                    raise EngineError(f"no answer after {attempt} attempts; the last: {error}{hint}") from error
                else:
                    self._log_retry(attempt + 1, error)
                    await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
        return Completion([], [], [], "abort", latency_s=time.perf_counter() - started)

    def _log_hint(self, request: InFlightRequest, message: str, rid: str) -> str:
        """Name the log that shows a failure behind a router; the router names an engine only if it cannot reach it."""
        if request.server is not self.pool.router:
            return ""
        if any(server.url in message for server in self.pool.servers):
            return "; see the log of that engine"
        engines = ", ".join(server.url for server in self.pool.alive())
        return (
            f". The router reports this for itself or for one of its engines; see its log and those of {engines}. "
            f"With --router-log-level debug its log names the engine of each request; this one was {rid}"
        )

    def _log_retry(self, attempt: int, error: UnreachableError) -> None:
        self._num_retries += 1
        if (now_s := time.monotonic()) < self._logged_s + RETRY_LOG_S:
            return
        logger.warning(
            "retrying requests (%d since the last such line); the last, attempt %d of %d: %s",
            self._num_retries, attempt, ATTEMPTS, error,
        )  # fmt: skip
        self._num_retries, self._logged_s = 0, now_s

    async def _send(self, request: InFlightRequest, body: dict[str, Any]) -> Any:
        pool = self.pool
        await self._gate.wait()
        pool.check_open()
        usable = await pool.usable()
        await self._gate.wait()
        server = request.server = pool.choose(usable, request.prompt, request.session)
        request.prefilled = None
        server.placed += 1
        headers = None
        if pool.router is not None:
            headers = {"X-SMG-Routing-Key": request.session or str(request.key), "X-Request-Id": request.rid}
        may_lead = pool.caches_late(server)
        try:
            async with (
                server.slots,
                server.queue.ticket(request.key, len(request.prompt), may_lead=may_lead) as ticket,
            ):
                ask = partial(
                    server.ask,
                    GENERATE,
                    timeout_s=server.timeout_s,
                    headers=headers,
                    on_sent=ticket.mark_sent,
                )
                await self._wait_until_open(server)
                body |= self._cache_key(server)
                if ticket.leads:
                    with pool.count_request(server):
                        prefill = {
                            "input_ids": request.prompt,
                            "sampling_params": {"max_new_tokens": 0},
                            "stream": False,
                        }
                        request.prefilled = cached_tokens(await ask(prefill | self._cache_key(server)))
                    ticket.release_followers()
                    await self._wait_until_open(server)
                request.is_sent, request.version = True, pool.oldest_version(server)
                try:
                    with pool.count_request(server):
                        return await ask(body, events=self._event_reader(request, body))
                finally:
                    request.is_sent = False
        finally:
            server.placed -= 1

    def _event_reader(self, request: InFlightRequest, body: dict[str, Any]) -> EventReader | None:
        """Return the reader of a streamed answer; None if it is not streamed. `furlong serve` sends new tokens only."""
        server = request.server
        if request.stream is None or server is None:
            return None
        infos = [each.info for each in self.pool.behind(server)]
        if are_furlong := all(info.is_furlong for info in infos):
            body["incremental_streaming_output"] = True

        def put(event: dict[str, Any]) -> None:
            stream = request.stream
            assert stream is not None
            with reading(request.where, event):
                position = stream.position
                stream.put(position, *streamed_tokens(event, position))

        is_incremental = are_furlong or any(info.streams_increments for info in infos)
        return EventReader(request.where, put, url=server.url, is_incremental=is_incremental)

    def _cache_key(self, server: SglangServer) -> dict[str, str]:
        """Cache key per weight version: a server with held requests does not flush its prefix cache on an update."""
        if not self._holds or any(each.info.is_furlong for each in self.pool.behind(server)):
            return {}
        return {"extra_key": f"weights-{self.pool.oldest_version(server)}"}

    async def _wait_until_open(self, server: SglangServer) -> None:
        """Wait while generation is paused. Raises EngineError if no request, or none to this server, can be sent."""
        await self._gate.wait()
        self.pool.check_open()
        if server.lost:
            raise UnreachableError(f"{server.url} was lost before the request was sent: {server.lost.reason}")

    async def _is_explained(
        self, request: InFlightRequest, error: UnreachableError, num_lost: int, *, is_last: bool
    ) -> bool:
        """Whether a server was lost since the request was sent, so that it can go to another one at once.

        After the last attempt, servers that pass their health check are asked for a token as well.
        """
        server, pool = request.server, self.pool
        assert server is not None
        suspects = pool.alive() if server is pool.router else [server]
        await asyncio.gather(*(pool.check_health(suspect, str(error)) for suspect in suspects))
        was_lost = server.lost or (server is pool.router and pool.num_lost > num_lost)
        if not was_lost and not (is_last and await pool.check_generation(server)):
            return False
        await pool.usable()  # raises if this was the last one
        logger.debug("sending request %s to another engine: %s", request.rid, error)
        if server is pool.router:
            await asyncio.sleep(BACKOFF_S)  # the router may not know yet
        return True
