"""Requests of an `HttpEngine` that are under way, and how they are ended early."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from furlong.errors import EngineError
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_pool import ServerPool
from furlong.interfaces import SamplingParams

logger = logging.getLogger(__name__)

ABORT_S = 5.0  # for a server to answer requests that were aborted; then they end here with nothing
GENERATE = "/generate"


@dataclass(eq=False)
class Flight:
    """A request on its way.

    `given_up` is set when it was aborted and its server did not answer. `cached_tokens`: of its prompt, when a request
    before it had that computed; None if none did.
    """

    rid: str
    session: str | None
    prompt: list[int]
    params: SamplingParams
    server: SglangServer | None = None
    call: asyncio.Task[Any] | None = None
    version: int | None = None
    cached_tokens: int | None = None
    is_sent: bool = False
    is_aborted: bool = False
    given_up: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @cached_property
    def key(self) -> int:
        """What requests with the same prompt have in common."""
        return hash(tuple(self.prompt))

    @property
    def where(self) -> str:
        """What was asked of whom, for messages."""
        assert self.server is not None
        return f"POST {self.server.url}{GENERATE}"


class Flights:
    """The requests of one engine that have not been answered."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._open: set[Flight] = set()
        self._run, self._counter = uuid.uuid4().hex[:12], itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    def new_rid(self) -> str:
        """A name for a request that no engine knows yet."""
        return f"furlong-{self._run}-{next(self._counter)}"

    @contextmanager
    def one(self, session: str | None, prompt: list[int], params: SamplingParams) -> Generator[Flight]:
        """A request that is under way until the block is left."""
        flight = Flight(self.new_rid(), session, prompt, params)
        self._open.add(flight)
        try:
            yield flight
        finally:
            self._open.discard(flight)
            flight.done.set()

    def all(self) -> list[Flight]:
        """All of them."""
        return list(self._open)

    def of(self, sessions: Collection[str]) -> list[Flight]:
        """Those of these sessions."""
        wanted = frozenset(sessions)
        return [flight for flight in self._open if flight.session in wanted]

    def cancel(self) -> list[Flight]:
        """Have all of them end at once where they are; returns them."""
        flights = self.all()
        for flight in flights:
            if flight.call is not None and not flight.given_up:
                flight.call.cancel()
        return flights

    async def end(self, flights: Iterable[Flight]) -> None:
        """Abort requests and wait until they have answered; what is not answered in time ends with nothing.

        An abort may overtake its request on the way to the server, so it is repeated until the request is done.
        """
        left = [flight for flight in flights if not flight.done.is_set()]
        deadline, pause_s = time.monotonic() + ABORT_S, 0.001
        while left:
            is_late = time.monotonic() > deadline
            if is_late and (silent := [flight for flight in left if flight.is_sent and not flight.given_up]):
                logger.warning("%d requests were aborted, but not answered in %g s", len(silent), ABORT_S)
            for flight in left:
                flight.is_aborted = True
                if not flight.is_sent or is_late:
                    _give_up(flight)
            sent = [flight for flight in left if flight.is_sent and not flight.given_up]
            refused = [error for errors in await asyncio.gather(*map(self._abort, sent)) for error in errors]
            if refused:  # the requests are given up, or fail by themselves
                logger.warning("%d aborts were not done; the last: %s", len(refused), refused[-1])
            await all_done([flight for flight in left if flight.given_up])
            left = [flight for flight in left if not flight.done.is_set()]
            if left:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.2)

    async def _abort(self, flight: Flight) -> list[EngineError]:
        """Tell the server that has the request, or all of them behind a router; returns what they did not do it for."""
        refused: list[EngineError] = []
        server = flight.server
        targets = self._pool.alive() if server is self._pool.router or server is None else [server]
        for target in targets:
            try:
                await target.command("/abort_request", rid=flight.rid, timeout_s=ABORT_S)
            except EngineError as error:
                refused.append(error)
        return refused


async def all_done(flights: Iterable[Flight]) -> None:
    """Wait until these requests have ended."""
    for flight in flights:
        await flight.done.wait()


def _give_up(flight: Flight) -> None:
    if flight.given_up:
        return  # a second cancellation would interrupt the closing of its connection
    flight.given_up = True
    if flight.call is not None:
        flight.call.cancel()
