"""Requests of an `HttpEngine` to SGLang's /generate: their bodies, their answers, and how they are aborted."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import uuid
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from furlong.core.routing import Routes, RoutingShape, routes_from_text
from furlong.core.sample import UNKNOWN_VERSION
from furlong.errors import DataError, EngineError
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_pool import ServerPool
from furlong.interfaces import Completion, SamplingParams, TextTokenizer

logger = logging.getLogger(__name__)

ABORT_S = 5.0  # for a server to answer aborted requests; after that they return without tokens
GENERATE = "/generate"

MAX_LOG_PROB = 1e-3  # of rounding
MAX_VERSION = (1 << 63) - 1


@dataclass(eq=False)
class InFlightRequest:
    """One request of `HttpEngine.generate`, over all attempts.

    is_abandoned: It was aborted and its server did not answer in time.
    version: Weight version of the server when the request was sent.
    cached_tokens: Prompt tokens that were cached before its own prompt was computed ahead; None if it was not.
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
    def track(self, session: str | None, prompt: list[int], params: SamplingParams) -> Generator[InFlightRequest]:
        """Create a request that is in flight until the context exits; a call that still runs then is cancelled."""
        request = InFlightRequest(self.new_rid(), session, prompt, params)
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
        "stream": False,
    }
    if request.params.return_routed_experts:
        body["return_routed_experts"] = True
    return body


def prefix_body(body: dict[str, Any]) -> dict[str, Any]:
    """The body that makes a server compute and cache the prompt of `body` without generating."""
    return {"input_ids": body["input_ids"], "sampling_params": {"max_new_tokens": 0}, "stream": False}


def cached_tokens(request: InFlightRequest, reply: Any) -> int:
    """Tokens that the server took from its cache; 0 if it does not report them. Raises EngineError for other values."""
    try:
        value = reply["meta_info"]["cached_tokens"]
    except (KeyError, TypeError, IndexError):
        return 0
    if value is None:
        return 0
    most = len(request.prompt) + request.params.max_new_tokens  # a retracted request finds its own tokens, too
    if type(value) is not int or not 0 <= value <= most:
        raise _unusable(request, "cached_tokens", value, f"an integer from 0 to {most}")
    return value


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


@dataclass(frozen=True)
class AnswerReader:
    """Parses answers. `tokenizer` decodes text that the server leaves out; `routing` is the model's expert routing."""

    tokenizer: TextTokenizer | None = None
    routing: RoutingShape | None = None

    def completion(self, request: InFlightRequest, reply: Any, *, newest: int | None, seconds: float) -> Completion:
        """Validate and convert an answer. Raises EngineError for one that cannot be trained on.

        `newest` is the last weight version given to any server that may have answered; None if unknown.
        """
        try:
            meta = reply["meta_info"]
            rows = meta.get("output_token_logprobs") or []
            tokens, log_probs = [row[1] for row in rows], [row[0] for row in rows]
            reason = meta["finish_reason"]["type"]
            label = meta["weight_version"]
            text = reply.get("text") or ""
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            shown = repr(str(reply)[:200])
            what = f"without {error}: {shown}" if isinstance(error, KeyError) else f"with something else: {shown}"
            raise EngineError(
                f"{request.where} answered {what}; furlong expects the protocol of SGLang 0.5.16"
            ) from error
        _check_values(request, tokens=tokens, log_probs=log_probs, text=text, label=label)
        label, output_ids = str(label), reply.get("output_ids")
        ids = _as_list(output_ids)
        if output_ids is not None and ids is None:
            raise _unusable(request, "output_ids", output_ids, "a list of token ids")
        if ids is not None and ids != tokens:
            raise EngineError(
                f"{request.where} answered {len(ids)} tokens, but log-probs of {len(tokens)} other ones; they must be "
                "the same"
            )
        if len(tokens) > request.params.max_new_tokens:
            raise EngineError(
                f"{request.where} answered {len(tokens)} tokens, but max_new_tokens was "
                f"{request.params.max_new_tokens}; furlong expects the protocol of SGLang 0.5.16"
            )
        if reason not in ("stop", "length", "abort"):
            raise EngineError(f"{request.where} answered with finish_reason {reason!r}")
        _check_version(request, label, newest)
        if not text and self.tokenizer is not None:
            text = self.tokenizer.decode(tokens, skip_special_tokens=request.params.skip_special_tokens)
        return Completion(
            tokens=tokens,
            log_probs=log_probs,
            versions=_versions(request, meta, label, len(tokens), newest),
            finish_reason=reason,
            text=text,
            cached_tokens=cached_tokens(request, reply) if request.cached_tokens is None else request.cached_tokens,
            latency_s=seconds,
            routed_experts=self._routes(request, meta, len(tokens), is_aborted=reason == "abort")
            if request.params.return_routed_experts
            else None,
        )

    def _routes(
        self, request: InFlightRequest, meta: dict[str, Any], num_tokens: int, *, is_aborted: bool
    ) -> Routes | None:
        """Parse the routed experts. Raises EngineError if they are missing for some tokens.

        An aborted request may lack some; the request that continues it reports them.
        """
        text = meta.get("routed_experts")
        if self.routing is None:
            raise EngineError("the request asks for routed experts, but this HttpEngine was built without `routing`")
        if text is None:
            if is_aborted:
                return None
            raise EngineError(
                f"{request.where} answered without routed_experts; start the server with "
                "--enable-return-routed-experts. A router in front of it must pass that field through"
            )
        try:
            routes = routes_from_text(text, self.routing, request.where)
        except DataError as error:
            raise EngineError(str(error)) from error
        expected = len(request.prompt) + num_tokens - 1
        if len(routes) != expected and not (is_aborted and len(routes) < expected):
            raise EngineError(
                f"{request.where} answered routed experts of {len(routes)} tokens; expected {expected}, for all but "
                f"the last of {len(request.prompt)} + {num_tokens} tokens"
            )
        return routes


def abort_reason(reply: Any) -> str:
    """The server's reason for an abort that was not requested."""
    return str(reply["meta_info"]["finish_reason"].get("message", "no reason given"))


def _as_list(value: Any) -> list[Any] | None:
    return cast("list[Any]", value) if isinstance(value, list) else None


def _unusable(request: InFlightRequest, name: str, value: Any, expected: str) -> EngineError:
    return EngineError(
        f"{request.where} answered {name} {str(value)[:100]!r}, expected {expected}; furlong expects the protocol of "
        "SGLang 0.5.16"
    )


def _check_values(request: InFlightRequest, *, tokens: list[Any], log_probs: list[Any], text: Any, label: Any) -> None:
    """Raise EngineError for values of other types than SGLang's, and for log-probs that are none."""
    if not isinstance(text, str):
        raise _unusable(request, "text", text, "a string")
    if type(label) not in (str, int):
        raise _unusable(request, "weight_version", label, "a string or an integer")
    if set(map(type, tokens)) - {int} or min(tokens, default=0) < 0:
        wrong = next(token for token in tokens if type(token) is not int or token < 0)
        raise _unusable(request, "a token", wrong, "an id, an integer from 0")
    if set(map(type, log_probs)) - {float, int} or not _is_finite(log_probs):
        raise EngineError(f"{request.where} answered a log-prob that is not finite; its weights are broken")
    if (largest := max(log_probs, default=0.0)) > MAX_LOG_PROB:
        raise _unusable(request, "a log-prob", largest, "0 or less")


def _is_finite(values: list[Any]) -> bool:
    """Whether all values are finite numbers; the sum is ten times faster than testing each."""
    try:
        return math.isfinite(sum(values))
    except TypeError:  # null
        return False


def _check_version(request: InFlightRequest, label: str, newest: int | None) -> None:
    if request.version is None or newest is None or request.version <= _number(label) <= newest:
        return
    assert request.server is not None
    raise EngineError(
        f"{request.server.url} answered with weight version {label!r}, but it was given {request.version} .. {newest}: "
        "it was restarted, or another program updates it; the answer is discarded"
    )


def _number(label: str) -> int:
    """The version number of a label; UNKNOWN_VERSION for a label that furlong did not assign."""
    is_number = label.isascii() and label.isdecimal() and len(label) < 20
    return int(label) if is_number else UNKNOWN_VERSION


def _versions(request: InFlightRequest, meta: dict[str, Any], label: str, count: int, newest: int | None) -> list[int]:
    """The version of each token. Raises EngineError for anything but one integer per token, up to `newest`."""
    if (value := meta.get("token_versions")) is not None:
        per_token = _as_list(value)
        if per_token is None or len(per_token) != count or set(map(type, per_token)) - {int}:
            raise _unusable(request, "token_versions", value, f"a list of {count} integers, one for each token")
        highest = newest if request.version is not None and newest is not None else MAX_VERSION
        if per_token and not 0 <= min(per_token) <= max(per_token) <= highest:
            raise _unusable(request, "token_versions", value, f"versions from 0 to {highest}")
        return per_token
    return [_number(label) if request.version is None else request.version] * count
