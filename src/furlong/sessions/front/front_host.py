"""Starts the process of the HTTP server of sessions, and starts it again if it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from furlong.errors import EngineError
from furlong.sessions.front.channel import Channel

START_S, STOP_S = 60.0, 2.0  # until it answers, and until it has ended
MAX_ENDS, WITHIN_S = 3, 60.0  # ends of the process in that time are too many
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
    "from furlong.sessions.front.front_process import main\n"
    "main(sys.argv[2:])"
)

logger = logging.getLogger(__name__)


class FrontHost:
    """The process that answers on `listener`. `receive` is called with each of its messages, `lost` when it ends.

    settings: what it needs to know. `failure` says why it is not started again; "" while it is.
    """

    def __init__(
        self,
        listener: socket.socket,
        settings: Mapping[str, Any],
        receive: Callable[[list[Any]], None],
        lost: Callable[[], None],
    ) -> None:
        self._listener, self._settings = listener, settings
        self._receive_message, self._lost = receive, lost
        self.failure = ""
        self._is_started = self._is_closing = False
        self._channel: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    def send(self, *message: Any) -> None:
        """Send a message; nothing if the process is not there, because then nobody waits for it."""
        if self._channel is not None:
            self._channel.send(*message)

    async def start(self) -> None:
        """Start the process and wait until it answers, unless it was started. Raises EngineError if it ends before."""
        if self._is_started:
            return
        self._is_started = True
        process = await self._start()
        self._watching = asyncio.create_task(self._watch(process))

    def start_soon(self) -> None:
        """Start the process unless it was started; clients wait for it. `failure` tells if it ends."""
        if not self._is_started:
            self._is_started = True
            self._watching = asyncio.create_task(self._watch(None))

    async def close(self) -> None:
        """End the process. The port is closed."""
        self._is_closing = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._channel is not None:
            self._channel.send("close", 0)
            self._channel.flush()
        if self._process is not None:
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                logger.warning("the process of the session server did not end within %g s; it is killed", STOP_S)
                self._kill()
                await self._process.wait()
        if self._channel is not None:
            self._channel.close()
        self._listener.close()

    async def _start(self) -> asyncio.subprocess.Process:
        ours, theirs = socket.socketpair()
        self._ready.clear()
        descriptors = theirs.fileno(), self._listener.fileno()
        try:
            with theirs:
                process = self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", _BOOT, json.dumps(sys.path), str(os.getpid()), *map(str, descriptors),
                    stdin=asyncio.subprocess.PIPE, pass_fds=descriptors,
                )  # fmt: skip
            if self._is_closing:
                raise EngineError("the session server was closed while it started")
            assert process.stdin is not None
            process.stdin.write(json.dumps(self._settings).encode() + b"\n")
            channel = self._channel = Channel(self._receive, lambda: self._end(channel))
            await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours)
        except BaseException:
            ours.close()
            self._kill()
            raise
        waiting = [asyncio.create_task(self._ready.wait()), asyncio.create_task(process.wait())]
        try:
            await asyncio.wait(waiting, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.is_set():
                raise EngineError(
                    f"the process of the session server {_ending(process)} before it answered; its messages are above"
                )
        except BaseException:
            self._kill()
            raise
        finally:
            for task in waiting:
                task.cancel()
        return process

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _watch(self, process: asyncio.subprocess.Process | None) -> None:
        """Start the process, if it is None or when it ends, unless it ends often."""
        ends = list[float]()
        while True:
            try:
                process = process or await self._start()
                await process.wait()
                text = f"the process of the session server {_ending(process)}"
            except (EngineError, OSError) as error:
                text = str(error)
            process, now = None, time.monotonic()
            ends = [*(each for each in ends if now - each < WITHIN_S), now]
            if len(ends) >= MAX_ENDS:
                self.failure = f"{text}, the last of {len(ends)} ends in {WITHIN_S:g} s"
                logger.error("%s; no agent can reach the policy any more", self.failure)
                self._listener.close()
                return
            logger.warning("%s; it is started again, and clients must repeat the requests in flight", text)

    def _receive(self, message: list[Any]) -> None:
        match message:
            case ["ready", *_]:
                self._ready.set()
            case ["log", _, level, name, text]:
                logging.getLogger(name).log(level, "%s", text)
            case _:
                self._receive_message(message)

    def _end(self, channel: Channel) -> None:
        if self._channel is channel:
            self._channel = None
            if not self._is_closing:
                self._lost()


def _ending(process: asyncio.subprocess.Process) -> str:
    code = process.returncode
    if code is None:
        return f"did not answer within {START_S:g} s"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
