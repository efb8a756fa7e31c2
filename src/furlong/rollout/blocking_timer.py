"""Time in which user functions block the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")

MIN_BLOCK_S = 0.05  # between two awaits; shorter blocks are normal


class BlockingTimer:
    """Adds up the seconds in which user functions block the event loop for `MIN_BLOCK_S` or longer."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def timed(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await `function()`, timing each step between two awaits."""

        async def call() -> T:
            return await function()

        return await _Steps(call(), self)

    def count(self, seconds: float) -> None:
        """Add the duration of one step."""
        if seconds >= MIN_BLOCK_S:
            self._seconds += seconds


class _Steps(Generator[Any, Any, T]):
    """Runs a coroutine step by step. It is exposed as `cr_await`, so that tools can follow what a task waits for."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], timer: BlockingTimer) -> None:
        self.cr_await, self._timer = coroutine, timer

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def send(self, value: Any, /) -> Any:
        """Run to the next await."""
        return self._timed(self.cr_await.send, value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception at the current await."""
        return self._timed(self.cr_await.throw, *error)

    def _timed(self, step: Callable[..., Any], *values: Any) -> Any:
        started = perf_counter()
        try:
            return step(*values)
        finally:
            self._timer.count(perf_counter() - started)
