"""uvicorn with time limits for headers and slow readers, a limit of connections, fair turns, and a bounded exit."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from furlong.inference.server.bodies import error_response
from furlong.inference.server.limits import (
    HEALTH_PATH,
    SPARE_CONNECTIONS,
    Counts,
    ServerLimits,
    connections_that_fit,
    flag_of,
)
from furlong.inference.server.turns import Turns
from furlong.inference.server.whole_requests import WholeCycle, WholeRequest

logger = logging.getLogger(__name__)

GRACE_S = 1.5  # for requests to end once the server exits; their connections are then closed
CANCEL_S = 2.5  # after it starts to exit, uvicorn cancels the requests that are left
KEEP_ALIVE_S = 5
ACCEPTS = 256  # connections accepted in one iteration of the event loop
BACKLOG = 4096  # connections that the kernel accepts meanwhile; it uses net.core.somaxconn if that is less
PIECE_BYTES = 16 * 1024  # parsed at once
HEALTH_REQUEST = f"GET {HEALTH_PATH} ".encode()


@dataclass
class _Sharing:
    """What the connections of one server share.

    spares: Connections beyond the limit, the oldest first. They may ask for `/health` only.
    """

    limits: ServerLimits
    max_connections: int
    turns: Turns
    spares: dict[_LimitedProtocol, None] = field(default_factory=dict["_LimitedProtocol", None])


def limited_protocol(counts: Counts) -> type[H11Protocol]:
    """Return the protocol class of connections under these limits."""

    class Limited(_LimitedProtocol):
        sharing: ClassVar[_Sharing] = _Sharing(counts.limits, connections_that_fit(counts.limits), counts.turns)

    return Limited


def _only_health(app: ASGIApp, limit: int) -> ASGIApp:
    """Forward requests for `/health` to `app`, and refuse others with 503."""
    message = f"{limit} connections are open, the limit of {flag_of('max_connections')}; close some, or retry later"

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == HEALTH_PATH:
            await app(scope, receive, send)
            return
        refusal = error_response(message, 503)
        refusal.headers["connection"] = "close"
        await refusal(scope, receive, send)

    return answer


class _ClientFaults(logging.LoggerAdapter[logging.Logger]):
    """Logs at DEBUG what uvicorn would log as warnings: bytes that are not HTTP, and upgrades."""

    @property
    def level(self) -> int:
        """The level that uvicorn compares with its own TRACE."""
        return self.logger.getEffectiveLevel()

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log at DEBUG."""
        self.debug(msg, *args, **kwargs)


class _LimitedProtocol(H11Protocol):
    """A connection that is closed when the client neither sends a request nor reads its answer in time.

    What it receives is parsed in turns with other connections, except requests for `/health`.
    """

    sharing: ClassVar[_Sharing]
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None
    _num_waiting = 0  # pieces that wait for a turn
    _is_whole = False  # the request that is answered arrived whole, and h11 does not know of it
    _early = b""  # what arrived meanwhile

    def connection_made(self, transport: Any) -> None:  # the base class names asyncio.Transport
        """Serve a connection beyond the limit `/health` only, and close the oldest of them if they are many."""
        super().connection_made(transport)
        self.logger = cast("Any", _ClientFaults(logger))
        if len(self.connections) - len(self.sharing.spares) > self.sharing.max_connections:
            self._become_spare()
        self._await_headers()

    def _become_spare(self) -> None:
        spares = self.sharing.spares
        spares[self] = None
        self.app = cast("Any", _only_health(cast("ASGIApp", self.app), self.sharing.max_connections))
        if len(spares) > SPARE_CONNECTIONS:
            oldest = next(iter(spares))
            del spares[oldest]
            logger.debug("closed a connection: %d are open", len(self.connections))
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and in its turn the request."""
        self._header_timer = _stopped(self._header_timer)
        self._write_timer = _stopped(self._write_timer)
        self._answer_timer = _stopped(self._answer_timer)
        self.sharing.spares.pop(self, None)
        self.sharing.turns.add(functools.partial(super().connection_lost, exc))

    def data_received(self, data: bytes) -> None:
        """Process bytes of the client, a request for `/health` at once and others in their turn."""
        if not self._num_waiting and data.startswith(HEALTH_REQUEST) and len(data) <= PIECE_BYTES:
            self._process(data)
            return
        self._unset_keepalive_if_required()  # now: the turn may come after the connection would be closed as idle
        for start in range(0, len(data), PIECE_BYTES):
            self._num_waiting += 1
            self.sharing.turns.add(functools.partial(self._process_waiting, data[start : start + PIECE_BYTES]))
        if self._num_waiting > 1:  # one piece may wait: most are whole requests, and no more comes before the answer
            self.transport.pause_reading()

    def _process_waiting(self, piece: bytes) -> None:
        self._num_waiting -= 1
        if self.transport.is_closing():
            return
        self._process(piece)
        if not self._num_waiting and not self.flow.read_paused:
            self.transport.resume_reading()

    def _process(self, piece: bytes) -> None:
        """Parse; headers must be complete within `header_timeout` of their first byte."""
        if self._is_whole:
            self._early += piece
            self.flow.pause_reading()
            return
        if not self._answer_whole(piece):
            super().data_received(piece)
        if self.transport.is_closing() or self._is_answering():
            self._header_timer = _stopped(self._header_timer)
        elif self._header_timer is None:
            self._await_headers()

    def _answer_whole(self, piece: bytes) -> bool:
        """Begin to answer if `piece` is a whole request, and h11 has no part of one."""
        is_between = self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE
        if not is_between or self.conn.trailing_data[0] or (request := WholeRequest.parse(piece)) is None:
            return False
        self._unset_keepalive_if_required()
        self._is_whole = True
        self.cycle = WholeCycle(request, self)
        task = self.loop.create_task(self.cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        return True

    def on_response_complete(self) -> None:
        """Allow the next request. A body that is still arriving is discarded, for a limited time."""
        self._answer_timer = _stopped(self._answer_timer)
        early, self._is_whole, self._early = self._early, False, b""
        super().on_response_complete()
        if early:
            self.data_received(early)
        if self.flow.write_paused:
            self._limit_answer()
        is_sending = self.conn.their_state is h11.SEND_BODY and not self._is_answering()
        if is_sending and not self.transport.is_closing():
            self._await_headers()

    def pause_writing(self) -> None:
        """Close the connection if the client does not read for `write_timeout`."""
        super().pause_writing()
        self._limit_answer()
        if self._write_timer is None:
            self._await_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._write_timer = _stopped(self._write_timer)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; if an answer has begun, only the end of the connection can tell."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.abort()

    def _is_answering(self) -> bool:
        cycle = cast("Any", self.cycle)
        return cycle is not None and not cycle.response_complete

    def _limit_answer(self) -> None:
        """Limit the time in which a client may read an answer, however slowly it does, from its first delay."""
        if self._answer_timer is None and self._is_answering():
            limit_s = self.sharing.limits.request_timeout + self.sharing.limits.write_timeout
            self._answer_timer = self.loop.call_later(limit_s, self._expire, "read its answer")

    def _await_headers(self) -> None:
        self._header_timer = _stopped(self._header_timer)
        limit_s = self.sharing.limits.header_timeout
        self._header_timer = self.loop.call_later(limit_s, self._expire, "send a request")

    def _await_reader(self, unsent_bytes: int) -> None:
        limit_s = self.sharing.limits.write_timeout
        self._write_timer = self.loop.call_later(limit_s, self._check_reader, unsent_bytes)

    def _check_reader(self, unsent_bytes: int) -> None:
        now = self.transport.get_write_buffer_size()
        if now < unsent_bytes:
            self._await_reader(now)
        else:
            self._expire("read its answer")

    def _expire(self, action: str) -> None:
        logger.debug("closed a connection: the client did not %s in time", action)
        self.transport.abort()


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class LimitedServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the caller and exits within about `CANCEL_S`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen. asyncio would accept as many connections at once as the kernel may queue."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: after `GRACE_S`, the connections that are left are closed, which ends their requests."""
        timer = asyncio.get_running_loop().call_later(GRACE_S, self._close_connections)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            self._close_connections()

    def _close_connections(self) -> None:
        connections = list(self.server_state.connections)
        if connections:
            logger.info("closed %d connections: the server exits", len(connections))
        for connection in connections:
            transport = cast("Any", connection).transport
            if transport is not None:
                transport.abort()


def build_server(app: Any, counts: Counts, *, keep_alive_s: int = KEEP_ALIVE_S) -> LimitedServer:
    """Return a server of `app`, which listens on sockets that the caller binds and closes connections that are idle."""
    config = uvicorn.Config(
        app,
        http=limited_protocol(counts),
        ws="none",
        lifespan="off",
        log_config=None,
        backlog=ACCEPTS,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=CANCEL_S,  # pyright: ignore[reportArgumentType]  passed to asyncio.wait_for
    )
    return LimitedServer(config)
