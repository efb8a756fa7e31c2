"""Messages between two processes over a socket: JSON arrays, those of one iteration of the event loop together."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import orjson

_SIZE = struct.Struct("!I")


class Channel(asyncio.Protocol):
    """Sends and receives messages. `receive` is called with each; `lost` once the other end is closed."""

    def __init__(self, receive: Callable[[list[Any]], None], lost: Callable[[], None]) -> None:
        self._receive, self._lost = receive, lost
        self._received, self._unsent = bytearray(), list[bytes]()
        self._transport: asyncio.Transport | None = None

    def send(self, *message: Any) -> None:
        """Send a message, together with others of this iteration. Raises TypeError for what JSON cannot represent."""
        encoded = orjson.dumps(message)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent.append(encoded)

    def flush(self) -> None:
        """Write what is not sent yet."""
        if self._transport is not None and self._unsent:
            whole = b"[%b]" % b",".join(self._unsent)
            self._transport.write(_SIZE.pack(len(whole)) + whole)
        self._unsent.clear()

    def close(self) -> None:
        """Close this end after what was sent."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # pyright: ignore[reportAttributeAccessIssue]  of a socket

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  of asyncio
        """The other end is closed, or its process has ended."""
        self._transport = None
        self._lost()

    def data_received(self, data: bytes) -> None:
        """Pass on complete messages."""
        received = self._received
        received += data
        at = 0
        while len(received) - at >= _SIZE.size:
            (size,) = _SIZE.unpack_from(received, at)
            end = at + _SIZE.size + size
            if len(received) < end:
                break
            for message in orjson.loads(memoryview(received)[at + _SIZE.size : end]):
                self._receive(message)
            at = end
        del received[:at]
