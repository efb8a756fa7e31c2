"""Answers to requests of all protocols: each finds its session, calls the policy, and writes the reply.

Requests are read and replies written on the event loop of the HTTP server; sessions live on that of the run.
"""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from furlong.chat.messages import num_chars
from furlong.errors import EngineError, RolloutError
from furlong.inference.server.openai_api import check_model
from furlong.inference.server.web import (
    SMALL_BYTES,
    Handler,
    RefusedError,
    ServerLimits,
    answering,
    decode_object,
    error_body,
    error_response,
    event_stream,
    json_response,
    off_loop,
    read_body,
    sse,
    status_of,
)
from furlong.sessions.open_session import Call, ClientCall, OpenSession, StreamPart
from furlong.sessions.protocols import chat, messages, responses, tokens
from furlong.sessions.session import EndedError, Reply, check_role

RETRY_HEADER = "x-stainless-retry-count"
T = TypeVar("T")


@dataclass(frozen=True)
class Protocol:
    """How requests are read, and replies written; `stream` is None without streams."""

    read: Callable[..., ClientCall]
    write: Callable[[ClientCall, Sequence[Reply], str], Any]
    stream: Callable[..., AsyncGenerator[bytes]] | None = None


PROTOCOLS: Mapping[str, Protocol] = {
    "/v1/chat/completions": Protocol(chat.read, chat.write, chat.stream),
    "/v1/messages": Protocol(messages.read, messages.write, messages.stream),
    "/v1/responses": Protocol(responses.read, responses.write, responses.stream),
    "/inference/v1/generate": Protocol(tokens.read_vllm, tokens.write_vllm),
    "/generate": Protocol(tokens.read_sglang, tokens.write_sglang),
}


def key_of_client(http: HttpRequest) -> tuple[str, str]:
    """Return the key that a client sent, "" if it sent none, and the role after it."""
    bearer = http.headers.get("authorization", "").removeprefix("Bearer ")
    key, _, role = (http.headers.get("x-api-key") or bearer).partition(":")
    return key, role


class SessionEndpoints(ABC):
    """Handlers of the protocols. model_name: the name that clients may give as `model`; None for any name.

    loop: the event loop of the sessions; None if it is that of the HTTP server.
    """

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, *, model_name: str | None, limits: ServerLimits) -> None:
        self._asked_name, self._model_name, self._limits = model_name, model_name or "default", limits

    @abstractmethod
    def find(self, http: HttpRequest) -> OpenSession:
        """Return the session of a request. Raises RefusedError (401 or 404) and EndedError."""

    def admit(self, opened: OpenSession) -> None:  # noqa: B027  a hook
        """Raise RefusedError for a call that the session may not make; all are allowed."""

    def routes(self, paths: Mapping[str, Protocol], prefix: str = "") -> list[Route]:
        """Return the routes of protocols, and of what belongs to messages."""
        handlers: dict[str, Handler] = {path: functools.partial(self._answer, each) for path, each in paths.items()}
        handlers |= {f"{path}/count_tokens": self._count_tokens for path in paths if path.endswith("/messages")}
        answers = {path: answering(handler, self._limits) for path, handler in handlers.items()}
        return [Route(prefix + path, answer, methods=["POST"]) for path, answer in answers.items()]

    async def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the sessions. Raises EndedError if that has ended."""
        if self.loop is None:
            return await work
        if self.loop.is_closed():
            work.close()
            raise EndedError("the run has ended")
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EndedError("the run has ended") from None  # which cancels its tasks

    def _post(self, function: Callable[[], None]) -> None:
        """Call a function on the event loop of the sessions, without waiting for it."""
        if self.loop is None:
            function()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function)

    async def _read(self, http: HttpRequest, opened: OpenSession) -> tuple[dict[str, Any], str]:
        """Return the body of a request, and what identifies a client's retry of it."""
        raw = await read_body(http)
        body = await off_loop(len(raw), decode_object, raw) if raw else {}
        if len(raw) > SMALL_BYTES:
            size = await asyncio.to_thread(num_chars, body)

            async def check() -> None:
                opened.session.check_num_chars(size)

            await self.on_loop(check())
        return body, f"{http.url.path} {xxhash.xxh3_128_hexdigest(raw)}"

    async def _answer(self, protocol: Protocol, http: HttpRequest) -> Response:
        opened = self.find(http)
        role = str(http.path_params.get("role") or key_of_client(http)[1])
        try:
            check_role(role or "none")
        except RolloutError as error:
            raise RefusedError(str(error), 400) from None
        body, key = await self._read(http, opened)
        if protocol.read is responses.read and isinstance(body.get("previous_response_id"), str):
            call = responses.read(body, await self.on_loop(opened.earlier(body["previous_response_id"])))
        else:
            call = protocol.read(body)
        self._check_model(call.model)
        is_retry = http.headers.get(RETRY_HEADER, "0") not in ("", "0")

        def start() -> Call:
            self.admit(opened)
            return opened.call(call, role=role, key=f"{role} {key}", is_retry=is_retry)

        if call.is_stream and protocol.stream is not None:
            return await self._streamed(http, protocol.stream, call, start)
        replies = await self._replies(http, start)
        return json_response(protocol.write(call, replies, self._model_name))

    async def _replies(self, http: HttpRequest, start: Callable[[], Call]) -> list[Reply]:
        """Return the replies of a call; a client's retry gets those of the first attempt.

        The engine's call belongs to the session, and continues if the client disconnects.
        """

        async def answered() -> tuple[Call, list[Reply]]:
            call = start()
            return call, await call.replies()

        call, replies = await self.on_loop(answered())
        if await http.is_disconnected():
            self._post(call.mark_undelivered)
        return replies

    async def _streamed(
        self,
        http: HttpRequest,
        write: Callable[..., AsyncGenerator[bytes]],
        client_call: ClientCall,
        start: Callable[[], Call],
    ) -> Response:
        """Reply with the events that `write` makes of a call's parts; errors before the first one raise."""

        async def begun() -> Call:
            call = start()
            await call.begun()
            return call

        call = await self.on_loop(begun())
        if await http.is_disconnected():
            self._post(functools.partial(call.stop_reading, is_complete=False))
            raise ClientDisconnect
        path, deadline_s = http.url.path, http.state.deadline_s

        async def parts() -> AsyncGenerator[StreamPart]:
            seen, is_complete = [0] * len(call.streams), False
            try:
                while not is_complete:
                    async with asyncio.timeout_at(deadline_s):
                        new, is_last = await self.on_loop(call.grown(seen))
                    for part in new:
                        yield part
                    is_complete = is_last
            finally:
                self._post(functools.partial(call.stop_reading, is_complete=is_complete))

        async def events() -> AsyncGenerator[bytes]:
            pieces = parts()
            try:
                async for event in write(client_call, self._model_name, pieces, call.streams):
                    yield event
            except (EngineError, RolloutError, TimeoutError) as error:  # after the first event: an event, too
                text, code = str(error) or "not answered in time", getattr(error, "api_code", None)
                name = "" if path.endswith("/chat/completions") else "error"
                yield sse(error_body(path, text, status_of(error), code), name)
            finally:
                await pieces.aclose()

        return event_stream(events())

    async def _count_tokens(self, http: HttpRequest) -> Response:
        opened = self.find(http)
        call = messages.read((await self._read(http, opened))[0], counts_only=True)
        self._check_model(call.model)
        return json_response({"input_tokens": await self.on_loop(opened.count_tokens(call))})

    def _check_model(self, asked: str | None) -> None:
        if self._asked_name is not None:
            check_model(asked, self._asked_name)

    async def models(self, http: HttpRequest) -> Response:
        """Answer GET /v1/models."""
        length, name = self.find(http).session.context_len, self._model_name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "furlong", "max_model_len": length}
        return json_response({"object": "list", "data": [model]})


async def not_found(http: HttpRequest, error: Exception) -> Response:
    """Answer a request for a path that there is not."""
    status = int(getattr(error, "status_code", 404))
    return error_response(http.url.path, f"{http.method} {http.url.path[:200]} is not served here", status)
