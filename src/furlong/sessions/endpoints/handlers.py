"""Answers to requests of all protocols: each finds its session, calls the policy, and writes the reply."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import xxhash
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from furlong.chat.messages import MessageError
from furlong.errors import EngineError, RolloutError
from furlong.inference.embedded.request import RequestError
from furlong.inference.server.app import CLIENT_GONE
from furlong.inference.server.bodies import json_response, printable, read_object
from furlong.inference.server.limits import RefusedError, RequestGuard
from furlong.inference.server.streaming import event_stream
from furlong.sessions.endpoints import anthropic_messages, chat_completions, responses, sglang_generate, token_generate
from furlong.sessions.endpoints.client_call import ClientCall, check_model
from furlong.sessions.session import EndedError, FullContextError, Reply, Session, check_role

MAX_ANSWERED = 64  # replies of a session that are kept for retries
RETRY_HEADER = "x-stainless-retry-count"

logger = logging.getLogger(__name__)

Abort = Callable[[], Awaitable[None]]


Handler = Callable[[HttpRequest, "OpenSession", dict[str, Any]], Awaitable[Response]]


@dataclass
class _Answered:
    """A request, in flight or answered. is_delivered: a client got the reply."""

    task: asyncio.Task[list[Reply]]
    is_delivered: bool = False


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
    requests: OrderedDict[str, _Answered] = field(default_factory=OrderedDict[str, _Answered], repr=False)
    result: dict[str, Any] | None = None

    def role(self, name: str, *, trainable: bool = True) -> RoleAddress:
        """Return the address of one of several agents of the episode, whose rewards are compared with its own.

        Answers of a role that is not `trainable` are no training samples. Raises RolloutError for a name with other
        characters than letters, digits, `_`, `-` and `.`.
        """
        check_role(name)
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
                return await handler(http, opened, await read_object(http))
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

    async def _answered(self, http: HttpRequest, opened: OpenSession, call: ClientCall) -> list[Reply]:
        """Return the replies of a call; a client's retry gets those of the first attempt.

        The engine's call belongs to the session, and continues if the client disconnects.
        """
        role = _role_of(http)
        body = orjson.dumps(call.body, option=orjson.OPT_SORT_KEYS)
        key = role + xxhash.xxh3_128_hexdigest(http.url.path.encode() + body)
        known = opened.requests.get(key)
        is_retry = http.headers.get(RETRY_HEADER, "0") not in ("", "0")
        if known is None or (known.task.done() and (not is_retry and known.is_delivered)) or _failed(known.task):
            known = _Answered(asyncio.create_task(self._replies(opened.session, call, role)))
            opened.requests[key] = known
            while len(opened.requests) > MAX_ANSWERED and next(iter(opened.requests.values())).task.done():
                opened.requests.popitem(last=False)
        else:
            opened.session.counts["retries"] += 1
        try:
            replies = await asyncio.shield(known.task)
        except asyncio.CancelledError:
            if known.task.cancelled():
                raise EndedError("the session ended while the request was running") from None
            known.task.add_done_callback(_mark_lost)
            raise
        known.is_delivered = not await http.is_disconnected()
        for reply in replies:
            if reply.node is not None:
                reply.node.is_delivered = known.is_delivered
        return replies

    async def _replies(self, session: Session, call: ClientCall, role: str) -> list[Reply]:
        params = call.params(session, client_sampling=self._client_sampling)
        seeds: list[int | None] = [params.sampling_seed] * call.n
        if session.params.sampling_seed is None and params.sampling_seed is not None:
            seeds = [params.sampling_seed + i for i in range(call.n)]
        each = [replace(params, sampling_seed=seed) for seed in seeds]
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
                )
                for own in each
            ]
        return list(await asyncio.gather(*works))

    async def chat(self, http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        """Answer POST /v1/chat/completions."""
        call = chat_completions.read(body)
        self.check_model(body.get("model"))
        replies = await self._answered(http, opened, call)
        if call.is_stream:
            return _stream(http, chat_completions.stream(call, replies, opened.session, self.model_name))
        return json_response(chat_completions.write(call, replies, opened.session, self.model_name))

    async def _messages(self, http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = anthropic_messages.read(body)
        self.check_model(body.get("model"))
        (reply,) = await self._answered(http, opened, call)
        if call.is_stream:
            return _stream(http, anthropic_messages.stream(reply, self.model_name))
        return json_response(anthropic_messages.write(reply, self.model_name))

    async def _count_tokens(self, _http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = anthropic_messages.read(body, counts_only=True)
        self.check_model(body.get("model"))
        count = await opened.session.count_tokens(call.messages, tools=call.tools, template_kwargs=call.template_kwargs)
        return json_response({"input_tokens": count})

    async def _responses(self, http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = responses.read(body, opened.session)
        self.check_model(body.get("model"))
        (reply,) = await self._answered(http, opened, call)
        if call.is_stream:
            return _stream(http, responses.stream(call, reply, self.model_name))
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


def _mark_lost(task: asyncio.Task[list[Reply]]) -> None:
    """Note that no client waits for these replies."""
    for reply in [] if _failed(task) else task.result():
        if reply.node is not None:
            reply.node.is_delivered = False


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _stream(http: HttpRequest, events: Iterable[bytes]) -> Response:
    async def each() -> AsyncIterator[bytes]:
        for event in events:
            yield event

    return event_stream(http.state.guard, each())


async def not_found(http: HttpRequest, error: Exception) -> Response:
    """Answer a request for a path that there is not."""
    status = int(getattr(error, "status_code", 404))
    return error_reply(http, f"{http.method} {http.url.path[:200]} is not served here", status)


def error_reply(http: HttpRequest | None, message: str, status: int, code: str | None = None) -> Response:
    """Return an error in the form of Anthropic for its path, and of OpenAI otherwise."""
    text = printable(message)
    if http is not None and "/messages" in http.url.path:
        return json_response(anthropic_messages.error(text, status), status)
    kind = "invalid_request_error" if status < 500 else "server_error"
    fields: Mapping[str, Any] = {"message": text, "type": kind, "param": None, "code": code}
    return json_response({"error": fields}, status)
