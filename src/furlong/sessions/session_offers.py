"""Sessions that applications outside of the run take, play and end: `POST /sessions`, and `POST .../end`."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from furlong.inference.request_error import RequestError
from furlong.inference.server.schemas import Schema, read_fields
from furlong.sessions.open_session import OpenSession


class Wait(Schema):
    """The body of POST /sessions: seconds that it waits for a session."""

    wait: Annotated[float, Meta(ge=0, le=300)] = 30.0


class _Result(Schema):
    reward: float | dict[str, float] | None = None
    metadata: dict[str, Any] | None = None
    error: str | None = None


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
        self.key = key
        self._waiting: deque[SessionOffer] = deque()
        self._by_id: dict[str, SessionOffer] = {}
        self._given: set[str] = set()  # ids of sessions whose application may not have got them
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
        self._given.discard(offer.opened.id)
        if offer in self._waiting:
            self._waiting.remove(offer)

    def of(self, opened: OpenSession) -> SessionOffer | None:
        """Return the offer of a session; None if it was not offered."""
        return self._by_id.get(opened.id)

    async def take(self, wait_s: float) -> dict[str, Any] | None:
        """Return the next session for an application, with its task; None if there is none within `wait_s`."""
        async with self._changed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(lambda: self._waiting)
            except TimeoutError:
                return None
            offer = self._waiting.popleft()
        opened = offer.opened
        self._given.add(opened.id)
        keys = {"key": opened.key, "controller_key": opened.controller_key}
        return {"id": opened.id, "url": opened.url, **keys, **offer.task}

    async def confirm(self, id: str) -> None:
        """Note that an application has got a session."""
        self._given.discard(id)
        if (offer := self._by_id.get(id)) is not None:
            offer.is_taken.set()

    async def give_back(self, id: str) -> None:
        """Offer a session again, as the first one: the application had left when it was answered."""
        offer = self._by_id.get(id)
        if offer is not None and id in self._given:
            self._given.remove(id)
            self._waiting.appendleft(offer)
            async with self._changed:
                self._changed.notify()


def read_result(body: Mapping[str, Any], *, needs_reward: bool) -> dict[str, Any]:
    """Return reward, metadata and error of the body of `POST .../end`. Raises RequestError."""
    result = read_fields(_Result, body)
    reward, metadata = result.reward, result.metadata or {}
    if "reward" in metadata:
        raise RequestError("metadata has the key reward; post it beside metadata")
    values = list(reward.values()) if isinstance(reward, dict) else [0.0 if reward is None else reward]
    if not values or not all(map(math.isfinite, values)):
        raise RequestError(f"reward is {reward!r:.80}; post a finite number, or an object of numbers by role")
    if reward is None and result.error is None and needs_reward:
        raise RequestError(
            'reward is missing, and the run has no reward function; post {"reward": NUMBER}, or {"error": "why"} '
            "for an episode that must not be trained on"
        )
    return {"reward": reward, "metadata": metadata, "error": result.error}
