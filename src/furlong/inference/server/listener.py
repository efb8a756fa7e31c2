"""An HTTP server on the event loop of the caller, whose port is open before it answers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from furlong.core.addresses import bound_socket, host_and_port
from furlong.errors import EngineError
from furlong.inference.server.connections import KEEP_ALIVE_S, build_server
from furlong.inference.server.limits import Counts

BACKLOG = 2048  # connections that wait to be accepted


class LoopServer:
    """Serves `app`. `address` is the bound host and port; port 0 chooses a free one.

    Connections that are idle for `keep_alive_s` are closed. Raises EngineError if the address cannot be bound.
    """

    def __init__(self, app: Any, host: str, port: int, counts: Counts, *, keep_alive_s: int = KEEP_ALIVE_S) -> None:
        self._listener = bound_socket(host, port)
        self._listener.listen(BACKLOG)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._server = build_server(app, counts, keep_alive_s=keep_alive_s)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer requests on the running event loop. Raises EngineError if the server exits."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
                where = host_and_port(*self.address)
                raise EngineError(f"the server of {where} exited during start-up; its log shows why")
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Stop answering and close the port."""
        self._server.should_exit = self._server.force_exit = True
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._listener.close()
