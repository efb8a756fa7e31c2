"""The process of the HTTP server of sessions: limits, protocols and streams. It imports no torch, and has no state.

It ends with the process of the run: with its end of the socket, and with its thread.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from furlong.core.garbage import map_large_blocks, raise_gc_threshold
from furlong.core.process_tree import die_with_parent
from furlong.inference.request_error import RequestError
from furlong.inference.server.bodies import CLIENT_GONE, has_left, json_response, read_object
from furlong.inference.server.limits import HEALTH_PATH, Counts, LimitRequests, RefusedError, ServerLimits
from furlong.inference.server.listener import LoopServer
from furlong.sessions.endpoints.handlers import Handler, SessionEndpoints, error_reply, key_of_client, not_found
from furlong.sessions.front.channel import Channel
from furlong.sessions.front.remote_session import RemoteSession, Run
from furlong.sessions.front.wire import sendable

KEEP_ALIVE_S = 75  # agents' tools may take long, and a client may send just when an idle connection is closed
END_S = 0.05  # for answers to be written once the run ends
MAX_WAIT_S, DEFAULT_WAIT_S = 300.0, 30.0  # that POST /sessions waits for a session


class FrontEndpoints(SessionEndpoints):
    """The routes of sessions. settings: `model_name`, and `offers`, whether applications take sessions."""

    def __init__(self, run: Run, settings: Mapping[str, Any]) -> None:
        super().__init__(model_name=settings["model_name"])
        self._run, self._settings = run, settings
        posts = {("POST", path): handler for path, handler in self.posts.items()}
        self._by_path: dict[tuple[str, str], Handler] = {**posts, ("GET", "/v1/models"): self.models}
        both = {**self._by_path, ("POST", "/end"): self._end}
        self._by_path_of_session = both | {
            (method, path.removeprefix("/v1")): both[method, path] for method, path in both
        }

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI app."""
        response = await self._answer(HttpRequest(scope, receive, send))
        await response(scope, receive, send)

    async def _answer(self, http: HttpRequest) -> Response:
        path: str = http.scope["path"]
        if path == HEALTH_PATH:
            return json_response({"status": "ok"})
        if path == "/sessions" and self._settings["has_offers"] and http.method == "POST":
            return await self._take(http)
        params = http.scope["path_params"] = dict[str, str]()
        handlers, rest = self._by_path, path
        if path.startswith("/sessions/"):
            params["id"], _, rest = path.removeprefix("/sessions/").partition("/")
            if rest.startswith("roles/"):
                params["role"], _, rest = rest.removeprefix("roles/").partition("/")
            handlers, rest = self._by_path_of_session, "/" + rest
        handler = handlers.get((http.method, rest))
        return not_found(http) if handler is None else await self.guarded(handler, http)

    async def find(self, http: HttpRequest) -> RemoteSession:
        """Return the session that the path or the key names. Raises RefusedError (401 or 404) and EndedError."""
        return await self._run.find(http.path_params.get("id", ""), key_of_client(http)[0])

    async def _end(self, _http: HttpRequest, session: Any, body: dict[str, Any]) -> Response:
        await self._run.ask("end", session.id, body)
        return json_response({"status": "ended"})

    async def _take(self, http: HttpRequest) -> Response:
        """Answer POST /sessions: the next session, or status 503 if there is none within `wait` seconds."""
        try:
            key = self._settings["offers_key"]
            if key is not None and not hmac.compare_digest(key_of_client(http)[0].encode(), key.encode()):
                raise RefusedError("the key of the session server is required: Authorization: Bearer KEY", 401)
            taken = await self._run.ask("take", _wait_of(await read_object(http)))
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except RefusedError as error:
            return error_reply(http, str(error), error.status)
        except RequestError as error:
            return error_reply(http, str(error), 400)
        if taken is None:
            text = "no session is waiting: the run trains, or all episodes are taken; ask again"
            return error_reply(http, text, 503, "no_session")
        is_gone = await has_left(http)
        self._run.channel.send("give back" if is_gone else "taken", 0, taken["id"])
        return Response(status_code=CLIENT_GONE) if is_gone else json_response(taken)


def _wait_of(body: Mapping[str, Any]) -> float:
    """Return the seconds that a request waits for a session. Raises RequestError."""
    if unknown := sorted(set(body) - {"wait"}):
        raise RequestError(f"unknown fields {unknown}; POST /sessions takes wait, in seconds")
    wait = body.get("wait", DEFAULT_WAIT_S)
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= MAX_WAIT_S:
        raise RequestError(f"wait is {wait!r:.80}; give seconds from 0 to {MAX_WAIT_S:g}")
    return float(wait)


class _LogOfRun(logging.Handler):
    """Hands records to the log of the run."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel, self._loop = channel, asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, from any thread."""
        text = sendable(self.format(record))
        self._loop.call_soon_threadsafe(self._channel.send, "log", 0, record.levelno, record.name, text)


async def serve(control: socket.socket, listener: socket.socket, settings: Mapping[str, Any]) -> None:
    """Answer HTTP requests until the other end of `control` says "close", or is closed; then end the process."""
    ended = asyncio.Event()

    def receive(message: list[Any]) -> None:
        if message[0] == "close":
            ended.set()
        else:
            run.receive(message)

    channel = Channel(receive, ended.set)
    run = Run(channel)
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=control)
    logging.basicConfig(handlers=[_LogOfRun(channel)], format="%(message)s")
    logging.getLogger("furlong").setLevel(settings["log_level"])
    logging.getLogger("uvicorn.access").propagate = False  # a line for each request
    counts = Counts(ServerLimits(**settings["limits"]))
    app = LimitRequests(FrontEndpoints(run, settings).app, counts, lambda text, status: error_reply(None, text, status))
    server = LoopServer(app, listener, counts, keep_alive_s=KEEP_ALIVE_S)
    await server.start()
    channel.send("ready", 0)
    await ended.wait()
    await asyncio.sleep(END_S)
    channel.flush()
    os._exit(0)  # no connection can make it wait


def main(words: list[str]) -> None:
    """Run the process. words: id of the parent process, descriptors of both sockets. stdin has the settings."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the run decides when it ends
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(int(words[0]))
    control, listener = (socket.socket(fileno=int(word)) for word in words[1:])
    settings = json.loads(sys.stdin.readline())
    map_large_blocks()
    gc.freeze()
    raise_gc_threshold(0)
    asyncio.run(serve(control, listener, settings))
