"""An HTTP server on the event loop of the caller, whose port is open before it answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from furlong.core.addresses import bound_socket, host_and_port
from furlong.core.garbage import return_free_memory
from furlong.errors import EngineError
from furlong.inference.server.connections import KEEP_ALIVE_S, build_server
from furlong.inference.server.limits import Counts

IDLE_S = 1.0  # between two checks whether the server is idle
BACKLOG = 2048  # connections that wait to be accepted


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket on which connections wait to be accepted. Port 0 chooses a free one.

    Raises EngineError if the address cannot be bound.
    """
    listener = bound_socket(host, port)
    listener.listen(BACKLOG)
    return listener


async def trim_when_idle(counts: Counts) -> None:
    """Return the memory of requests to the system whenever they are answered."""
    num_before = 0
    while True:
        await asyncio.sleep(IDLE_S)
        if counts.is_idle and counts.num_bodies != num_before:
            num_before = counts.num_bodies
            await asyncio.to_thread(return_free_memory)


class LoopServer:
    """Serves `app` on a listening socket, and closes connections that are idle for `keep_alive_s`."""

    def __init__(self, app: Any, listener: socket.socket, counts: Counts, *, keep_alive_s: int = KEEP_ALIVE_S) -> None:
        self._listener = listener
        self._server = build_server(app, counts, keep_alive_s=keep_alive_s)
        self._counts = counts
        self._task: asyncio.Task[None] | None = None
        self._trimming: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer requests on the running event loop. Raises EngineError if the server exits."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        self._trimming = asyncio.create_task(trim_when_idle(self._counts))
        while not self._server.started:
            if self._task.done():
                await self._task
                where = host_and_port(*self._listener.getsockname()[:2])
                raise EngineError(f"the server of {where} exited during start-up; its log shows why")
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Stop answering and close the port."""
        self._server.should_exit = self._server.force_exit = True
        if self._trimming is not None:
            self._trimming.cancel()
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._listener.close()
