"""Sessions that applications outside of the run take, play and end: `POST /sessions`, and `POST .../end`."""

from __future__ import annotations

import asyncio
import hmac
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from furlong.inference.embedded.request import RequestError
from furlong.inference.server.app import CLIENT_GONE
from furlong.inference.server.bodies import has_left, json_response, read_object
from furlong.inference.server.limits import RefusedError
from furlong.sessions.endpoints.handlers import OpenSession, error_reply, key_of_client

MAX_WAIT_S, DEFAULT_WAIT_S = 300.0, 30.0


@dataclass(eq=False)
class SessionOffer:
    """One session to take. task: what the application gets with it.

    needs_reward: the run has no reward function.
    """

    opened: OpenSession
    task: Mapping[str, Any]
    needs_reward: bool
    is_taken: asyncio.Event = field(default_factory=asyncio.Event)
    is_ended: asyncio.Event = field(default_factory=asyncio.Event)


class SessionOffers:
    """Sessions that wait for an application, the oldest first. `key`: that applications send; None for no key."""

    def __init__(self, key: str | None = None) -> None:
        self._key = key
        self._waiting: deque[SessionOffer] = deque()
        self._by_id: dict[str, SessionOffer] = {}
        self._changed = asyncio.Condition()

    async def add(self, offer: SessionOffer) -> None:
        """Let an application take a session."""
        self._by_id[offer.opened.id] = offer
        async with self._changed:
            self._waiting.append(offer)
            self._changed.notify()

    def withdraw(self, offer: SessionOffer) -> None:
        """Forget a session."""
        self._by_id.pop(offer.opened.id, None)
        if offer in self._waiting:
            self._waiting.remove(offer)

    def of(self, opened: OpenSession) -> SessionOffer | None:
        """Return the offer of a session; None if it was not offered."""
        return self._by_id.get(opened.id)

    async def answer(self, http: HttpRequest) -> Response:
        """Answer POST /sessions: the next session, or status 503 if there is none within `wait` seconds."""
        try:
            if self._key is not None and not hmac.compare_digest(key_of_client(http)[0].encode(), self._key.encode()):
                raise RefusedError("the key of the session server is required: Authorization: Bearer KEY", 401)
            body = await read_object(http)
            offer = await self._next(_wait_of(body))
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except RefusedError as error:
            return error_reply(http, str(error), error.status)
        except RequestError as error:
            return error_reply(http, str(error), 400)
        if offer is None:
            text = "no session is waiting: the run trains, or all episodes are taken; ask again"
            return error_reply(http, text, 503, "no_session")
        if await has_left(http):
            self._waiting.appendleft(offer)
            async with self._changed:
                self._changed.notify()
            return Response(status_code=CLIENT_GONE)
        offer.is_taken.set()
        opened = offer.opened
        return json_response({"id": opened.id, "url": opened.url, "key": opened.key, **offer.task})

    async def _next(self, wait_s: float) -> SessionOffer | None:
        async with self._changed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(lambda: self._waiting)
            except TimeoutError:
                return None
            return self._waiting.popleft()


def read_result(body: Mapping[str, Any], *, needs_reward: bool) -> dict[str, Any]:
    """Return reward, metadata and error of the body of `POST .../end`. Raises RequestError."""
    if unknown := sorted(set(body) - {"reward", "metadata", "error"}):
        raise RequestError(f"unknown fields {unknown}; POST .../end takes reward, metadata and error")
    reward, metadata, error = body.get("reward"), body.get("metadata") or {}, body.get("error")
    if not isinstance(metadata, dict) or "reward" in metadata:
        raise RequestError(f"metadata is {metadata!r:.80}; post an object without the key reward")
    if error is not None and not isinstance(error, str):
        raise RequestError(f"error is {error!r:.80}; post the reason as text")
    values = list(cast("dict[str, Any]", reward).values()) if isinstance(reward, dict) else [reward]
    if reward is not None and not (values and all(map(_is_reward, values))):
        raise RequestError(f"reward is {reward!r:.80}; post a finite number, or an object of numbers by role")
    if reward is None and error is None and needs_reward:
        raise RequestError(
            'reward is missing, and the run has no reward function; post {"reward": NUMBER}, or {"error": "why"} '
            "for an episode that must not be trained on"
        )
    return {"reward": reward, "metadata": metadata, "error": error}


def _wait_of(body: Mapping[str, Any]) -> float:
    """Return the seconds that a request waits for a session. Raises RequestError."""
    if unknown := sorted(set(body) - {"wait"}):
        raise RequestError(f"unknown fields {unknown}; POST /sessions takes wait, in seconds")
    wait = body.get("wait", DEFAULT_WAIT_S)
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= MAX_WAIT_S:
        raise RequestError(f"wait is {wait!r:.80}; give seconds from 0 to {MAX_WAIT_S:g}")
    return float(wait)


def _is_reward(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
