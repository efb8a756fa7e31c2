"""Answers to requests of all protocols: each finds its session, calls the policy, and writes the reply."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from furlong.chat.messages import MessageError
from furlong.errors import EngineError, RolloutError
from furlong.inference.embedded.request import RequestError
from furlong.inference.server.app import CLIENT_GONE
from furlong.inference.server.bodies import RAW, SMALL_BYTES, has_left, json_response, printable, read_object
from furlong.inference.server.limits import RefusedError, RequestGuard
from furlong.inference.server.streaming import event_stream, sse
from furlong.sessions.endpoints import anthropic_messages, chat_completions, responses, sglang_generate, token_generate
from furlong.sessions.endpoints.answered_call import AnsweredCall, StreamPart
from furlong.sessions.endpoints.client_call import ClientCall, check_model
from furlong.sessions.reply_stream import ReplyStream
from furlong.sessions.session import EndedError, FullContextError, Reply, Session, check_role

MAX_ANSWERED = 64  # replies of a session that are kept for retries
RETRY_HEADER = "x-stainless-retry-count"

logger = logging.getLogger(__name__)

Abort = Callable[[], Awaitable[None]]


Handler = Callable[[HttpRequest, "OpenSession", dict[str, Any]], Awaitable[Response]]


@dataclass
class OpenSession:
    """A session that clients can reach. `url` is the base URL without /v1; `key` an API key of this session only.

    `result` is what a client posted at its end: `reward`, `metadata` and `error`, None for what it left out.
    """

    id: str
    url: str
    key: str
    session: Session = field(repr=False)
    abort: Abort = field(repr=False)
    requests: OrderedDict[str, AnsweredCall] = field(default_factory=OrderedDict[str, AnsweredCall], repr=False)
    result: dict[str, Any] | None = None

    def role(self, name: str, *, trainable: bool = True, group: str | None = None) -> RoleAddress:
        """Return the address of one of several agents of the episode, as `policy().role`.

        Raises RolloutError for a name with other characters than letters, digits, `_`, `-` and `.`.
        """
        check_role(name)
        if group is not None:
            check_role(group)
            self.session.role_groups[name] = group
        if not trainable:
            self.session.frozen_roles.add(name)
        return RoleAddress(name, f"{self.url}/roles/{name}", f"{self.key}:{name}")


@dataclass(frozen=True)
class RoleAddress:
    """Where the agent of a role reaches the policy. `url` is the base URL without /v1."""

    name: str
    url: str
    key: str = field(repr=False)


def key_of_client(http: HttpRequest) -> tuple[str, str]:
    """Return the key that a client sent, "" if it sent none, and the role after it."""
    bearer = http.headers.get("authorization", "").removeprefix("Bearer ")
    key, _, role = (http.headers.get("x-api-key") or bearer).partition(":")
    return key, role


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
    """Handlers of the protocols. model_name: the name that clients may give as `model`.

    client_sampling: clients set temperature, top_p, top_k and min_p; otherwise those of the run apply.
    """

    def __init__(self, *, model_name: str, client_sampling: bool) -> None:
        self.model_name, self._client_sampling = model_name, client_sampling

    @abstractmethod
    def find(self, http: HttpRequest) -> OpenSession:
        """Return the session of a request. Raises RefusedError (401 or 404) and EndedError."""

    def check_model(self, asked: Any) -> None:
        """Raise RequestError for a model that is not served."""
        check_model(asked, self.model_name)

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

    async def guarded(
        self,
        handler: Callable[[HttpRequest, OpenSession, dict[str, Any]], Awaitable[Response]],
        http: HttpRequest,
    ) -> Response:
        """Find the session, parse the body, and turn errors into JSON replies of the protocol."""
        guard: RequestGuard = http.state.guard
        try:
            opened = self.find(http)
            async with asyncio.timeout_at(guard.deadline_s):
                body = await read_object(http)
                if guard.body_bytes > SMALL_BYTES and handler in self.posts.values():  # converted on the event loop
                    await opened.session.checked_size(body, is_large=True)
                return await handler(http, opened, body)
        except TimeoutError:
            return error_reply(http, f"not answered within {guard.limits.request_timeout} s", 504)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except EndedError as error:
            return error_reply(http, str(error), 410, "session_ended")
        except FullContextError as error:
            return error_reply(http, str(error), 400, "context_length_exceeded")
        except RefusedError as error:
            code = "rate_limit_exceeded" if error.status == 429 else None
            return error_reply(http, str(error), error.status, code)
        except (RequestError, MessageError) as error:
            return error_reply(http, str(error), 400)
        except (EngineError, RolloutError) as error:
            return error_reply(http, str(error), 500)
        except Exception as error:
            logger.exception("%s %s", http.method, http.url.path[:200])
            return error_reply(http, f"{type(error).__name__}: {error}; the log has the traceback", 500)

    def _call(self, http: HttpRequest, opened: OpenSession, call: ClientCall) -> AnsweredCall:
        """Start a call, or return the one that a client's retry repeats."""
        role = _role_of(http)
        key = f"{role} {http.scope['path']} {xxhash.xxh3_128_hexdigest(http.scope[RAW])}"
        known = opened.requests.get(key)
        is_retry = http.headers.get(RETRY_HEADER, "0") not in ("", "0")
        if known is None or (known.task.done() and known.is_delivered and not is_retry) or known.is_over:
            known = AnsweredCall(lambda streams: self._replies(opened.session, call, role, streams), call)
            opened.requests[key] = known
            while len(opened.requests) > MAX_ANSWERED and next(iter(opened.requests.values())).task.done():
                opened.requests.popitem(last=False)
        else:
            opened.session.counts["retries"] += 1
        return known

    async def _answered(self, http: HttpRequest, opened: OpenSession, call: ClientCall) -> list[Reply]:
        """Return the replies of a call; a client's retry gets those of the first attempt.

        The engine's call belongs to the session, and continues if the client disconnects.
        """
        return await self._call(http, opened, call).replies(functools.partial(has_left, http))

    async def _streamed(
        self,
        http: HttpRequest,
        opened: OpenSession,
        call: ClientCall,
        write: Callable[[AsyncIterator[StreamPart], Sequence[ReplyStream]], AsyncGenerator[bytes]],
    ) -> Response:
        """Reply with the events that `write` makes of a call's parts; errors before the first one raise."""
        guard: RequestGuard = http.state.guard
        known = self._call(http, opened, call)
        await known.begun()
        if await has_left(http):
            known.leave()
            raise ClientDisconnect
        parts = known.parts(guard.deadline_s)
        return event_stream(guard, _with_errors(http, write(parts, known.streams), parts))

    async def _replies(
        self, session: Session, call: ClientCall, role: str, streams: Sequence[ReplyStream | None]
    ) -> list[Reply]:
        params = call.params(session, client_sampling=self._client_sampling)
        each = [params] * call.n
        if call.n > 1 and session.params.sampling_seed is None and params.sampling_seed is not None:
            each = [replace(params, sampling_seed=params.sampling_seed + i) for i in range(call.n)]
        if call.ids is not None:
            works = [session.complete(call.ids, params=own, role=role) for own in each]
        else:
            works = [
                session.chat(
                    call.messages,
                    tools=call.tools,
                    params=own,
                    template_kwargs=call.template_kwargs,
                    role=role,
                    reads_calls=call.reads_calls,
                    max_calls=call.max_calls,
                    stream=stream,
                )
                for own, stream in zip(each, streams, strict=True)
            ]
        return [await works[0]] if len(works) == 1 else list(await asyncio.gather(*works))

    async def chat(self, http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        """Answer POST /v1/chat/completions."""
        call = chat_completions.read(body)
        self.check_model(body.get("model"))
        if call.is_stream:
            write = functools.partial(chat_completions.stream, call, opened.session, self.model_name)
            return await self._streamed(http, opened, call, write)
        replies = await self._answered(http, opened, call)
        return json_response(chat_completions.write(call, replies, opened.session, self.model_name))

    async def _messages(self, http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = anthropic_messages.read(body)
        self.check_model(body.get("model"))
        if call.is_stream:
            write = functools.partial(anthropic_messages.stream, self.model_name)
            return await self._streamed(http, opened, call, write)
        (reply,) = await self._answered(http, opened, call)
        return json_response(anthropic_messages.write(reply, self.model_name))

    async def _count_tokens(self, _http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = anthropic_messages.read(body, counts_only=True)
        self.check_model(body.get("model"))
        count = await opened.session.count_tokens(call.messages, tools=call.tools, template_kwargs=call.template_kwargs)
        return json_response({"input_tokens": count})

    async def _responses(self, http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = responses.read(body, opened.session)
        self.check_model(body.get("model"))
        if call.is_stream:
            write = functools.partial(responses.stream, call, self.model_name)
            return await self._streamed(http, opened, call, write)
        (reply,) = await self._answered(http, opened, call)
        return json_response(responses.write(call, reply, self.model_name))

    async def _generate(self, http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = token_generate.read(body)
        self.check_model(body.get("model"))
        return json_response(token_generate.write(call, await self._answered(http, opened, call)))

    async def _sglang_generate(self, http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = sglang_generate.read(body, opened.session)
        replies = await self._answered(http, opened, call)
        return json_response(sglang_generate.write(call, replies))

    async def models(self, _http: HttpRequest, opened: OpenSession, _body: dict[str, Any]) -> Response:
        """Answer GET /v1/models."""
        length = opened.session.context_len
        model = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "furlong", "max_model_len": length}
        return json_response({"object": "list", "data": [model]})


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
