"""The session server: agents in other processes talk to the policy over HTTP, each in a session of its own.

Routes are `/sessions/ID/v1/...`, with roles `/sessions/ID/roles/NAME/v1/...`, and `/v1/...` with the session's key, or
KEY:NAME, as bearer token or `x-api-key`. It has no endpoint for weights. Requests are limited as those of `furlong
serve`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from furlong.core.addresses import host_and_port
from furlong.inference.server.bodies import json_response
from furlong.inference.server.limits import HEALTH_PATH, Counts, LimitRequests, RefusedError, ServerLimits
from furlong.inference.server.listener import LoopServer
from furlong.sessions.endpoints.handlers import (
    Abort,
    Handler,
    OpenSession,
    SessionEndpoints,
    error_reply,
    key_of_client,
    not_found,
)
from furlong.sessions.session import EndedError, Session
from furlong.sessions.session_offers import SessionOffers, read_result

# All agents of a run have one address, and any of them may stream.
LIMITS = ServerLimits(max_requests_per_client=4096, max_concurrent_streams=4096, max_streams_per_client=4096)
KEEP_ALIVE_S = 75  # agents' tools may take long, and a client may send just when an idle connection is closed
MAX_ENDED = 65536  # ids of ended sessions that are known to have ended


class SessionServer(SessionEndpoints):
    """Serves sessions. The port is open from the start, and `start` answers.

    model_name: the name that clients may give as `model`. client_sampling: clients set temperature, top_p, top_k and
    min_p; otherwise those of the run apply. offers: sessions that applications take with POST /sessions.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str = "default",
        client_sampling: bool = False,
        limits: ServerLimits | None = None,
        offers: SessionOffers | None = None,
    ) -> None:
        super().__init__(model_name=model_name, client_sampling=client_sampling)
        self.offers = offers
        self._counts = Counts(limits or LIMITS)
        self._by_id: dict[str, OpenSession] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # with the reason
        posts = {("POST", path): handler for path, handler in self.posts.items()}
        self._by_path: dict[tuple[str, str], Handler] = {**posts, ("GET", "/v1/models"): self.models}
        both = {**self._by_path, ("POST", "/end"): self._end}
        self._by_path_of_session = both | {
            (method, path.removeprefix("/v1")): both[method, path] for method, path in both
        }
        app = LimitRequests(self._app, self._counts, lambda text, status: error_reply(None, text, status))
        self._server = LoopServer(app, host, port, self._counts, keep_alive_s=KEEP_ALIVE_S)
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

    def open(self, session: Session, abort: Abort, *, key: str | None = None) -> OpenSession:
        """Make a session reachable; `abort` ends its requests in the engine. key: None for a random one."""
        id, key = secrets.token_hex(16), key or f"sk-{secrets.token_hex(24)}"
        self._ended.pop(key, None)
        opened = OpenSession(id, f"http://{host_and_port(*self.address)}/sessions/{id}", key, session, abort)
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

    # -- routes ------------------------------------------------------------------------------------------------

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI app."""
        response = await self._answer(HttpRequest(scope, receive, send))
        await response(scope, receive, send)

    async def _answer(self, http: HttpRequest) -> Response:
        path: str = http.scope["path"]
        if path == HEALTH_PATH:
            return json_response({"status": "ok"})
        if path == "/sessions" and self.offers is not None and http.method == "POST":
            return await self.offers.answer(http)
        params = http.scope["path_params"] = dict[str, str]()
        handlers, rest = self._by_path, path
        if path.startswith("/sessions/"):
            params["id"], _, rest = path.removeprefix("/sessions/").partition("/")
            if rest.startswith("roles/"):
                params["role"], _, rest = rest.removeprefix("roles/").partition("/")
            handlers, rest = self._by_path_of_session, "/" + rest
        handler = handlers.get((http.method, rest))
        return not_found(http) if handler is None else await self.guarded(handler, http)

    def find(self, http: HttpRequest) -> OpenSession:
        """Return the session that the path or the key names. Raises RefusedError (401 or 404) and EndedError."""
        id = http.path_params.get("id")
        name = id or key_of_client(http)[0]
        opened = (self._by_id if id else self._by_key).get(name)
        if opened is None and name in self._ended:
            raise EndedError(f"the session has ended: {self._ended[name]}")
        if opened is None and id:
            raise RefusedError(f"there is no session {id[:64]!r}; use the URL that furlong.agent.session returned", 404)
        if opened is None:
            raise RefusedError("the key of a session is required: Authorization: Bearer KEY, or x-api-key: KEY", 401)
        return opened

    async def _end(self, _http: HttpRequest, opened: OpenSession, body: dict[str, Any]) -> Response:
        offer = None if self.offers is None else self.offers.of(opened)
        opened.result = read_result(body, needs_reward=offer is not None and offer.needs_reward)
        await self.end(opened)
        if offer is not None:
            offer.is_ended.set()
        return json_response({"status": "ended"})
