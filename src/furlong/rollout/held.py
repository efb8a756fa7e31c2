"""How long functions of the user's hold the event loop: in one thread, nothing else goes on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

LEAST_S = 0.05  # between two awaits; less is what any function takes, or waits for the interpreter


class Held:
    """Adds up the seconds that functions run without awaiting anything, where it is `LEAST_S` or more at a time."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def timed(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call a function and await its answer; what it holds is counted."""

        async def called() -> T:
            return await function()

        return await _Steps(called(), self)

    def count(self, seconds: float) -> None:
        """Take what went by between two awaits."""
        if seconds >= LEAST_S:
            self._seconds += seconds


class _Steps(Generic[T]):
    """Awaits something step by step: what it waits for goes to the event loop, what comes back goes to it."""

    def __init__(self, awaited: Awaitable[T], held: Held) -> None:
        self._awaited, self._held = awaited, held

    def __await__(self) -> Generator[Any, Any, T]:
        steps: Any = self._awaited.__await__()
        sent: Any = None
        raised: BaseException | None = None
        while True:
            started = time.perf_counter()
            try:
                waits_for = steps.send(sent) if raised is None else steps.throw(raised)
            except StopIteration as done:
                return done.value
            finally:
                self._held.count(time.perf_counter() - started)
            try:
                sent, raised = (yield waits_for), None
            except BaseException as error:  # noqa: BLE001  goes on to what is awaited
                sent, raised = None, error
