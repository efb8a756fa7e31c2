"""The session server: agents in other processes talk to the policy over HTTP, each in a session of its own.

Routes are `/sessions/ID/v1/...`, and `/v1/...` with the session's key as bearer token or `x-api-key`. It has no
endpoint for weights. Requests are limited as those of `furlong serve`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import xxhash
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from furlong.chat.messages import MessageError
from furlong.core.addresses import host_and_port
from furlong.errors import EngineError, RolloutError
from furlong.inference.embedded.request import RequestError
from furlong.inference.server.app import CLIENT_GONE
from furlong.inference.server.bodies import json_response, printable, read_object
from furlong.inference.server.limits import Counts, LimitRequests, RefusedError, RequestGuard, ServerLimits
from furlong.inference.server.listener import LoopServer
from furlong.inference.server.streaming import event_stream
from furlong.sessions.endpoints import anthropic_messages, chat_completions, responses, token_generate
from furlong.sessions.endpoints.client_call import ClientCall, check_model
from furlong.sessions.session import EndedError, FullContextError, Reply, Session

MAX_ANSWERED = 64  # replies of a session that are kept for retries
MAX_ENDED = 65536  # ids of ended sessions that are known to have ended
RETRY_HEADER = "x-stainless-retry-count"

logger = logging.getLogger(__name__)

Abort = Callable[[], Awaitable[None]]


@dataclass
class _Answered:
    """A request, in flight or answered. is_delivered: a client got the reply."""

    task: asyncio.Task[list[Reply]]
    is_delivered: bool = False


@dataclass
class OpenSession:
    """A session that clients can reach. `url` is the base URL without /v1; `key` an API key of this session only."""

    id: str
    url: str
    key: str
    session: Session = field(repr=False)
    abort: Abort = field(repr=False)
    requests: OrderedDict[str, _Answered] = field(default_factory=OrderedDict[str, _Answered], repr=False)


class SessionServer:
    """Serves sessions. The port is open from the start, and `start` answers.

    model_name: the name that clients may give as `model`. client_sampling: clients set temperature, top_p, top_k and
    min_p; otherwise those of the run apply.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str = "default",
        client_sampling: bool = False,
        limits: ServerLimits | None = None,
    ) -> None:
        self.model_name, self._client_sampling = model_name, client_sampling
        self._counts = Counts(limits or ServerLimits())
        self._by_id: dict[str, OpenSession] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._server = LoopServer(self._app(), host, port, self._counts)
        self.address = self._server.address

    async def start(self) -> None:
        """Answer requests on the running event loop. Raises EngineError if the server exits."""
        await self._server.start()

    async def close(self) -> None:
        """Stop answering and close the port."""
        await self._server.close()

    @property
    def num_open(self) -> int:
        """Number of open sessions."""
        return len(self._by_id)

    def open(self, session: Session, abort: Abort) -> OpenSession:
        """Make a session reachable; `abort` ends its requests in the engine."""
        id, key = secrets.token_hex(16), f"sk-{secrets.token_hex(24)}"
        opened = OpenSession(id, f"http://{host_and_port(*self.address)}/sessions/{id}", key, session, abort)
        self._by_id[id] = self._by_key[key] = opened
        return opened

    async def end(self, opened: OpenSession) -> None:
        """End a session: its requests in flight are aborted, and later ones get status 410."""
        if self._by_id.pop(opened.id, None) is None:
            return
        del self._by_key[opened.key]
        for name in (opened.id, opened.key):
            self._ended[name] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        opened.session.end()
        running = [each.task for each in opened.requests.values() if not each.task.done()]
        if running:
            await opened.abort()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        opened.requests.clear()

    # -- routes ------------------------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        posts: dict[str, Callable[[HttpRequest, OpenSession, dict[str, Any]], Awaitable[Response]]] = {
            "/chat/completions": self._chat,
            "/messages": self._messages,
            "/messages/count_tokens": self._count_tokens,
            "/responses": self._responses,
        }
        paths = {prefix + path: handler for path, handler in posts.items() for prefix in ("/v1", "")}
        paths |= {"/inference/v1/generate": self._generate, "/end": self._end}
        routes = [Route("/health", _health)]
        for path, handler in paths.items():
            endpoint = functools.partial(self._guarded, handler)
            routes.append(Route("/sessions/{id}" + path, endpoint, methods=["POST"]))
            if path.startswith(("/v1/", "/inference/")):
                routes.append(Route(path, endpoint, methods=["POST"]))
        models = functools.partial(self._guarded, self._models)
        routes += [Route(path, models, methods=["GET"]) for path in ("/sessions/{id}/v1/models", "/v1/models")]
        routes.append(Route("/sessions/{id}/models", models, methods=["GET"]))
        middleware = [
            Middleware(LimitRequests, counts=self._counts, refuse=lambda text, status: _error(None, text, status))
        ]
        return Starlette(routes=routes, middleware=middleware, exception_handlers={404: _not_found, 405: _not_found})

    async def _guarded(
        self,
        handler: Callable[[HttpRequest, OpenSession, dict[str, Any]], Awaitable[Response]],
        http: HttpRequest,
    ) -> Response:
        """Find the session, parse the body, and turn errors into JSON replies of the protocol."""
        guard: RequestGuard = http.state.guard
        try:
            opened = self._find(http)
            async with asyncio.timeout_at(guard.deadline_s):
                return await handler(http, opened, await read_object(http))
        except TimeoutError:
            return _error(http, f"not answered within {guard.limits.request_timeout} s", 504)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except EndedError as error:
            return _error(http, str(error), 410, "session_ended")
        except FullContextError as error:
            return _error(http, str(error), 400, "context_length_exceeded")
        except RefusedError as error:
            code = "rate_limit_exceeded" if error.status == 429 else None
            return _error(http, str(error), error.status, code)
        except (RequestError, MessageError) as error:
            return _error(http, str(error), 400)
        except (EngineError, RolloutError) as error:
            return _error(http, str(error), 500)

    def _find(self, http: HttpRequest) -> OpenSession:
        """Return the session that the path or the key names. Raises RefusedError (401 or 404) and EndedError."""
        id = http.path_params.get("id")
        bearer = http.headers.get("authorization", "").removeprefix("Bearer ")
        name = id or http.headers.get("x-api-key") or bearer
        opened = (self._by_id if id else self._by_key).get(name)
        if opened is None and name in self._ended:
            raise EndedError("the session has ended: its episode is over")
        if opened is None and id:
            raise RefusedError(f"there is no session {id[:64]!r}; use the URL that furlong.agent.session returned", 404)
        if opened is None:
            raise RefusedError("the key of a session is required: Authorization: Bearer KEY, or x-api-key: KEY", 401)
        return opened

    # -- answers -----------------------------------------------------------------------------------------------

    async def _answered(self, http: HttpRequest, opened: OpenSession, call: ClientCall) -> list[Reply]:
        """Return the replies of a call; a client's retry gets those of the first attempt.

        The engine's call belongs to the session, and continues if the client disconnects.
        """
        key = xxhash.xxh3_128_hexdigest(http.url.path.encode() + orjson.dumps(call.body, option=orjson.OPT_SORT_KEYS))
        known = opened.requests.get(key)
        is_retry = http.headers.get(RETRY_HEADER, "0") not in ("", "0")
        if known is None or (known.task.done() and (not is_retry and known.is_delivered)) or _failed(known.task):
            known = _Answered(asyncio.create_task(self._replies(opened.session, call)))
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
            raise
        known.is_delivered = not await http.is_disconnected()
        return replies

    async def _replies(self, session: Session, call: ClientCall) -> list[Reply]:
        params = call.params(session, client_sampling=self._client_sampling)
        if call.ids is not None:
            works = [session.complete(call.ids, params=params) for _ in range(call.n)]
        else:
            works = [
                session.chat(
                    call.messages,
                    tools=call.tools,
                    params=params,
                    template_kwargs=call.template_kwargs,
                    reads_calls=call.reads_calls,
                    max_calls=call.max_calls,
                )
                for _ in range(call.n)
            ]
        return list(await asyncio.gather(*works))

    async def _chat(self, http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = chat_completions.read(body)
        check_model(body.get("model"), self.model_name)
        replies = await self._answered(http, opened, call)
        if call.is_stream:
            return _stream(http, chat_completions.stream(call, replies, opened.session, self.model_name))
        return json_response(chat_completions.write(call, replies, opened.session, self.model_name))

    async def _messages(self, http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = anthropic_messages.read(body)
        check_model(body.get("model"), self.model_name)
        (reply,) = await self._answered(http, opened, call)
        if call.is_stream:
            return _stream(http, anthropic_messages.stream(reply, self.model_name))
        return json_response(anthropic_messages.write(reply, self.model_name))

    async def _count_tokens(self, _http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = anthropic_messages.read(body, counts_only=True)
        check_model(body.get("model"), self.model_name)
        count = await opened.session.count_tokens(call.messages, tools=call.tools, template_kwargs=call.template_kwargs)
        return json_response({"input_tokens": count})

    async def _responses(self, http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = responses.read(body, opened.session)
        check_model(body.get("model"), self.model_name)
        (reply,) = await self._answered(http, opened, call)
        if call.is_stream:
            return _stream(http, responses.stream(call, reply, self.model_name))
        return json_response(responses.write(call, reply, self.model_name))

    async def _generate(self, http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        call = token_generate.read(body)
        check_model(body.get("model"), self.model_name)
        return json_response(token_generate.write(call, await self._answered(http, opened, call)))

    async def _models(self, _http: HttpRequest, opened: OpenSession, _body: dict[str, Any]) -> Response:
        length = opened.session.context_len
        model = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "furlong", "max_model_len": length}
        return json_response({"object": "list", "data": [model]})

    async def _end(self, _http: HttpRequest, opened: OpenSession, _body: dict[str, Any]) -> Response:
        await self.end(opened)
        return json_response({"status": "ended"})


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _stream(http: HttpRequest, events: Iterable[bytes]) -> Response:
    async def each() -> AsyncIterator[bytes]:
        for event in events:
            yield event

    return event_stream(http.state.guard, each())


async def _health(_http: HttpRequest) -> Response:
    return json_response({"status": "ok"})


async def _not_found(http: HttpRequest, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    return _error(http, f"{http.method} {http.url.path[:200]} is not served by the session server", status)


def _error(http: HttpRequest | None, message: str, status: int, code: str | None = None) -> Response:
    """Return an error in the form of Anthropic for its path, and of OpenAI otherwise."""
    text = printable(message)
    if http is not None and "/messages" in http.url.path:
        return json_response(anthropic_messages.error(text, status), status)
    kind = "invalid_request_error" if status < 500 else "server_error"
    fields: Mapping[str, Any] = {"message": text, "type": kind, "param": None, "code": code}
    return json_response({"error": fields}, status)
