"""HTTP/1.1 client for servers that are not trusted to be right: every answer is bounded in size and time.

Redirects are not followed, compressed answers are refused, and a connection on which a server sent anything after an
answer is not used again: it would be read as the answer to the next request.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import SupportsIndex
from urllib.parse import unquote, urlsplit

import h11

from furlong.core.text import redact_credentials

CONNECT_S = 10.0
KEEPALIVE_S = 2.0  # below the 5 s after which uvicorn closes idle connections
READ_BYTES = 1 << 18
MAX_ANSWER_BYTES = 256 << 20  # checksums of all tensors of all processes
MAX_INTERIM = 16  # responses such as 100 Continue before the answer
SHOWN_CHARS = 300


class BrokenConnectionError(Exception):
    """The connection could not be opened, or closed before the answer was complete."""


class ForbiddenAnswerError(Exception):
    """The server answers with more than the limit, with a redirect or compressed, and would do so again."""


@dataclass(frozen=True)
class HttpAnswer:
    """Status and body of an answer."""

    status: int
    content: bytes


class _CountingReader(asyncio.StreamReader):
    """Counts the bytes that have arrived."""

    num_bytes = 0

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        received = bytes(data)
        self.num_bytes += len(received)
        super().feed_data(received)


class _Connection:
    """One connection. It is closed after a failed request."""

    def __init__(self, reader: _CountingReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.CLIENT)
        self._num_read = 0
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

    async def receive(self, limit_bytes: int, on_data: Callable[[bytes], None] | None = None) -> HttpAnswer:
        """Read the complete answer. Raises ForbiddenAnswerError if its body has more than `limit_bytes`.

        `on_data` gets the body of an answer with status 200 as it arrives; it is then empty here.
        """
        protocol = self._protocol
        status, num_bytes, num_interim, parts = 0, 0, 0, list[bytes]()
        while True:
            event = protocol.next_event()
            if event is h11.NEED_DATA:
                data = await self._reader.read(READ_BYTES)
                self._num_read += len(data)
                if not data and protocol.their_state is h11.SEND_RESPONSE:
                    raise BrokenConnectionError("the server closed the connection without an answer")
                protocol.receive_data(data)
            elif isinstance(event, h11.InformationalResponse):
                num_interim += 1
                if num_interim > MAX_INTERIM:
                    raise ForbiddenAnswerError(f"more than {MAX_INTERIM} interim responses ({event.status_code})")
            elif isinstance(event, h11.Response):
                status = event.status_code
                _check_head(event)
            elif isinstance(event, h11.Data) and status == 200 and on_data is not None:
                on_data(bytes(event.data))
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                num_bytes += len(event.data)
                if num_bytes > limit_bytes:
                    raise ForbiddenAnswerError(f"more than {limit_bytes:,} bytes, the limit for this request")
            elif isinstance(event, h11.EndOfMessage):
                return HttpAnswer(status, b"".join(parts))
            elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                raise BrokenConnectionError("the server closed the connection without an answer")

    def renew(self) -> bool:
        """Prepare for the next request; False if the server closes the connection, or has sent more than the answer."""
        protocol = self._protocol
        if protocol.our_state is not h11.DONE or protocol.their_state is not h11.DONE or protocol.trailing_data[0]:
            return False
        protocol.start_next_cycle()
        self.idle_since = time.monotonic()
        return True

    @property
    def is_fresh(self) -> bool:
        """Whether the server is unlikely to have closed it, and has sent nothing since the last answer."""
        is_silent = self._reader.num_bytes == self._num_read and not self._reader.at_eof()
        return is_silent and time.monotonic() - self.idle_since < KEEPALIVE_S

    def close(self) -> None:
        """Close at once."""
        self._writer.transport.abort()


def _check_head(response: h11.Response) -> None:
    """Raise ForbiddenAnswerError for a redirect and for a compressed body."""
    fields = {name.lower(): value for name, value in response.headers}
    status = response.status_code
    if 300 <= status < 400:
        target = redact_credentials(fields.get(b"location", b"no address").decode("latin-1")[:SHOWN_CHARS])
        raise ForbiddenAnswerError(f"a redirect ({status}) to {target!r}, which is not followed; give that address")
    encoding = fields.get(b"content-encoding", b"identity").decode("latin-1")[:SHOWN_CHARS]
    if encoding.strip().lower() != "identity":
        raise ForbiddenAnswerError(f"Content-Encoding {encoding!r}, which the request did not accept")


class Connections:
    """A pool of connections to one server. Proxies of the environment are ignored.

    User name and password in `url` are sent as basic authentication unless `headers` have another.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._headers = {
            "Host": parts.netloc.rpartition("@")[2],
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            **_basic_authentication(parts.username, parts.password),
            **headers,
        }
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        content: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        limit_bytes: int = MAX_ANSWER_BYTES,
        on_sent: Callable[[], None] | None = None,
        on_data: Callable[[bytes], None] | None = None,
    ) -> HttpAnswer:
        """Return the answer. Raises BrokenConnectionError if none came, and ForbiddenAnswerError.

        `on_sent` is called once the request is written. `on_data` gets the body of an answer with status 200 as it
        arrives, without a limit; the answer is then empty.
        """
        fields = {**self._headers, "Content-Length": str(len(content)), **(headers or {})}
        request = h11.Request(method=method, target=path, headers=list(fields.items()))
        connection = await self._connect()
        is_done = False
        try:
            await connection.send(request, content)
            if on_sent is not None:
                on_sent()
            answer = await connection.receive(limit_bytes, on_data)
            is_done = connection.renew()
            return answer
        except (OSError, h11.RemoteProtocolError) as error:
            raise BrokenConnectionError(f"{type(error).__name__} {error}".strip()[:SHOWN_CHARS]) from error
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
        loop = asyncio.get_running_loop()
        reader = _CountingReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            async with asyncio.timeout(CONNECT_S):
                transport, _ = await loop.create_connection(lambda: protocol, self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise BrokenConnectionError(f"no connection within {CONNECT_S:g} s") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name with an empty or a long part
            raise BrokenConnectionError(f"{type(error).__name__} {error}") from error
        return _Connection(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # transports close in the next iteration of the event loop


def _basic_authentication(user: str | None, password: str | None) -> dict[str, str]:
    if user is None and password is None:
        return {}
    text = f"{unquote(user or '')}:{unquote(password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(text.encode()).decode()}"}


def get_once(
    url: str, path: str, *, headers: Mapping[str, str] | None = None, timeout_s: float, limit_bytes: int
) -> HttpAnswer:
    """GET a path outside an event loop. Raises TimeoutError, BrokenConnectionError or ForbiddenAnswerError."""

    async def ask() -> HttpAnswer:
        connections = Connections(url, headers or {})
        try:
            async with asyncio.timeout(timeout_s):
                return await connections.request("GET", path, limit_bytes=limit_bytes)
        finally:
            await connections.close()

    return asyncio.run(ask())
