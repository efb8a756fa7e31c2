"""HTTP client for one server that speaks SGLang's protocol: SGLang itself, `furlong serve`, or a router.

A status other than 200, and `success: false` in a 200 reply, are errors with the server's own reason. After an
`UnreachableError` nothing of an answer was used, so the request may be sent again; every other EngineError is final.
"""

from __future__ import annotations

import asyncio
import math
import re
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import h11
import httpx
import orjson

from furlong.errors import ConfigError, EngineError, EngineTimeoutError, UnreachableError

PROBE_S = 5.0  # for a server to answer its health check
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


def reason_in(content: bytes) -> str:
    """The server's message in an error reply, in any of the usual forms."""
    try:
        body: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        if title := re.search(rb"<title>(.*?)</title>", content, re.DOTALL | re.IGNORECASE):
            page = title[1].decode(errors="replace").strip()
            return f"a web page ({page}): this is not the address of an inference server"
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
            f"no engine answers at {url} ({type(error).__name__}: {error}); start it, or fix the address"
        ) from error
    if reply.status_code == 401:
        raise ConfigError(f"the engine at {url} requires an API key; pass that of the server as --sglang-api-key")
    if reply.status_code != 200:
        raise ConfigError(f"GET {url}{path} answered {reply.status_code}: {reason_in(reply.content)}")
    try:
        return orjson.loads(reply.content)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"GET {url}{path} did not answer JSON; is this the address of an SGLang server?") from error


CONNECT_S = 10.0
KEEPALIVE_S = 2.0  # below the 5 s after which uvicorn closes idle connections
READ_BYTES = 1 << 18
MAX_ANSWER_BYTES = 4 << 30  # routed experts of long answers included


class BrokenConnectionError(Exception):
    """The connection could not be opened, or closed before the answer was complete."""


class _Connection:
    """One connection. It is closed after a failed request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.CLIENT)
        self.idle_since = 0.0

    async def send(self, request: h11.Request, content: bytes) -> None:
        """Send a request."""
        protocol = self._protocol
        head, end = protocol.send(request) or b"", b""
        if content:
            head += protocol.send(h11.Data(data=content)) or b""
        end = protocol.send(h11.EndOfMessage()) or b""
        self._writer.write(head + end)
        await self._writer.drain()

    async def receive(self) -> tuple[int, bytes]:
        """Read the complete answer; returns status and body."""
        protocol = self._protocol
        status, num_bytes, parts = 0, 0, list[bytes]()
        while True:
            event = protocol.next_event()
            if event is h11.NEED_DATA:
                data = await self._reader.read(READ_BYTES)
                if not data and protocol.their_state is h11.SEND_RESPONSE:
                    raise BrokenConnectionError("the server closed the connection without an answer")
                protocol.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                num_bytes += len(event.data)
                if num_bytes > MAX_ANSWER_BYTES:
                    raise BrokenConnectionError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
            elif isinstance(event, h11.EndOfMessage):
                return status, b"".join(parts)
            elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                raise BrokenConnectionError("the server closed the connection without an answer")

    def renew(self) -> bool:
        """Prepare for the next request; False if the server closes the connection."""
        if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
            return False
        self._protocol.start_next_cycle()
        self.idle_since = time.monotonic()
        return True

    @property
    def is_fresh(self) -> bool:
        """Whether the server is unlikely to have closed it."""
        return time.monotonic() - self.idle_since < KEEPALIVE_S and not self._reader.at_eof()

    def close(self) -> None:
        """Close at once."""
        self._writer.transport.abort()


class Connections:
    """A pool of connections to one server. Proxies of the environment are ignored."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._headers = {"Host": parts.netloc, "Content-Type": "application/json", **headers}
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        content: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        on_sent: Callable[[], None] | None = None,
    ) -> tuple[int, bytes]:
        """Return status and body of the answer. Raises BrokenConnectionError if none came.

        `on_sent` is called once the request is written.
        """
        fields = {**self._headers, "Content-Length": str(len(content)), **(headers or {})}
        request = h11.Request(method=method, target=path, headers=list(fields.items()))
        connection = await self._connect()
        is_done = False
        try:
            await connection.send(request, content)
            if on_sent is not None:
                on_sent()
            answer = await connection.receive()
            is_done = connection.renew()
            return answer
        except (OSError, h11.RemoteProtocolError) as error:
            raise BrokenConnectionError(f"{type(error).__name__} {error}".strip()) from error
        finally:
            if is_done:
                self._idle.append(connection)
            else:
                connection.close()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise BrokenConnectionError(f"no connection within {CONNECT_S:g} s") from error
        except OSError as error:
            raise BrokenConnectionError(f"{type(error).__name__} {error}") from error
        return _Connection(reader, writer)

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # transports close in the next iteration of the event loop


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
        on_sent: Callable[[], None] | None = None,
    ) -> Any:
        """Send a request and return the parsed reply: POST `body`, or GET without one, unless `method` is set.

        `on_sent` is called once the request is written. Raises UnreachableError if no answer came, EngineTimeoutError
        if none came within `timeout_s` (None: no limit), and EngineError for an error status or invalid JSON.
        """
        content_out = b"" if body is None else orjson.dumps(body)
        method = method or ("GET" if body is None else "POST")
        where = f"{method} {self.url}{path}"
        number = self._num_requests = self._num_requests + 1
        self._unanswered[number] = (path, time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                status, content = await self._connections.request(method, path, content_out, headers, on_sent=on_sent)
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
        finally:
            del self._unanswered[number]
        if status in self._busy:
            raise UnreachableError(f"{where} answered {status}: {reason_in(content)}", url=self.url)
        if status not in (200, ACCEPTED):
            hint = "; pass the key it was started with as --sglang-api-key" if status == 401 else ""
            raise EngineError(f"{where} answered {status}: {reason_in(content)}{hint}")
        if not content:
            return {}
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{where} did not answer JSON: {content[:200]!r}") from error

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
            raise EngineError(f"POST {self.url}{path} failed: {reason}")
        return answer

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        await self._connections.close()
