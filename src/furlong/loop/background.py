"""One piece of work that goes on beside the loop, and whose failure is the loop's."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """Holds at most one task. What it failed with is raised once, by the first that asks."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Start `work`; what was begun before is settled."""
        assert self._task is None
        self._task = asyncio.create_task(work)

    def check(self) -> None:
        """Raise what the task failed with, if it has ended so."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def settle(self) -> None:
        """Wait for the task. Raises what it failed with. A caller that is cancelled leaves it running."""
        if self._task is not None:
            await asyncio.wait([self._task])
            self.check()
