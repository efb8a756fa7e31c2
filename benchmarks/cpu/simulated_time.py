"""An event loop whose clock jumps to the next timer as soon as nothing is ready, so that waiting takes no time.

Only for coroutines that wait for timers and for each other: a thread or a socket would be overtaken by the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SimulatedLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 0 and moves only when every callback that is due has run."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        """Return the simulated seconds."""
        return self._now

    def _run_once(self) -> None:
        ready: Any = self._ready  # pyright: ignore[reportAttributeAccessIssue]  no public hook for the clock
        timers: Any = self._scheduled  # pyright: ignore[reportAttributeAccessIssue]
        if not ready and timers:
            self._now = max(self._now, timers[0].when())
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue]


def run_simulated(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(work)
