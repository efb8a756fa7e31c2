"""What is done again and again beside a run: a task from `start` to `close`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Repeated:
    """Awaits `work`, which waits before it does something, until it is closed."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._repeat())

    async def close(self) -> None:
        """Stop, in the middle of the work if need be."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _repeat(self) -> None:
        while True:
            await self._work()
