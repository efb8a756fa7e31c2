"""The session server: agents in other processes talk to the policy over HTTP, each in a session of its own.

Routes are `/sessions/ID/v1/...`, with roles `/sessions/ID/roles/NAME/v1/...`, and `/v1/...` with the session's key, or
KEY:NAME, as bearer token or `x-api-key`. It has no endpoint for weights. A thread speaks HTTP with the clients; the
sessions are on the event loop of the run.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import OrderedDict

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from furlong.core.addresses import host_and_port
from furlong.inference.server.schemas import read_fields
from furlong.inference.server.web import (
    HEALTH_PATH,
    MIB,
    Gate,
    RefusedError,
    ServerLimits,
    answering,
    error_response,
    json_response,
    read_object,
)
from furlong.sessions.endpoints import PROTOCOLS, SessionEndpoints, key_of_client, not_found
from furlong.sessions.http_thread import HttpThread
from furlong.sessions.open_session import Abort, OpenSession
from furlong.sessions.session import EndedError, Session
from furlong.sessions.session_offers import SessionOffers, Wait, read_result

LIMITS = ServerLimits(max_body_bytes=32 * MIB)
MAX_ENDED = 65536  # ids of ended sessions that are known to have ended


class SessionServer(SessionEndpoints):
    """Serves sessions. The port is open from the start; the first session starts what answers.

    model_name: the name that clients may give as `model`; None for any name. client_sampling: clients set temperature,
    top_p, top_k and min_p; otherwise those of the run apply. offers: sessions that applications take with POST
    /sessions.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str | None = "default",
        client_sampling: bool = False,
        limits: ServerLimits = LIMITS,
        offers: SessionOffers | None = None,
    ) -> None:
        super().__init__(model_name=model_name, limits=limits)
        self.offers, self._client_sampling = offers, client_sampling
        self._by_id: dict[str, OpenSession] = {}
        self._by_key: dict[str, OpenSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # with the reason
        self.http = HttpThread(Gate(self._app(), limits), limits, host=host, port=port)
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
        return Starlette(routes=routes, exception_handlers={404: not_found, 405: not_found})

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
        id, key = secrets.token_hex(16), key or f"sk-{secrets.token_hex(24)}"
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
        """Return the session that the path or the key names. Raises RefusedError (401 or 404) and EndedError."""
        id, key = str(http.path_params.get("id", "")), key_of_client(http)[0]
        opened = self._by_id.get(id) if id else self._by_key.get(key)
        if opened is not None:
            return opened
        if (reason := self._ended.get(id or key)) is not None:
            raise EndedError(f"the session has ended: {reason}")
        if id:
            raise RefusedError(f"there is no session {id[:64]!r}; use the URL that furlong.agent.session returned", 404)
        raise RefusedError("the key of a session is required: Authorization: Bearer KEY, or x-api-key: KEY", 401)

    async def _end(self, http: HttpRequest) -> Response:
        opened, body = self.find(http), await read_object(http)

        async def end() -> None:
            offer = None if self.offers is None else self.offers.of(opened)
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
