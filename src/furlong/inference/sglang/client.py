"""HTTP client for one server that speaks SGLang's protocol: SGLang itself, `furlong serve`, or a router.

A status other than 200, and `success: false` in a 200 reply, are errors with the server's own reason. After an
`UnreachableError` nothing of an answer was used, so the request may be sent again; every other EngineError is final.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import orjson

from furlong.core.text import redact_credentials, shortened
from furlong.errors import ConfigError, EngineError, EngineTimeoutError, UnreachableError
from furlong.inference.sglang.engine_answers import EXPECTED, as_object, parse_answer, readable, reason_in
from furlong.inference.sglang.event_reader import EventReader
from furlong.inference.sglang.http_client import (
    MAX_ANSWER_BYTES,
    BrokenConnectionError,
    Connections,
    ForbiddenAnswerError,
    get_once,
)

PROBE_S = 5.0  # for a server to answer its health check
MAX_PROBE_BYTES = 16 << 20  # of its settings
CONTROL_S = 600.0  # for a command; weight updates have limits of their own (`--update-weight-timeout`)
BUSY = (502, 503, 504)  # a router has no worker for the request
ACCEPTED = 202  # a router adds or removes a worker
HEALTH = ("/health", "/v1/loads")  # path prefixes of health checks


def url_of(address: str) -> str:
    """Convert `host:port` to a URL. Raises ConfigError for anything but the address of an HTTP server."""
    text = address if "://" in address else f"http://{address}"
    try:
        url = httpx.URL(text)
        has_port = "://" in address or url.port is not None
        is_right = url.scheme in ("http", "https") and bool(url.host) and url.path in ("", "/") and has_port
    except httpx.InvalidURL:
        is_right = False
    if not is_right:
        raise ConfigError(
            f"{address!r} is not the address of a server; use HOST:PORT or http://HOST:PORT, with an IPv6 address in "
            "brackets: [::1]:PORT"
        )
    return text.rstrip("/")


def headers_for(api_key: str | None) -> dict[str, str]:
    """Headers of every request."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def probe(url: str, *, api_key: str | None, path: str = "/server_info") -> dict[str, Any]:
    """GET a JSON object of a server before the run starts. Raises ConfigError naming the address and what came back.

    It must be called outside an event loop.
    """
    where, shown = f"GET {redact_credentials(url)}{path}", redact_credentials(url)
    try:
        answer = get_once(url, path, headers=headers_for(api_key), timeout_s=PROBE_S, limit_bytes=MAX_PROBE_BYTES)
    except (TimeoutError, BrokenConnectionError) as error:
        reason = str(error) or f"no complete answer within {PROBE_S:g} s"
        raise ConfigError(f"no engine answers at {shown} ({reason}); start it, or fix the address") from error
    except ForbiddenAnswerError as error:
        raise ConfigError(f"{where} answered with {error}; is this the address of an SGLang server?") from error
    if answer.status == 401:
        raise ConfigError(f"the engine at {shown} requires an API key; pass that of the server as --sglang-api-key")
    if answer.status != 200:
        raise ConfigError(f"{where} answered {answer.status}: {reason_in(answer.content)}")
    try:
        return as_object(parse_answer(answer.content, where), where)
    except EngineError as error:
        raise ConfigError(f"{error}; is this the address of an SGLang server?") from error


class SglangClient:
    """Requests to one server, including those it has not answered yet.

    `busy` are further statuses that mean the same as `BUSY`. `answered_s` is the monotonic time of the last answer to
    anything but a health check.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, busy: tuple[int, ...] = ()) -> None:
        self.url = url
        self.answered_s = -math.inf
        self._busy = BUSY + busy
        self._unanswered: dict[int, tuple[str, float]] = {}  # path and time, oldest first
        self._num_requests = 0
        self._connections = Connections(url, headers)

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = CONTROL_S,
        headers: Mapping[str, str] | None = None,
        method: str = "",
        limit_bytes: int = MAX_ANSWER_BYTES,
        on_sent: Callable[[], None] | None = None,
        events: EventReader | None = None,
    ) -> Any:
        """Send a request and return the parsed reply: POST `body`, or GET without one, unless `method` is set.

        `on_sent` is called once the request is written. With `events` the reply is a stream, and the result its last
        event. Raises UnreachableError if no answer came, EngineTimeoutError
        if none came within `timeout_s` (None: no limit), and EngineError for an error status, invalid JSON, a redirect,
        a compressed body, or one of more than `limit_bytes`.
        """
        content_out = b"" if body is None else orjson.dumps(body)
        method = method or ("GET" if body is None else "POST")
        where = f"{method} {self.url}{path}"
        number = self._num_requests = self._num_requests + 1
        self._unanswered[number] = (path, time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._connections.request(
                    method,
                    path,
                    content_out,
                    headers,
                    limit_bytes=limit_bytes,
                    on_sent=on_sent,
                    on_data=None if events is None else events.feed,
                )
            if not path.startswith(HEALTH):  # SGLang answers 503 to those while it hangs
                self.answered_s = time.monotonic()
        except TimeoutError as error:
            raise EngineTimeoutError(
                f"{where} did not answer within {timeout_s:g} s; the server hangs, or the limit is too low "
                "(--sglang-router-request-timeout-secs for generation)",
                url=self.url,
            ) from error
        except BrokenConnectionError as error:
            raise UnreachableError(f"{where}: {error}", url=self.url) from error
        except ForbiddenAnswerError as error:
            raise EngineError(f"{where} answered with {error}; {EXPECTED}") from error
        finally:
            del self._unanswered[number]
        status = answer.status
        if status in self._busy:
            raise UnreachableError(f"{where} answered {status}: {reason_in(answer.content)}", url=self.url)
        if status not in (200, ACCEPTED):
            hint = "; pass the key it was started with as --sglang-api-key" if status == 401 else ""
            raise EngineError(f"{where} answered {status}: {reason_in(answer.content)}{hint}")
        return parse_answer(answer.content, where) if events is None else events.last()

    async def ask_object(self, path: str, *, timeout_s: float | None = CONTROL_S) -> dict[str, Any]:
        """GET a JSON object, as `ask`. Raises EngineError for another value."""
        return as_object(await self.ask(path, timeout_s=timeout_s), f"GET {self.url}{path}")

    def oldest_unanswered(self) -> tuple[str, float] | None:
        """Path and time of its oldest unanswered request, except health checks; None if there is none."""
        return next((each for each in self._unanswered.values() if not each[0].startswith(HEALTH)), None)

    async def command(self, path: str, *, timeout_s: float | None = CONTROL_S, **body: Any) -> dict[str, Any]:
        """POST a command. Raises EngineError if the reply reports failure, whatever its status."""
        answer = await self.ask(path, body, timeout_s=timeout_s)
        if answer is None:  # SGLang's reply without content
            return {}
        if not isinstance(answer, dict) or answer.get("success", True) is not True:
            reason = answer.get("message", answer) if isinstance(answer, dict) else answer
            shown = readable(reason) if isinstance(reason, str) else shortened(reason)
            raise EngineError(f"POST {self.url}{path} failed: {shown}")
        return answer

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        await self._connections.close()
