"""Answers to requests of all protocols: each finds its session, calls the policy, and writes the reply."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import xxhash
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from furlong.chat.messages import MessageError
from furlong.errors import EngineError, RolloutError
from furlong.inference.request_error import RequestError
from furlong.inference.server.bodies import (
    CLIENT_GONE,
    RAW,
    SMALL_BYTES,
    has_left,
    json_response,
    printable,
    read_object,
)
from furlong.inference.server.events import event_stream, sse
from furlong.inference.server.limits import RefusedError, RequestGuard
from furlong.sessions.endpoints import anthropic_messages, chat_completions, responses, sglang_generate, token_generate
from furlong.sessions.endpoints.client_call import ClientCall, check_model
from furlong.sessions.endpoints.served_session import RunningCall, ServedSession, StreamHead, StreamPart
from furlong.sessions.reply import Reply
from furlong.sessions.role_names import check_role
from furlong.sessions.session_errors import EndedError, FullContextError

RETRY_HEADER = b"x-stainless-retry-count"
HEADERS = "furlong.headers"  # key of the scope of a request: its headers as a dictionary

logger = logging.getLogger(__name__)

Handler = Callable[[HttpRequest, ServedSession, dict[str, Any]], Awaitable[Response]]


def key_of_client(http: HttpRequest) -> tuple[str, str]:
    """Return the key that a client sent, "" if it sent none, and the role after it."""
    headers = _headers_of(http)
    bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
    key, _, role = (headers.get(b"x-api-key") or bearer).decode("latin-1").partition(":")
    return key, role


def _headers_of(http: HttpRequest) -> dict[bytes, bytes]:
    """Return the headers by lower-case name, the first of each. Each look-up in `http.headers` searches a list."""
    if (headers := http.scope.get(HEADERS)) is None:
        headers = http.scope[HEADERS] = dict(reversed(http.scope["headers"]))
    return headers


def _role_of(http: HttpRequest) -> str:
    """Return the role that the path or the key names. Raises RefusedError (400)."""
    role = str(http.path_params.get("role") or key_of_client(http)[1])
    try:
        if role:
            check_role(role)
    except RolloutError as error:
        raise RefusedError(str(error), 400) from None
    return role


class SessionEndpoints(ABC):
    """Handlers of the protocols. model_name: the name that clients may give as `model`; None for any name."""

    def __init__(self, *, model_name: str | None) -> None:
        self._asked_name, self.model_name = model_name, model_name or "default"

    @abstractmethod
    async def find(self, http: HttpRequest) -> ServedSession:
        """Return the session of a request. Raises RefusedError (401 or 404) and EndedError."""

    def check_model(self, asked: Any) -> None:
        """Raise RequestError for a model that is not served."""
        if self._asked_name is not None:
            check_model(asked, self._asked_name)

    @property
    def posts(self) -> dict[str, Handler]:
        """Handlers of POST by path."""
        return {
            "/v1/chat/completions": self.chat,
            "/v1/messages": self._messages,
            "/v1/messages/count_tokens": self._count_tokens,
            "/v1/responses": self._responses,
            "/inference/v1/generate": self._generate,
            "/generate": self._sglang_generate,
        }

    async def guarded(self, handler: Handler, http: HttpRequest) -> Response:
        """Find the session, parse the body, and turn errors into JSON replies of the protocol."""
        guard: RequestGuard = http.state.guard
        try:
            async with asyncio.timeout_at(guard.deadline_s):
                session = await self.find(http)
                body = await read_object(http)
                if guard.body_bytes > SMALL_BYTES and handler in self.posts.values():  # converted on the event loop
                    await session.check_size(body)
                return await handler(http, session, body)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # noqa: BLE001  answered
            reply = _reply_of_error(http, error)
            error.with_traceback(None)  # its frames have the body; if one has the future of this error, it is a cycle
            return reply
        finally:
            http.scope.pop(RAW, None)  # a connection has its last request until the next one

    def _call(self, http: HttpRequest, session: ServedSession, call: ClientCall) -> RunningCall:
        """Start a call, or return the one that a client's retry repeats."""
        role = _role_of(http)
        key = f"{role} {http.scope['path']} {xxhash.xxh3_128_hexdigest(http.scope[RAW])}"
        is_retry = _headers_of(http).get(RETRY_HEADER, b"0") not in (b"", b"0")
        return session.call(call, role=role, key=key, is_retry=is_retry)

    async def _answered(self, http: HttpRequest, session: ServedSession, call: ClientCall) -> list[Reply]:
        """Return the replies of a call; a client's retry gets those of the first attempt.

        The engine's call belongs to the session, and continues if the client disconnects.
        """
        running = self._call(http, session, call)
        replies = await running.replies()
        if await has_left(http):
            running.missed()
        return replies

    async def _streamed(
        self,
        http: HttpRequest,
        session: ServedSession,
        call: ClientCall,
        write: Callable[[AsyncIterator[StreamPart], Sequence[StreamHead]], AsyncGenerator[bytes]],
    ) -> Response:
        """Reply with the events that `write` makes of a call's parts; errors before the first one raise."""
        guard: RequestGuard = http.state.guard
        running = self._call(http, session, call)
        await running.begun()
        if await has_left(http):
            running.missed()
            raise ClientDisconnect
        parts = running.parts(guard.deadline_s)
        return event_stream(guard, _with_errors(http, write(parts, running.streams), parts))

    async def chat(self, http: HttpRequest, session: ServedSession, body: dict[str, Any]) -> Response:
        """Answer POST /v1/chat/completions."""
        call = chat_completions.read(body)
        self.check_model(body.get("model"))
        if call.is_stream:
            write = functools.partial(chat_completions.stream, call, self.model_name)
            return await self._streamed(http, session, call, write)
        replies = await self._answered(http, session, call)
        return json_response(chat_completions.write(call, replies, self.model_name))

    async def _messages(self, http: HttpRequest, session: ServedSession, body: dict[str, Any]) -> Response:
        call = anthropic_messages.read(body)
        self.check_model(body.get("model"))
        if call.is_stream:
            write = functools.partial(anthropic_messages.stream, self.model_name)
            return await self._streamed(http, session, call, write)
        (reply,) = await self._answered(http, session, call)
        return json_response(anthropic_messages.write(reply, self.model_name))

    async def _count_tokens(self, _http: HttpRequest, session: ServedSession, body: dict[str, Any]) -> Response:
        call = anthropic_messages.read(body, counts_only=True)
        self.check_model(body.get("model"))
        return json_response({"input_tokens": await session.count_tokens(call)})

    async def _responses(self, http: HttpRequest, session: ServedSession, body: dict[str, Any]) -> Response:
        previous = body.get("previous_response_id")
        call = responses.read(body, [] if previous is None else await session.earlier(previous))
        self.check_model(body.get("model"))
        if call.is_stream:
            write = functools.partial(responses.stream, call, self.model_name)
            return await self._streamed(http, session, call, write)
        (reply,) = await self._answered(http, session, call)
        return json_response(responses.write(call, reply, self.model_name))

    async def _generate(self, http: HttpRequest, session: ServedSession, body: dict[str, Any]) -> Response:
        call = token_generate.read(body)
        self.check_model(body.get("model"))
        return json_response(token_generate.write(call, await self._answered(http, session, call)))

    async def _sglang_generate(self, http: HttpRequest, session: ServedSession, body: dict[str, Any]) -> Response:
        call = sglang_generate.read(body)
        replies = await self._answered(http, session, call)
        return json_response(sglang_generate.write(call, replies))

    async def models(self, _http: HttpRequest, session: ServedSession, _body: dict[str, Any]) -> Response:
        """Answer GET /v1/models."""
        length = session.context_len
        model = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "furlong", "max_model_len": length}
        return json_response({"object": "list", "data": [model]})


def _reply_of_error(http: HttpRequest, error: Exception) -> Response:
    match error:
        case TimeoutError():
            return error_reply(http, f"not answered within {http.state.guard.limits.request_timeout} s", 504)
        case EndedError():
            return error_reply(http, str(error), 410, "session_ended")
        case FullContextError():
            return error_reply(http, str(error), 400, "context_length_exceeded")
        case RefusedError():
            code = "rate_limit_exceeded" if error.status == 429 else None
            return error_reply(http, str(error), error.status, code)
        case RequestError() | MessageError():
            return error_reply(http, str(error), 400)
        case EngineError() | RolloutError():
            return error_reply(http, str(error), 500)
        case _:
            logger.error("%s %s", http.method, http.url.path[:200], exc_info=error)
            return error_reply(http, f"{type(error).__name__}: {error}; the log has the traceback", 500)


async def _with_errors(
    http: HttpRequest, events: AsyncGenerator[bytes], parts: AsyncGenerator[StreamPart]
) -> AsyncGenerator[bytes]:
    """Forward events; an error after the first one is an event too. The parts end with their reader."""
    async with contextlib.aclosing(parts), contextlib.aclosing(events):
        try:
            async for event in events:
                yield event
        except (EngineError, RolloutError, TimeoutError) as error:
            text = str(error) or "not answered in time"
            code = "session_ended" if isinstance(error, EndedError) else None
            status = 410 if isinstance(error, EndedError) else 500
            kind = b"" if http.url.path.endswith("/chat/completions") else b"event: error\n"
            yield kind + sse(error_body(http, text, status, code))


def not_found(http: HttpRequest) -> Response:
    """Answer a request for a path that there is not."""
    return error_reply(http, f"{http.method} {http.url.path[:200]} is not served here", 404)


def error_reply(http: HttpRequest | None, message: str, status: int, code: str | None = None) -> Response:
    """Return an error in the form of Anthropic for its path, and of OpenAI otherwise."""
    return json_response(error_body(http, message, status, code), status)


def error_body(http: HttpRequest | None, message: str, status: int, code: str | None) -> dict[str, Any]:
    """Return the body of an error."""
    text = printable(message)
    if http is not None and "/messages" in http.url.path:
        return anthropic_messages.error(text, status)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}
