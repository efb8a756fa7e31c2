"""How long functions of the user's hold the event loop: in one thread, nothing else goes on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

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


class _Steps(Generator[Any, Any, T]):
    """Awaits a coroutine step by step. `cr_await` is it: who follows what a task waits for finds its way through."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], held: Held) -> None:
        self.cr_await, self._held = coroutine, held

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def send(self, value: Any, /) -> Any:
        """Go on to the next await with this answer."""
        return self._counted(self.cr_await.send, value)

    def throw(self, *error: Any) -> Any:
        """Go on with this exception."""
        return self._counted(self.cr_await.throw, *error)

    def _counted(self, step: Callable[..., Any], *values: Any) -> Any:
        started = time.perf_counter()
        try:
            return step(*values)
        finally:
            self._held.count(time.perf_counter() - started)
