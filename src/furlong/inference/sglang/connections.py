"""Keep-alive HTTP/1.1 connections to one server, with little overhead per request for thousands in flight."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import h11

CONNECT_S = 10.0
KEEPALIVE_S = 2.0  # below the 5 s after which uvicorn closes idle connections
READ_BYTES = 1 << 18


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
        status, parts = 0, list[bytes]()
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
