"""HTTP of furlong's servers: uvicorn with its own settings, JSON within limits, and errors as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import orjson
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from furlong.core.addresses import bound_socket, is_loopback, split_port
from furlong.errors import EngineError, RolloutError
from furlong.inference.request_error import RequestError
from furlong.inference.server.schemas import shorten

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

MIB = 1 << 20
HEALTH_PATH = "/health"  # without limits and without a key
BACKLOG = 2048  # connections that wait to be accepted
KEEP_ALIVE_S = 75  # agents' tools may take long, and a client may send just when an idle connection is closed
GRACE_S = 2  # for answers to end once a server exits
STOP_S = 5.0  # for the thread of a server to end
SMALL_BYTES = 32 * 1024  # bodies and texts up to this size are processed on the event loop
MESSAGE_CHARS = 1000  # of an error
CLIENT_GONE = 499  # status of replies that nobody receives
DONE = b"data: [DONE]\n\n"


class RefusedError(RequestError):
    """A request exceeds a limit, or may not be made. `status` is that of the reply."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _limit(default: int, text: str) -> Any:
    """A field that is also the flag of the same name; `text` is its help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server. Each field is a flag of `furlong serve`."""

    max_body_bytes: int = _limit(256 * MIB, "bytes of a request body")
    max_connections: int = _limit(8192, "open connections; further ones get status 503")
    max_concurrent_requests: int = _limit(4096, "requests in progress; further ones get status 429")
    max_total_samples: int = _limit(65536, "running and queued samples of all requests")
    request_timeout: int = _limit(3600, "seconds for a request and its answer")


def flag_of(name: str) -> str:
    """Return the flag of a field of `ServerLimits`."""
    return "--" + name.replace("_", "-")


class Gate:
    """ASGI middleware: check the key, and refuse requests beyond the limit of concurrent ones, except to /health.

    api_key: sent as `Authorization: Bearer <key>`; None for no key, where web pages are refused instead, unless each
    request needs a key (`has_own_keys`).
    """

    def __init__(
        self, app: ASGIApp, limits: ServerLimits, api_key: str | None = None, *, has_own_keys: bool = False
    ) -> None:
        self._app, self._limits = app, limits
        self._checks_origin = api_key is None and not has_own_keys
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and forward it."""
        if scope["type"] != "http" or scope["path"] == HEALTH_PATH:
            await self._app(scope, receive, send)
            return
        refusal = None
        if self._key is not None:
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(sent, self._key):
                refusal = "a valid API key is required: Authorization: Bearer <key>", 401
        elif self._checks_origin and (sender := web_page_of(Headers(scope=scope))):
            text = (
                "a server without an API key does not answer web pages of other sites; use http://127.0.0.1, or a key"
            )
            refusal = f"{sender}: {text}", 403
        limit = self._limits.max_concurrent_requests
        if refusal is None and self._num_open >= limit:
            refusal = f"{limit} requests are open, the limit of --max-concurrent-requests; retry later", 429
        if refusal is not None:
            await error_response(scope["path"], *refusal)(scope, receive, send)
            return
        self._num_open += 1
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:  # uvicorn cancels requests only when it exits, and would log a traceback
            logger.info("%s %s was cancelled: the server exits", scope["method"], scope["path"][:200])
        finally:
            self._num_open -= 1


def web_page_of(headers: Headers) -> str:
    """Return the header that shows that a page of another site may have sent a request; "" without one.

    A browser sends requests of any page to this machine. The name of the server in them may be that of the page, which
    its owner lets point here (DNS rebinding), so only names of the loopback interface are accepted.
    """
    host, origin, site = (headers.get(name, "") for name in ("host", "origin", "sec-fetch-site"))
    if host and not is_loopback((split_port(host)[0] or host).lower()):
        return f"Host: {shorten(host, 200)}"
    if origin and origin.partition("://")[2] != host:
        return f"Origin: {shorten(origin, 200)}"
    return f"Sec-Fetch-Site: {site}" if site in ("cross-site", "same-site") else ""


def answering(handler: Handler, limits: ServerLimits) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return an endpoint that ends at the time limit, and turns errors into JSON. `http.state.deadline_s` is set."""

    async def endpoint(http: Request) -> Response:
        http.state.limits = limits
        http.state.deadline_s = asyncio.get_running_loop().time() + limits.request_timeout
        try:
            async with asyncio.timeout_at(http.state.deadline_s):
                return await handler(http)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # noqa: BLE001  answered
            return reply_of_error(http, error)

    return endpoint


def status_of(error: Exception) -> int:
    """Return the status of a reply: that of the error's class, 500 if it has none."""
    return int(getattr(error, "status", 504 if isinstance(error, TimeoutError) else 500))


def reply_of_error(http: Request, error: Exception) -> Response:
    """Return the reply of a request that failed; unexpected errors are logged."""
    text = str(error)
    if isinstance(error, TimeoutError):
        limit = f"{http.state.limits.request_timeout} s (--request-timeout)"
        text = f"{http.method} {http.url.path[:200]} was not answered within {limit}"
    elif not isinstance(error, EngineError | RolloutError):
        logger.error("%s %s", http.method, http.url.path[:200], exc_info=error)
        text = f"{type(error).__name__}: {error}; the log of the engine has the traceback"
    body = error_body(http.url.path, text, status_of(error), *details_of(error))
    response = json_response(body, status_of(error))
    response.headers.update(getattr(error, "headers", {}))
    return response


def details_of(error: Exception) -> tuple[str | None, str | None]:
    """Return the code of an error in OpenAI's API, and the field that it is about."""
    return getattr(error, "api_code", None), getattr(error, "param", None)


def error_body(
    path: str, message: str, status: int, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Return the body of an error, in the form of Anthropic for its path, and of OpenAI otherwise."""
    text = shorten(message, MESSAGE_CHARS).encode("utf-8", "replace").decode()
    if "/messages" in path:
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status == 400 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": text}}
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = "rate_limit_exceeded" if status == 429 and code is None else code
    return {"error": {"message": text, "type": kind, "param": param, "code": status if code is None else code}}


def error_response(path: str, message: str, status: int, code: str | None = None) -> Response:
    """A JSON reply with an error; long messages are cut."""
    return json_response(error_body(path, message, status, code), status)


async def not_found(http: Request, error: Exception) -> Response:
    """Answer a request for a path, or a method of one, that is not served."""
    path, status = http.url.path, int(getattr(error, "status_code", 404))
    return error_response(path, f"{http.method} {path[:200]} is not served here", status)


def json_response(content: Any, status_code: int = 200) -> Response:
    """A JSON reply; NaN becomes null."""
    return Response(orjson.dumps(content), status_code, media_type="application/json")


async def json_reply(build: Callable[[], Any], *, size: int) -> Response:
    """A JSON reply of what `build` returns; a large one (`size` is an estimate in bytes) is built in a thread."""
    return await off_loop(size, lambda: json_response(build()))


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function`, in a thread if the `size` of its input (bytes or characters) is large."""
    if size <= SMALL_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


async def read_body(http: Request) -> bytearray:
    """Read the body of a request. Raises RefusedError if it is too large, and ClientDisconnect."""
    limit = http.state.limits.max_body_bytes
    declared, raw = http.headers.get("content-length", "0"), bytearray()
    if declared.isdecimal() and len(declared) < 20 and int(declared) <= limit:
        async for part in http.stream():
            raw += part
            if len(raw) > limit:
                break
        else:
            return raw
    raise RefusedError(
        f"the body has more than {limit} bytes; send several smaller requests, or start the server with a larger "
        "--max-body-bytes",
        413,
    )


async def read_object(http: Request) -> dict[str, Any]:
    """Read and decode the JSON object of a request; {} for an empty body. Raises RequestError for anything else."""
    raw = await read_body(http)
    return await off_loop(len(raw), decode_object, raw) if raw else {}


def decode_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Decode a JSON object. Raises RequestError for other JSON."""
    try:
        body: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {type(body).__name__}")
    return body  # pyright: ignore[reportUnknownVariableType]


async def unless_left(http: Request, work: Awaitable[T]) -> T:
    """Return what `work` returns. If the client disconnects first, cancel it and raise ClientDisconnect."""
    task = asyncio.ensure_future(work)

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def sse(event: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(event) + b"\n\n"


def event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    """Reply with server-sent events."""
    return StreamingResponse(events, media_type="text/event-stream")


class WebServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Leave signals alone."""
        yield


def build_server(app: ASGIApp, limits: ServerLimits) -> WebServer:
    """Return a server of `app`, which listens on sockets that the caller binds."""
    return WebServer(
        uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            limit_concurrency=limits.max_connections,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )


class HttpThread:
    """Serves `app` in a thread with its own event loop: that of the run may be busy.

    The port is open from the start, and `start` answers.
    """

    def __init__(self, app: ASGIApp, limits: ServerLimits, *, host: str, port: int) -> None:
        self._server = build_server(app, limits)
        self._listener = bound_socket(host, port)
        self._listener.listen(BACKLOG)  # connections wait to be accepted
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
