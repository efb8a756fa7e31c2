"""JSON in and out: bodies are read within limits, and large ones are decoded, parsed and encoded in threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from furlong.inference.request_error import RequestError
from furlong.inference.server.fields import shorten
from furlong.inference.server.limits import RefusedError, RequestGuard, flag_of

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

SMALL_BYTES = 32 * 1024  # bodies and texts up to this size are processed on the event loop
MAX_CONTAINERS = 1_000_000  # lists and objects in a body; each takes 64 bytes or more
PIECE_BYTES = 64 * 1024  # of a reply, at least
MESSAGE_CHARS = 1000  # of an error
CLIENT_GONE = 499  # status of replies that nobody receives
RAW = "furlong.raw"  # key of the scope of a request whose body was read: its bytes
WHOLE = "furlong.whole"  # key of the scope of a request that arrived whole: what answers it


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function`, in a thread if the `size` of its input (bytes or characters) is large."""
    if size <= SMALL_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


async def read_object(http: HttpRequest) -> dict[str, Any]:
    """Read and decode the JSON object of a request; {} for an empty body. Its bytes are in the scope as RAW.

    Raises RequestError for anything else, RefusedError at a limit, and ClientDisconnect.
    """
    guard: RequestGuard = http.state.guard
    raw = http.scope[RAW] = await _read(http, guard)
    if not raw:
        return {}
    return await off_loop(len(raw), decode_object, raw, guard.limits.max_json_depth)


async def has_left(http: HttpRequest) -> bool:
    """Return whether the client has disconnected; the body must have been read."""
    whole = http.scope.get(WHOLE)
    return await http.is_disconnected() if whole is None else whole.disconnected


async def _read(http: HttpRequest, guard: RequestGuard) -> bytes | bytearray:
    if WHOLE in http.scope:
        message = await http.receive()  # does not wait
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        guard.add_body(len(message["body"]))
        return message["body"]
    declared = http.headers.get("content-length", "0")
    guard.check_declared(int(declared) if declared.isdecimal() else 0)
    raw = bytearray()
    try:
        async with asyncio.timeout(guard.limits.body_timeout):
            async for part in http.stream():
                guard.add_body(len(part))
                raw += part
    except TimeoutError as error:
        raise RefusedError(
            f"the body did not arrive within {guard.limits.body_timeout} s ({flag_of('body_timeout')}): "
            f"{len(raw)} bytes did",
            408,
        ) from error
    except ClientDisconnect:
        logger.debug("%s %s: the client disconnected after %d bytes", http.method, http.url.path[:200], len(raw))
        raise
    return raw


def decode_object(raw: bytes | bytearray, max_depth: int) -> dict[str, Any]:
    """Decode a JSON object. Raises RequestError for other JSON, too many containers, and too deep nesting."""
    if (count := raw.count(b"[") + raw.count(b"{")) > MAX_CONTAINERS:
        raise RequestError(f"the body has {count} lists and objects, the limit is {MAX_CONTAINERS}; send less at once")
    try:
        body: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {type(body).__name__}")
    if count > max_depth:
        _check_depth(body, max_depth)  # pyright: ignore[reportUnknownArgumentType]
    return body  # pyright: ignore[reportUnknownVariableType]


def _check_depth(body: dict[str, Any], max_depth: int) -> None:
    """Raise RequestError for containers nested deeper than `max_depth`, level by level."""
    level: list[Any] = [body]
    depth = 0
    while level:
        depth += 1
        if depth > max_depth:
            raise RequestError(
                f"the body is nested more than {max_depth} deep; flatten it, or start the server with a larger "
                f"{flag_of('max_json_depth')}"
            )
        level = [
            value
            for container in level
            for value in (container.values() if isinstance(container, dict) else container)
            if isinstance(value, dict | list)
        ]


def json_response(content: Any, status_code: int = 200) -> Response:
    """A JSON reply; NaN becomes null."""
    return Response(orjson.dumps(content), status_code, media_type="application/json")


async def json_reply(
    guard: RequestGuard,
    parts: Sequence[T],
    build: Callable[[T], Any],
    *,
    size: int,
    before: bytes = b"",
    after: bytes = b"",
) -> Response:
    """A JSON reply of `before`, `build(part)` for each part with commas in between, and `after`.

    size: estimate in bytes; large replies are built and encoded in a thread, element by element, so that the event loop
    runs in between. Raises RefusedError if clients leave too many bytes of replies unread.
    """

    def encode() -> list[bytes]:
        pieces, num_bytes = [before], len(before) + len(after)
        for number, part in enumerate(parts):
            pieces.append((b"," if number else b"") + orjson.dumps(build(part)))
            num_bytes += len(pieces[-1])
            guard.check_reply(num_bytes)
        return [*pieces, after]

    pieces = await off_loop(size, encode)
    guard.add_reply(sum(map(len, pieces)))
    return _PiecewiseResponse(pieces)


async def json_list(
    guard: RequestGuard, parts: Sequence[T], build: Callable[[T], Any], *, size: int, as_list: bool
) -> Response:
    """A JSON reply with the list of `build(part)`, or the only one; see `json_reply`."""
    before, after = (b"[", b"]") if as_list else (b"", b"")
    return await json_reply(guard, parts, build, size=size, before=before, after=after)


class _PiecewiseResponse(Response):
    """A JSON reply that is handed to the connection only as fast as the client reads."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces = pieces[::-1]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  of ASGI
        """Send the pieces; each is released once it was sent."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while self._pieces:
            piece = self._next()
            await send({"type": "http.response.body", "body": piece, "more_body": bool(self._pieces)})

    def _next(self) -> bytes:
        """Join small pieces, up to `PIECE_BYTES`."""
        joined = bytearray()
        while self._pieces and len(joined) < PIECE_BYTES:
            joined += self._pieces.pop()
        return bytes(joined)


def error_response(message: str, code: int) -> Response:
    """A JSON reply with an error; long messages are cut."""
    kind = "invalid_request_error" if code < 500 else "server_error"
    return json_response({"error": {"message": printable(message), "type": kind, "code": code}}, code)


def printable(message: str) -> str:
    """Return a message in at most `MESSAGE_CHARS` characters that JSON can represent."""
    return shorten(message, MESSAGE_CHARS).encode("utf-8", "replace").decode()
