"""HTTP of sessions: answers in all protocols (`SessionEndpoints`), and the server of a run (`SessionServer`).

Agents in other processes talk to the policy, each in its own session, whose key, or KEY:ROLE, they send as bearer
token or `x-api-key`. Routes are `/v1/...`, `/sessions/ID/v1/...`, and with roles `/sessions/ID/roles/NAME/v1/...`.
In place of ID, ID.KEY is for clients that do not send the key. There is no endpoint for weights. Requests are read and
replies written on the event loop of the HTTP server; sessions live on that of the run.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from furlong.chat.messages import num_chars
from furlong.core.addresses import host_and_port
from furlong.core.text import random_key
from furlong.errors import EngineError, RolloutError
from furlong.inference.server.schemas import check_model, read_fields
from furlong.inference.server.web import (
    HEALTH_PATH,
    MIB,
    SMALL_BYTES,
    Gate,
    Handler,
    HttpThread,
    RefusedError,
    ServerLimits,
    answering,
    decode_object,
    details_of,
    error_body,
    error_response,
    event_stream,
    json_response,
    not_found,
    off_loop,
    read_body,
    read_object,
    sse,
    status_of,
)
from furlong.sessions.open_session import Abort, Call, ClientCall, OpenSession, StreamPart
from furlong.sessions.protocols import chat, messages, responses, tokens
from furlong.sessions.session import EndedError, Reply, Session, check_role
from furlong.sessions.session_offers import SessionOffers, Wait, read_result

LIMITS = ServerLimits(max_body_bytes=32 * MIB)
MAX_LOGGED = 256  # names of fields that clients send without effect
MAX_ENDED = 65536  # ids of ended sessions that are known to have ended
RETRY_HEADER = "x-stainless-retry-count"
T = TypeVar("T")

logger = logging.getLogger(__name__)


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
    """Handlers of the protocols. model_name: the name of the model. any_name: clients may give any other as `model`.

    loop: the event loop of the sessions; None if it is that of the HTTP server.
    """

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, *, model_name: str, limits: ServerLimits, any_name: bool = True) -> None:
        self._any_name, self._model_name, self._limits = any_name, model_name, limits
        self._logged: set[str] = set()

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
        try:
            return await self._answer_of(opened, protocol, http)
        except (EngineError, RolloutError) as error:
            opened.refusal = f"status {status_of(error)}: {error}"
            raise

    async def _answer_of(self, opened: OpenSession, protocol: Protocol, http: HttpRequest) -> Response:
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
        self._log_ignored(http.url.path, call.ignored)
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
                text = str(error) or "not answered in time"
                name = "" if path.endswith("/chat/completions") else "error"
                yield sse(error_body(path, text, status_of(error), *details_of(error)), name)
            finally:
                await pieces.aclose()

        return event_stream(events())

    async def _count_tokens(self, http: HttpRequest) -> Response:
        opened = self.find(http)
        call = messages.read((await self._read(http, opened))[0], counts_only=True)
        self._check_model(call.model)
        return json_response({"input_tokens": await self.on_loop(opened.count_tokens(call))})

    def _log_ignored(self, path: str, names: Sequence[str]) -> None:
        new = [name for name in dict.fromkeys(names) if name not in self._logged][: MAX_LOGGED - len(self._logged)]
        if new:
            self._logged.update(new)
            text = f"a client sends {', '.join(new)} to {path.rpartition('/v1')[2]}"
            logger.info("%s, which has no effect here; session/ignored_fields counts such fields", text)

    def _check_model(self, asked: str | None) -> None:
        if not self._any_name:
            check_model(asked, self._model_name)

    async def models(self, http: HttpRequest) -> Response:
        """Answer GET /v1/models."""
        length, name = self.find(http).session.context_len, self._model_name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "furlong", "max_model_len": length}
        return json_response({"object": "list", "data": [model]})


class SessionServer(SessionEndpoints):
    """Serves sessions. The port is open from the start; the first session starts what answers.

    Clients may give any name as `model`; replies have `model_name`. client_sampling: clients set temperature, top_p,
    top_k and min_p; otherwise those of the run apply. offers: sessions that applications take with POST /sessions.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str = "default",
        client_sampling: bool = False,
        limits: ServerLimits = LIMITS,
        offers: SessionOffers | None = None,
    ) -> None:
        super().__init__(model_name=model_name, limits=limits)
        self.offers, self._client_sampling = offers, client_sampling
        self._by_id: dict[str, OpenSession] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # with the reason
        self.http = HttpThread(Gate(self._app(), limits, has_own_keys=True), limits, host=host, port=port)
        self.address: tuple[str, int] = self.http.address

    def _app(self) -> Starlette:
        async def health(_http: HttpRequest) -> Response:
            return json_response({"status": "ok"})

        models, end = answering(self.models, self._limits), answering(self._end, self._limits)
        without_v1 = {path.removeprefix("/v1"): protocol for path, protocol in PROTOCOLS.items()}
        routes = [Route(HEALTH_PATH, health), *self.routes(PROTOCOLS), Route("/v1/models", models)]
        for prefix in ("/sessions/{id}", "/sessions/{id}/roles/{role}"):
            routes += self.routes({**PROTOCOLS, **without_v1}, prefix)
            routes += [Route(f"{prefix}/v1/models", models), Route(f"{prefix}/models", models)]
        routes.append(Route("/sessions/{id}/end", end, methods=["POST"]))
        if self.offers is not None:
            routes.append(Route("/sessions", answering(self._take, self._limits), methods=["POST"]))
        missing = {404: self._not_found, 405: self._not_found}
        return Starlette(routes=routes, exception_handlers=missing)

    async def _not_found(self, http: HttpRequest, error: Exception) -> Response:
        """Answer a request for a path that is not served, and note it in the session that the path names."""
        _, name, id, *rest = [*http.url.path.split("/"), "", ""]
        if name == "sessions" and (opened := self._by_id.get(id.partition(".")[0])) is not None:
            opened.refusal = f"status 404: {http.method} /{'/'.join(rest).rstrip('/')[:200]} is not served by sessions"
        return await not_found(http, error)

    async def start(self) -> None:
        """Answer requests if applications take sessions; otherwise the first session starts that.

        Most functions call the policy without HTTP.
        """
        if self.offers is not None:
            self.loop = asyncio.get_running_loop()
            self.http.start()

    async def close(self) -> None:
        """Stop answering and close the port."""
        await self.http.close()

    @property
    def num_open(self) -> int:
        """Number of open sessions."""
        return len(self._by_id)

    def open(self, session: Session, abort: Abort, *, key: str | None = None) -> OpenSession:
        """Make a session reachable; `abort` ends its requests in the engine. key: None for a random one."""
        self.loop = asyncio.get_running_loop()
        self.http.start()
        id, key = secrets.token_hex(16), key or random_key("sk")
        self._ended.pop(key, None)
        url = f"http://{host_and_port(*self.address)}/sessions/{id}"
        opened = OpenSession(id, url, key, session, abort, self._client_sampling)
        self._by_id[id] = self._by_key[key] = opened
        return opened

    async def end(self, opened: OpenSession) -> None:
        """End a session: its requests in flight are aborted, and later ones get status 410."""
        if self._by_id.pop(opened.id, None) is None:
            return
        del self._by_key[opened.key]
        opened.session.end()
        for name in (opened.id, opened.key):
            self._ended[name] = opened.session.end_reason
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        running = [each.task for each in opened.requests.values() if not each.task.done()]
        if running:
            await opened.abort()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        opened.requests.clear()

    # -- on the event loop of the HTTP server ------------------------------------------------------------------

    def find(self, http: HttpRequest) -> OpenSession:
        """Return the session that the path or the key names, if the key is that of the session.

        Raises RefusedError (401 or 404) and EndedError.
        """
        opened, key = self._named(http)
        if not hmac.compare_digest(key.encode(), opened.key.encode()):
            text = (
                "the key of this session is required: Authorization: Bearer KEY, or x-api-key: KEY. An agent has it in "
                "OPENAI_API_KEY and ANTHROPIC_API_KEY, or as the parameter api_key"
            )
            opened.refusal = f"status 401: {text}"
            raise RefusedError(text, 401)
        return opened

    def _named(self, http: HttpRequest) -> tuple[OpenSession, str]:
        """Return the session that the path or the key names, and the key, which may be a wrong one."""
        id, _, key = str(http.path_params.get("id", "")).partition(".")
        key = key or key_of_client(http)[0]
        if (opened := self._by_id.get(id) if id else self._by_key.get(key)) is not None:
            return opened, key
        if (reason := self._ended.get(id or key)) is not None:
            raise EndedError(f"the session has ended: {reason}")
        if id:
            raise RefusedError(f"there is no session {id[:64]!r}; use the URL that furlong.agent.session returned", 404)
        raise RefusedError("the key of a session is required: Authorization: Bearer KEY, or x-api-key: KEY", 401)

    async def _end(self, http: HttpRequest) -> Response:
        """Answer POST .../end: with the controller's key it sets the result; an agent can only stop."""
        opened, key = self._named(http)
        is_controller = hmac.compare_digest(key.encode(), opened.controller_key.encode())
        if not is_controller:
            self.find(http)
        body = await read_object(http)
        offer = None if self.offers is None else self.offers.of(opened)
        if not is_controller and (body or offer is not None):
            raise RefusedError(
                "the key of an agent cannot set reward, metadata or error; send the controller_key that POST /sessions "
                "returned with the session, or return the result from the agent function or command",
                403,
            )

        async def end() -> None:
            opened.result = read_result(body, needs_reward=offer is not None and offer.needs_reward)
            await self.end(opened)
            if offer is not None:
                offer.is_ended.set()

        await self.on_loop(end())
        return json_response({"status": "ended"})

    async def _take(self, http: HttpRequest) -> Response:
        """Answer POST /sessions: the next session, or status 503 if there is none within `wait` seconds."""
        offers = self.offers
        assert offers is not None
        if offers.key is not None and not hmac.compare_digest(key_of_client(http)[0].encode(), offers.key.encode()):
            raise RefusedError("the key of the session server is required: Authorization: Bearer KEY", 401)
        wait_s = read_fields(Wait, await read_object(http)).wait
        taken = await self.on_loop(offers.take(wait_s))
        if taken is None:
            text = "no session is waiting: the run trains, or all episodes are taken; ask again"
            return error_response(http.url.path, text, 503, "no_session")
        if await http.is_disconnected():
            await self.on_loop(offers.give_back(taken["id"]))
            raise ClientDisconnect
        await self.on_loop(offers.confirm(taken["id"]))
        return json_response(taken)
