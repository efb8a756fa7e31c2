"""Requests that arrive in one piece are read and answered without h11, which takes longer than a short chat request.

`WholeRequest.parse` accepts the plain case: one request, complete headers, a body of content-length bytes. Everything
else (parts of a request, several at once, chunked bodies, Expect, upgrades, unusual or wrong headers) is left to h11.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from furlong.inference.server.bodies import WHOLE

HEAD_BYTES = 16 * 1024  # of request line and headers

_REQUEST_LINE = re.compile(rb"(GET|POST) (/[!-~]*) HTTP/1\.1\r\n")
_HEADERS = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t -~]*\r\n)+")
_OF_H11 = frozenset((b"transfer-encoding", b"expect", b"upgrade", b"connection", b"trailer"))
_USUAL = (b"connection", b"keep-alive")
_DIGITS = 9  # of a content-length
_WITHOUT_BODY = frozenset((204, 304))


@dataclass(frozen=True)
class WholeRequest:
    """A complete request. target: path and query as sent. headers: with lower-case names."""

    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @staticmethod
    def parse(data: bytes) -> WholeRequest | None:
        """Return the request that `data` is; None if it is anything else than one plain request."""
        head_end = data.find(b"\r\n\r\n", 0, HEAD_BYTES)
        line = _REQUEST_LINE.match(data)
        if head_end < 0 or line is None or _HEADERS.fullmatch(data, line.end(), head_end + 2) is None:
            return None
        headers: list[tuple[bytes, bytes]] = []
        num_hosts, size = 0, b""
        for field in data[line.end() : head_end].split(b"\r\n"):
            name, _, value = field.partition(b":")
            name, value = name.lower(), value.strip(b" \t")
            headers.append((name, value))
            if (name in _OF_H11 and (name, value.lower()) != _USUAL) or (name == b"content-length" and size):
                return None
            num_hosts += name == b"host"
            size = value if name == b"content-length" else size
        size = size or b"0"
        if num_hosts != 1 or not size.isdigit() or len(size) > _DIGITS or int(size) != len(data) - head_end - 4:
            return None
        return WholeRequest(line[1].decode(), line[2], headers, data[head_end + 4 :])


class WholeCycle(RequestResponseCycle):
    """Answers a whole request that arrived on `connection`. The head of a reply leaves together with its body."""

    def __init__(self, request: WholeRequest, connection: H11Protocol) -> None:
        raw_path, _, query = request.target.partition(b"?")
        scope: Any = {
            "type": "http",
            "asgi": {"version": connection.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": connection.server,
            "client": connection.client,
            "scheme": connection.scheme,
            "method": request.method,
            "root_path": connection.root_path,
            "path": connection.root_path + unquote(raw_path.decode("ascii")),
            "raw_path": connection.root_path.encode("ascii") + raw_path,
            "query_string": query,
            "headers": request.headers,
            "state": connection.app_state.copy(),
            WHOLE: self,
        }
        super().__init__(
            scope, connection.conn, connection.transport, connection.flow, connection.logger,
            connection.access_logger, connection.access_log, connection.server_state.default_headers,
            asyncio.Event(), connection.on_response_complete,
        )  # fmt: skip
        self.body += request.body
        self.more_body = False
        self.message_event.set()
        self._head = b""
        self._is_chunked = False

    async def send(self, message: Any) -> None:
        """Write a message of the app. Raises RuntimeError for one that cannot follow the messages before."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        expected = "http.response.body" if self.response_started else "http.response.start"
        if self.response_complete or message["type"] != expected:
            raise RuntimeError(f"the app sent {message['type']!r}; the reply needs {expected!r}")
        if not self.response_started:
            self.response_started = True
            self._begin(message["status"], message.get("headers", ()))
            return
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        if self._is_chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body += b"0\r\n\r\n" if is_last else b""
        if written := self._head + body:
            self.transport.write(written)
        self._head = b""
        if is_last:
            self._complete()

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Keep the head for the first part of the body; that of a stream leaves now."""
        fields = [*self.default_headers, *headers]
        self.keep_alive &= (b"connection", b"close") not in fields
        has_length = any(name.lower() == b"content-length" for name, _ in fields)
        self._is_chunked = not has_length and status not in _WITHOUT_BODY
        if self._is_chunked:
            fields.append((b"transfer-encoding", b"chunked"))
        lines = b"".join(b"%b: %b\r\n" % field for field in fields)
        self._head = b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, STATUS_PHRASES[status], lines)
        if self._is_chunked:
            self.transport.write(self._head)
            self._head = b""

    def _complete(self) -> None:
        self.response_complete = True
        self.message_event.set()
        del self.scope[WHOLE]  # pyright: ignore[reportGeneralTypeIssues]  so that no collection is needed to free both
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
