"""Requests of an `HttpEngine` to SGLang's /generate: their bodies, and how they are aborted."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from furlong.core.token_stream import TokenStream
from furlong.errors import EngineError
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_pool import ServerPool
from furlong.interfaces import SamplingParams

logger = logging.getLogger(__name__)

ABORT_S = 5.0  # for a server to answer aborted requests; after that they return without tokens
GENERATE = "/generate"


@dataclass(eq=False)
class InFlightRequest:
    """One request of `HttpEngine.generate`, over all attempts.

    is_abandoned: It was aborted and its server did not answer in time.
    version: Weight version of the server when the request was sent.
    cached_tokens: Prompt tokens that were cached before its own prompt was computed ahead; None if it was not.
    stream: Receives tokens as they are sampled.
    """

    rid: str
    session: str | None
    prompt: list[int]
    params: SamplingParams
    server: SglangServer | None = None
    call: asyncio.Task[Any] | None = None
    version: int | None = None
    cached_tokens: int | None = None
    is_sent: bool = False
    is_aborted: bool = False
    is_abandoned: bool = False
    stream: TokenStream | None = None
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


class InFlightRequests:
    """The requests of one engine that have not been answered."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._open: set[InFlightRequest] = set()
        self._run, self._counter = uuid.uuid4().hex[:12], itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    def new_rid(self) -> str:
        """Return a request id that no server has seen."""
        return f"furlong-{self._run}-{next(self._counter)}"

    @contextmanager
    def track(
        self, session: str | None, prompt: list[int], params: SamplingParams, stream: TokenStream | None
    ) -> Generator[InFlightRequest]:
        """Create a request that is in flight until the context exits; a call that still runs then is cancelled."""
        request = InFlightRequest(self.new_rid(), session, prompt, params, stream=stream)
        self._open.add(request)
        try:
            yield request
        finally:
            self._open.discard(request)
            if request.call is not None:
                request.call.cancel()  # of a coroutine that was closed, not cancelled
            request.done.set()

    def all(self) -> list[InFlightRequest]:
        """All requests in flight."""
        return list(self._open)

    def of_sessions(self, sessions: Collection[str]) -> list[InFlightRequest]:
        """The requests of these sessions."""
        names = frozenset(sessions)
        return [request for request in self._open if request.session in names]

    def cancel(self) -> list[InFlightRequest]:
        """Cancel the calls of all requests, and return the requests."""
        requests = self.all()
        for request in requests:
            if request.call is not None and not request.is_abandoned:
                request.call.cancel()
        return requests

    async def abort(self, requests: Iterable[InFlightRequest]) -> None:
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
                    _abandon(request)
            sent = [request for request in left if request.is_sent and not request.is_abandoned]
            refused = [error for errors in await asyncio.gather(*map(self._send_abort, sent)) for error in errors]
            if refused:  # these requests are abandoned later, or fail on their own
                logger.warning("%d aborts were refused; the last: %s", len(refused), refused[-1])
            await all_done([request for request in left if request.is_abandoned])
            left = [request for request in left if not request.done.is_set()]
            if left:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.2)

    async def _send_abort(self, request: InFlightRequest) -> list[EngineError]:
        """Abort a request on its server, or on all servers behind a router; returns their errors."""
        refused: list[EngineError] = []
        server = request.server
        targets = self._pool.alive() if server is self._pool.router or server is None else [server]
        for target in targets:
            try:
                await target.command("/abort_request", rid=request.rid, timeout_s=ABORT_S)
            except EngineError as error:
                refused.append(error)
        return refused


async def all_done(requests: Iterable[InFlightRequest]) -> None:
    """Wait until these requests are done."""
    for request in requests:
        await request.done.wait()


def _abandon(request: InFlightRequest) -> None:
    if request.is_abandoned:
        return  # a second cancellation would interrupt the closing of its connection
    request.is_abandoned = True
    if request.call is not None:
        request.call.cancel()


# Messages


def request_body(request: InFlightRequest) -> dict[str, Any]:
    """The body of a request without its `rid`, which changes with each attempt."""
    body: dict[str, Any] = {
        "input_ids": request.prompt,
        "sampling_params": sampling_json(request.params),
        "return_logprob": True,
        "stream": request.stream is not None,
    }
    if request.params.return_routed_experts:
        body["return_routed_experts"] = True
    return body


def prefix_body(body: dict[str, Any]) -> dict[str, Any]:
    """The body that makes a server compute and cache the prompt of `body` without generating."""
    key = {"extra_key": body["extra_key"]} if "extra_key" in body else {}
    return {"input_ids": body["input_ids"], "sampling_params": {"max_new_tokens": 0}, "stream": False, **key}


def sampling_json(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters under SGLang's names."""
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
