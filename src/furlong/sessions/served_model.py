"""Endpoints of sessions over an engine, with a separate conversation for each request.

`served_routes` are those of `furlong serve`. `Gateway` is what user functions of a run post to.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from furlong.chat.template_boundary import ChatFormat
from furlong.core.token_stream import TokenStream
from furlong.inference.server.generate_api import ServerContext
from furlong.inference.server.web import (
    HEALTH_PATH,
    Gate,
    HttpThread,
    ServerLimits,
    json_response,
    not_found,
    unless_left,
)
from furlong.interfaces import Completion, SamplingParams
from furlong.sessions.open_session import Call, OpenSession
from furlong.sessions.protocols import tokens
from furlong.sessions.session import Reply, Session
from furlong.sessions.session_server import PROTOCOLS, Protocol, SessionEndpoints

NO_LIMIT = 1 << 29  # of new tokens
HOST = "127.0.0.1"


async def _nothing() -> None:
    """Abort nothing: requests end with their connection."""


class ServedEndpoints(SessionEndpoints):
    """Answers requests with one engine on this event loop; clients set all sampling parameters."""

    def __init__(self, model: ServerContext) -> None:
        super().__init__(model_name=model.name, limits=model.limits, any_name=False)
        self._model = model
        self._chat_format = ChatFormat(model.engine.tokenizer)
        self._params = SamplingParams(max_new_tokens=model.engine.context_len)

    def find(self, http: HttpRequest) -> OpenSession:
        """Return a new session."""
        del http
        length = self._model.engine.context_len
        session = Session(self._chat_format, self._complete, name="served", params=self._params, context_len=length)
        return OpenSession("", "", "", session, _nothing, client_sampling=True)

    async def _complete(
        self, ids: list[int], params: SamplingParams, _part: int | None, stream: TokenStream | None = None
    ) -> Completion:
        self._model.check_room(1)
        if stream is None:
            return await self._model.engine.generate(ids, params)
        return await self._model.engine.stream(ids, params, stream)

    async def _replies(self, http: HttpRequest, start: Callable[[], Call]) -> list[Reply]:
        call = start()
        try:
            return await unless_left(http, call.replies())
        finally:
            call.task.cancel()


def served_routes(model: ServerContext) -> list[Route]:
    """Return the routes of chat and agents for `furlong serve`, which has its own `/generate`."""
    return ServedEndpoints(model).routes({path: each for path, each in PROTOCOLS.items() if path != "/generate"})


class Gateway(SessionEndpoints):
    """`POST /generate` of a run on a loopback address: for user functions that post to `args.sglang_router_ip`.

    It answers through `complete`, whatever engine the run has, and cannot change weights or pause generation. The port
    is open from the start, and `start` answers. encode: text to token ids, with special tokens, as SGLang encodes
    `text`. facts: reply of /model_info.
    """

    def __init__(
        self,
        complete: Callable[[list[int], SamplingParams], Awaitable[Completion]],
        *,
        encode: Callable[[str], list[int]],
        facts: Mapping[str, Any],
        api_key: str | None = None,
        tokenizer: Any = None,
        port: int = 0,
    ) -> None:
        super().__init__(model_name="default", limits=ServerLimits())
        self._complete, self._encode = complete, encode
        self._chat_format = ChatFormat(tokenizer)

        async def health(_http: HttpRequest) -> Response:
            return json_response({"status": "ok"})

        async def model_info(_http: HttpRequest) -> Response:
            return json_response(dict(facts))

        routes = self.routes({"/generate": Protocol(_read_with_sglangs_limit, tokens.write_sglang)})
        routes += [Route(path, model_info) for path in ("/model_info", "/get_model_info")]
        routes.append(Route(HEALTH_PATH, health))
        app = Starlette(routes=routes, exception_handlers={404: not_found, 405: not_found})
        self._http = HttpThread(Gate(app, self._limits, api_key or None), self._limits, host=HOST, port=port)
        self.address = self._http.address

    async def start(self) -> None:
        """Answer requests; completions run on the running event loop."""
        self.loop = asyncio.get_running_loop()
        self._http.start()

    async def close(self) -> None:
        """Stop answering and close the port."""
        await self._http.close()

    def find(self, http: HttpRequest) -> OpenSession:
        """Return a new session."""
        del http

        async def complete(ids: list[int], params: SamplingParams, _part: int | None) -> Completion:
            return await self._complete(ids, params)

        params = SamplingParams(max_new_tokens=NO_LIMIT, no_stop_trim=False)
        session = Session(self._chat_format, complete, name="gateway", params=params)
        return OpenSession("", "", "", session, _nothing, client_sampling=True, encode=self._encode)


def _read_with_sglangs_limit(body: Mapping[str, Any]) -> Any:
    """Read a request; SGLang samples at most 128 tokens unless it says otherwise."""
    call = tokens.read_sglang(body)
    return dataclasses.replace(call, max_tokens=call.max_tokens or SamplingParams().max_new_tokens)
