"""The endpoints of agents in `furlong serve`: those of sessions, with a conversation of its own for each request."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from furlong.chat.messages import MessageError
from furlong.chat.template_boundary import ChatFormat
from furlong.core.token_stream import TokenStream
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.request_error import RequestError
from furlong.interfaces import Completion, SamplingParams
from furlong.sessions.endpoints.handlers import SessionEndpoints
from furlong.sessions.open_session import OpenSession
from furlong.sessions.session import Session
from furlong.sessions.session_errors import FullContextError

ENGINE_PATHS = ("/v1/chat/completions", "/generate")  # which the server of an engine answers itself
OF_TOOLS = ("tools", "return_token_ids", "parallel_tool_calls")


class ServedEndpoints(SessionEndpoints):
    """Answers requests with one engine; clients set all sampling parameters."""

    def __init__(self, engine: EmbeddedEngine, model_name: str) -> None:
        super().__init__(model_name=model_name)
        self._engine = engine
        self._chat_format = ChatFormat(engine.tokenizer)
        self._params = SamplingParams(max_new_tokens=engine.context_len)

    async def find(self, http: HttpRequest) -> OpenSession:
        """Return a new session."""
        del http
        session = Session(
            self._chat_format, self._complete, name="served", params=self._params, context_len=self._engine.context_len
        )
        return OpenSession("", "", "", session, _nothing, client_sampling=True)

    @property
    def routes(self) -> list[Route]:
        """The routes that the server of an engine does not have itself."""
        posts = {path: handler for path, handler in self.posts.items() if path not in ENGINE_PATHS}
        return [Route(path, functools.partial(self.guarded, each), methods=["POST"]) for path, each in posts.items()]

    def takes_chat(self, body: Mapping[str, Any]) -> bool:
        """Return whether a chat completion needs what only sessions have: tool calls, or the token ids."""
        return any(body.get(name) for name in OF_TOOLS)

    async def answer_chat(self, http: HttpRequest, body: dict[str, Any]) -> Response:
        """Answer POST /v1/chat/completions. Raises RequestError."""
        try:
            return await self.chat(http, await self.find(http), body)
        except (MessageError, FullContextError) as error:
            raise RequestError(str(error)) from error

    async def _complete(
        self, ids: list[int], params: SamplingParams, _part: int | None, stream: TokenStream | None = None
    ) -> Completion:
        if stream is None:
            return await self._engine.generate(ids, params)
        return await self._engine.stream(ids, params, stream)


async def _nothing() -> None:
    """Abort nothing: requests end with their connection."""
