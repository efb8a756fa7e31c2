"""Timers of a rollout: the event loop blocked by user code, and the time spent only on rewards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
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


class RewardWait:
    """Adds up the seconds in which samples of a rollout or evaluation are scored while none is generated.

    A group is scored after its last sample is generated, so this is the time after the last generation, and between
    two rounds of groups if a filter drops the first. `seconds` is final when all groups are done.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._generating = self._scoring = 0
        self._last = 0.0

    @contextmanager
    def generating(self) -> Generator[None]:
        """Wrap the generation of a group, custom generate functions included."""
        self._change(generating=1)
        try:
            yield
        finally:
            self._change(generating=-1)

    @contextmanager
    def scoring(self) -> Generator[None]:
        """Wrap the reward call of a group."""
        self._change(scoring=1)
        try:
            yield
        finally:
            self._change(scoring=-1)

    def _change(self, generating: int = 0, scoring: int = 0) -> None:
        now = perf_counter()
        if self._scoring and not self._generating:
            self.seconds += now - self._last
        self._generating, self._scoring, self._last = self._generating + generating, self._scoring + scoring, now
