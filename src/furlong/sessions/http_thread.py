"""An HTTP server in a thread of the run, with an event loop of its own: the run's loop may be busy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading

from starlette.types import ASGIApp

from furlong.inference.server.web import ServerLimits, WebServer, build_server, listening_socket

STOP_S = 5.0

logger = logging.getLogger(__name__)


class HttpThread:
    """Serves `app`. The port is open from the start, and `start` answers."""

    def __init__(self, app: ASGIApp, limits: ServerLimits, *, host: str, port: int) -> None:
        self._app, self._limits = app, limits
        self._listener = listening_socket(host, port)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._server: WebServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Answer requests, unless it does already."""
        if self._thread is None:
            self._server = build_server(self._app, self._limits)
            self._thread = threading.Thread(
                target=self._run, args=(self._server, self._listener), name="furlong-http", daemon=True
            )
            self._thread.start()

    async def close(self) -> None:
        """Stop answering and close the port."""
        if self._thread is not None and self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    while self._thread.is_alive():  # not joined in a thread: the interpreter may be exiting
                        await asyncio.sleep(0.01)
        self._listener.close()

    @staticmethod
    def _run(server: WebServer, listener: socket.socket) -> None:
        try:
            asyncio.run(server.serve(sockets=[listener]))
        except Exception:
            logger.exception("the HTTP server of sessions ended; no agent can reach the policy any more")
