"""Several coroutines at once, none of which outlives the others' failure."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gathered(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; returns their results in order. If one raises, the others are cancelled and have ended before that is.

    >>> async def plus_one(number: int) -> int:
    ...     return number + 1
    >>> asyncio.run(gathered(map(plus_one, [1, 2])))
    [2, 3]
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.cancelling():  # a second time would interrupt what it does about the first
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
