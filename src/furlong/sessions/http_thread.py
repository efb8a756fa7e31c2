"""An HTTP server in a thread of the run, with an event loop of its own: the run's loop may be busy."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from starlette.types import ASGIApp

from furlong.errors import RolloutError
from furlong.inference.server.web import ServerLimits, build_server, listening_socket

STOP_S = 5.0

logger = logging.getLogger(__name__)


class HttpThread:
    """Serves `app`. The port is open from the start, and `start` answers."""

    def __init__(self, app: ASGIApp, limits: ServerLimits, *, host: str, port: int) -> None:
        self._server = build_server(app, limits)
        self._listener = listening_socket(host, port)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Answer requests, unless it does already. Raises RolloutError if the thread has ended."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="furlong-http", daemon=True)
            self._thread.start()
        elif not self._thread.is_alive():
            reason = "it was closed" if self._error is None else f"{type(self._error).__name__}: {self._error}"
            raise RolloutError(
                f"the HTTP server at port {self.address[1]} ended ({reason}), so that no agent can reach the policy; "
                "the log has the traceback: resume the run"
            ) from self._error

    async def close(self) -> None:
        """Stop answering and close the port."""
        self._server.should_exit = self._server.force_exit = True
        deadline = time.monotonic() + STOP_S
        while self._thread is not None and self._thread.is_alive():  # not joined: the interpreter may be exiting
            if time.monotonic() > deadline:
                logger.warning("the HTTP server at port %d did not stop within %g s", self.address[1], STOP_S)
                break
            await asyncio.sleep(0.01)
        self._listener.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._listener]))
        except BaseException as error:
            self._error = error
            logger.exception("the HTTP server at port %d ended; no agent can reach the policy", self.address[1])
            self._listener.close()  # clients are refused, and do not wait
