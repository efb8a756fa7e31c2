"""`Turns`: how connections share the event loop, so that no burst of them delays all others.

An iteration of asyncio runs every callback that is ready. If 2,000 clients send a request at the same time, the next
iteration would parse and start 2,000 requests, and another client would wait for several such iterations.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

ITERATION_S = 0.01  # that turns may take of one iteration of the event loop
FOLLOW_UP_S = 0.001  # that the tasks started or resumed in a turn take afterwards, at least


class Turns:
    """Runs actions in the order in which they were added, for about `ITERATION_S` in each iteration of the event loop.

    Used by the event loop's thread only.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], None], float]] = deque()
        self._is_scheduled = False
        self._until_s = 0.0

    def add(self, action: Callable[[], None], follow_up_s: float = FOLLOW_UP_S) -> None:
        """Run `action` now, if this iteration has time left, or in its turn. Tasks then take `follow_up_s`."""
        if not self._is_scheduled:
            self._schedule()
        if self._waiting or time.perf_counter() >= self._until_s:
            self._waiting.append((action, follow_up_s))
        else:
            self._take(action, follow_up_s)

    async def wait(self, follow_up_s: float) -> None:
        """Return in this caller's turn, which will take `follow_up_s`: at once if this iteration has time left."""
        if not self._is_scheduled:
            self._schedule()
        if not self._waiting and time.perf_counter() < self._until_s:
            self._until_s -= max(FOLLOW_UP_S, follow_up_s)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.add(lambda: None if turn.done() else turn.set_result(None), max(FOLLOW_UP_S, follow_up_s))
        await turn

    def _take(self, action: Callable[[], None], follow_up_s: float) -> None:
        self._until_s -= follow_up_s
        action()

    def _schedule(self) -> None:
        self._until_s = time.perf_counter() + ITERATION_S
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        if self._waiting:
            self._schedule()
        while self._waiting and time.perf_counter() < self._until_s:
            self._take(*self._waiting.popleft())
