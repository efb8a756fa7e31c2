"""How one server that speaks SGLang's HTTP protocol is asked: SGLang itself, `furlong serve`, or a router.

Every reply is read to the end: a status other than 200 and `success: false` in a 200 reply are errors with the server's
own reason. What a caller may do about an error is in its type: after `UnreachableError` nothing of an answer was taken,
so a request may be sent again; every other EngineError is final.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import orjson

from furlong.errors import ConfigError, EngineError, EngineTimeoutError, UnreachableError
from furlong.inference.sglang.connections import BrokenConnectionError, Connections

PROBE_S = 5.0  # for a server to say that it lives
CONTROL_S = 600.0  # for a command; who publishes weights limits what takes them (`--update-weight-timeout`)
BUSY = (502, 503, 504)  # what a router answers while it has no worker for a request
ACCEPTED = 202  # what a router answers to a worker that comes or goes
HEALTH = ("/health", "/v1/loads")  # how the paths begin of what is asked of an engine to learn how it is


def url_of(address: str) -> str:
    """Complete `host:port` to a URL. Raises ConfigError for what is no address of an HTTP server."""
    text = address if "://" in address else f"http://{address}"
    try:
        url = httpx.URL(text)
        is_right = url.scheme in ("http", "https") and bool(url.host) and url.path in ("", "/")
    except httpx.InvalidURL:
        is_right = False
    if not is_right:
        raise ConfigError(f"{address!r} is no address of a server; give HOST:PORT or http://HOST:PORT")
    return text.rstrip("/")


def reason_in(content: bytes) -> str:
    """The server's own words in an error reply, whichever of the usual forms it has."""
    try:
        body: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        if title := re.search(rb"<title>(.*?)</title>", content, re.DOTALL | re.IGNORECASE):
            said = title[1].decode(errors="replace").strip()
            return f"a web page ({said}): that address is of something else than an inference server"
        return content[:500].decode(errors="replace").strip() or "no reason given"
    if isinstance(body, dict):
        for key in ("error", "message", "detail"):
            if value := body.get(key):
                return str(value.get("message", value)) if isinstance(value, dict) else str(value)
    return str(body)[:500]


def headers_for(api_key: str | None) -> dict[str, str]:
    """Headers of every request."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def probe(url: str, *, api_key: str | None, path: str = "/server_info") -> Any:
    """GET a path of a server before the run starts. Raises ConfigError naming the address and what came back."""
    try:
        reply = httpx.get(f"{url}{path}", headers=headers_for(api_key), timeout=PROBE_S, trust_env=False)
    except httpx.HTTPError as error:
        raise ConfigError(
            f"no engine answers at {url} ({type(error).__name__}: {error}); start it, or correct the address"
        ) from error
    if reply.status_code == 401:
        raise ConfigError(f"the engine at {url} wants an API key; give the one it was started with to --sglang-api-key")
    if reply.status_code != 200:
        raise ConfigError(f"GET {url}{path} answered {reply.status_code}: {reason_in(reply.content)}")
    try:
        return orjson.loads(reply.content)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"GET {url}{path} answered no JSON; is an SGLang server at this address?") from error


class SglangClient:
    """Requests to one server, and what it owes an answer to.

    `busy` are statuses that mean the same as `BUSY`. `answered_s` is when it last answered anything but a health check,
    by the monotonic clock.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, busy: tuple[int, ...] = ()) -> None:
        self.url = url
        self.answered_s = -math.inf
        self._busy = BUSY + busy
        self._owed: dict[int, tuple[str, float]] = {}  # what it was asked, and when, in this order
        self._num_asked = 0
        self._connections = Connections(url, headers)

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = CONTROL_S,
        headers: Mapping[str, str] | None = None,
        method: str = "",
        on_sent: Callable[[], None] | None = None,
    ) -> Any:
        """POST `body`, or GET without one, unless `method` says another; returns the parsed reply.

        `on_sent` is called when it is on its way.

        Raises UnreachableError if no answer came, EngineTimeoutError if none did in `timeout_s` (None is no limit of its own),
        EngineError for a refusal and a reply that is no JSON.
        """
        sent = b"" if body is None else orjson.dumps(body)
        method = method or ("GET" if body is None else "POST")
        where = f"{method} {self.url}{path}"
        number = self._num_asked = self._num_asked + 1
        self._owed[number] = (path, time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                status, content = await self._connections.request(method, path, sent, headers, on_sent=on_sent)
            if not path.startswith(HEALTH):  # SGLang answers 503 to those while it hangs
                self.answered_s = time.monotonic()
        except TimeoutError as error:
            raise EngineTimeoutError(
                f"{where} did not answer within {timeout_s:g} s; the server hangs or the limit "
                "(--sglang-router-request-timeout-secs for generation) is too low",
                url=self.url,
            ) from error
        except BrokenConnectionError as error:
            raise UnreachableError(f"{where}: {error}", url=self.url) from error
        finally:
            del self._owed[number]
        if status in self._busy:
            raise UnreachableError(f"{where} answered {status}: {reason_in(content)}", url=self.url)
        if status not in (200, ACCEPTED):
            hint = "; give the key it was started with to --sglang-api-key" if status == 401 else ""
            raise EngineError(f"{where} answered {status}: {reason_in(content)}{hint}")
        if not content:
            return {}
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{where} answered no JSON: {content[:200]!r}") from error

    def oldest_owed(self) -> tuple[str, float] | None:
        """Path and time of the oldest request that it has not answered, health checks apart; None if it has none."""
        return next((owed for owed in self._owed.values() if not owed[0].startswith(HEALTH)), None)

    async def command(self, path: str, *, timeout_s: float | None = CONTROL_S, **body: Any) -> dict[str, Any]:
        """POST a command. Raises EngineError if the reply says that it was not done, whatever its status."""
        answer = await self.ask(path, body, timeout_s=timeout_s)
        if answer is None:  # SGLang's word for what has nothing to tell
            return {}
        if not isinstance(answer, dict) or answer.get("success", True) is not True:
            words = answer.get("message", answer) if isinstance(answer, dict) else answer
            raise EngineError(f"POST {self.url}{path} was not done: {words}")
        return answer

    async def close(self) -> None:
        """Close the connections; the server goes on."""
        await self._connections.close()
