"""The server of the run page. Read-only: every route is a GET, and needs the token."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
import webbrowser
from collections.abc import AsyncGenerator, Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from furlong.core.addresses import bound_socket, host_and_port
from furlong.errors import ConfigError, DataError
from furlong.view.run_pages import RunPages
from furlong.view.run_reader import RunReader, runs_below

logger = logging.getLogger(__name__)

POLL_S = 1.0  # between two looks at the files of runs
MAX_CONNECTIONS = 64
EXIT_S = 3  # for answers to end once the server exits
MAX_HEADER_BYTES = 16 * 1024
STATIC = resources.files("furlong.view") / "static"
TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html; charset=utf-8"}
FILES = (
    "app.css", "app.js", "charts.js", "config.js", "elements.js", "evaluations.js", "groups.js", "overview.js",
    "runs.js", "sample.js", "samples.js", "source.js", "timeline.js",
    "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css",
)  # fmt: skip
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class RequireToken:
    """ASGI middleware: refuse requests without the token, and add `HEADERS` to every answer.

    The token is in the query of the first address; the answer moves it to a cookie, so that it leaves the address bar.
    """

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self.app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, redirect or refuse."""
        if scope["type"] != "http":
            return
        request = Request(scope)
        if self._is_right(request.query_params.get("token")):
            response: ASGIApp = RedirectResponse(request.url.path, 303)
            assert isinstance(response, Response)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        elif self._is_right(request.cookies.get(self._cookie)):
            response = self.app
        else:
            text = "This page needs the address that `furlong view` printed: it contains a token.\n"
            response = Response(text, 403, media_type="text/plain")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        await response(scope, receive, send_with_headers)

    def _is_right(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self._token.encode())


class PageApp:
    """Serves runs to browsers. `app` is the ASGI application; `close` ends the thread that follows the files.

    folders: in which runs that start later are found.
    """

    def __init__(
        self, runs: Sequence[RunReader], token: str, *, folders: Sequence[Path] = (), cookie: str = "furlong_view"
    ) -> None:
        self.pages = [RunPages(run) for run in runs]
        self._folders = folders
        self._ended = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="furlong-view", daemon=True)
        routes = [
            Route("/", self._index),
            Route("/static/{path:path}", self._static),
            Route("/api/runs", self._runs),
            Route("/api/changes", self._changes),
            Route("/api/{kind}/{number:int}", self._answer),
        ]
        handlers: Any = dict.fromkeys((DataError, ConfigError, FileNotFoundError), _explain)
        self.app: ASGIApp = RequireToken(Starlette(routes=routes, exception_handlers=handlers), token, cookie)

    def start(self) -> None:
        """Start to follow the files."""
        self._follower.start()

    def end_streams(self) -> None:
        """End the streams of changes within `POLL_S`."""
        self._ended.set()

    def close(self) -> None:
        """Stop to follow the files."""
        self._ended.set()
        for page in self.pages:
            page.samples.close()
        if self._follower.is_alive():
            self._follower.join(timeout=10.0)

    def _follow(self) -> None:
        warned: set[str] = set()
        while not self._ended.is_set():
            for step in (self.find_new_runs, *(page.refresh for page in self.pages)):
                try:
                    step()
                except (ConfigError, DataError, OSError) as error:
                    if str(error) not in warned:
                        warned.add(str(error))
                        logger.warning("%s", error)
            self._ended.wait(POLL_S)

    def find_new_runs(self) -> None:
        """Open the runs that have started in the folders. Raises ConfigError for one that cannot be read."""
        known = {page.run.folder for page in self.pages}
        for path in (path for folder in self._folders for path in runs_below(folder)):
            if path not in known:
                self.pages.append(RunPages(RunReader(path)))

    async def _index(self, _: Request) -> Response:
        return Response((STATIC / "index.html").read_bytes(), media_type=TYPES["html"])

    async def _static(self, request: Request) -> Response:
        path = request.path_params["path"]
        if path not in FILES:
            raise HTTPException(404)
        file = STATIC.joinpath(*path.split("/"))
        return Response(file.read_bytes(), media_type=TYPES[path.rpartition(".")[2]])

    async def _runs(self, _: Request) -> Response:
        return _json([page.run.summary() for page in self.pages])

    async def _answer(self, request: Request) -> Response:
        kind, number = request.path_params["kind"], request.path_params["number"]
        if number >= len(self.pages) or kind not in self.pages[number].kinds:
            raise HTTPException(404)
        return _json(await run_in_threadpool(self.pages[number].answer, kind, dict(request.query_params)))

    async def _changes(self, _: Request) -> Response:
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncGenerator[bytes]:
        """Yield an event whenever a run has new steps, events or samples, and a comment at least every 15 s."""
        sent: Any = None
        quiet_s = 0.0
        while not self._ended.is_set():
            now = [[*page.run.stamp, page.run.state()] for page in self.pages]
            if now != sent or quiet_s >= 15.0:
                yield b": still here\n\n" if now == sent else b"data: " + orjson.dumps(now) + b"\n\n"
                sent, quiet_s = now, 0.0
            await asyncio.sleep(POLL_S / 2)
            quiet_s += POLL_S / 2


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS), media_type="application/json")


async def _explain(_: Request, error: Exception) -> Response:
    return Response(orjson.dumps({"error": str(error)}), 400, media_type="application/json")


class _Server(uvicorn.Server):
    """A server that ends the streams of changes when it exits; uvicorn would wait for them and then cancel them."""

    def __init__(self, config: uvicorn.Config, pages: PageApp) -> None:
        super().__init__(config)
        self._pages = pages

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then the server."""
        self._pages.end_streams()
        await super().shutdown(sockets)


def serve_page(
    runs: Sequence[RunReader],
    *,
    folders: Sequence[Path],
    host: str,
    port: int,
    opens_browser: bool,
    announce: Callable[[str], None],
) -> None:
    """Serve the runs, and those that start in the folders, and pass the address with the token to `announce`.

    Returns after a signal. Raises EngineError if the address cannot be bound.
    """
    listener = bound_socket(host, port)
    token, bound_port = secrets.token_urlsafe(18), listener.getsockname()[1]
    pages = PageApp(
        runs, token, folders=folders, cookie=f"furlong_view_{bound_port}"
    )  # cookies do not distinguish ports
    config = uvicorn.Config(
        pages.app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=EXIT_S,
    )
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{host_and_port(shown, bound_port)}/?token={token}{'#runs' if folders else ''}"
    pages.start()
    listener.listen()  # browsers wait until it answers
    try:
        announce(url)
        if opens_browser:
            webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):
            _Server(config, pages).run(sockets=[listener])
    finally:
        pages.close()
        listener.close()
