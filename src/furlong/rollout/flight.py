"""Prompt groups in flight: generated at the same time, and taken one by one when they are finished."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from furlong.core.sample import Group
from furlong.rollout.episode_load import RewardWait

_Numbered = tuple[int, asyncio.Task[Group]]


@dataclass
class Flight:
    """The tasks of groups that were submitted and not judged yet.

    Tasks are numbered in order of submission. A finished task is in `queue` until its result is read, then in `done`
    and in the heap `finished`. It stays in the heap after its group is judged, until it reaches the top. `tasks` maps a
    group's index to its task, `running` each task that is not judged to the group as it was issued. `is_collecting` is
    False once no more groups are needed. `wait` measures the time in which samples are only scored.
    """

    submitted: int = 0
    judged: int = 0
    queue: asyncio.Queue[_Numbered | None] = field(default_factory=asyncio.Queue[_Numbered | None])
    finished: list[_Numbered] = field(default_factory=list[_Numbered])
    done: set[asyncio.Task[Group]] = field(default_factory=set[asyncio.Task[Group]])
    tasks: dict[int, asyncio.Task[Group]] = field(default_factory=dict[int, asyncio.Task[Group]])
    running: dict[asyncio.Task[Group], Group] = field(default_factory=dict[asyncio.Task[Group], Group])
    wait: RewardWait = field(default_factory=RewardWait)
    is_collecting: bool = True

    def submit(self, origin: Group, work: Coroutine[Any, Any, Group], name: str) -> None:
        """Start the task of a group. `origin`: the group to give back if it is not completed."""
        task = asyncio.create_task(work, name=name)
        self.running[task] = origin
        self.tasks[origin.index] = task
        task.add_done_callback(partial(self._enqueue, self.submitted))
        self.submitted += 1

    def wake(self) -> None:
        """Let `next_finished` return None now."""
        self.queue.put_nowait(None)

    async def next_finished(self, expected: int | None, *, in_order: bool) -> asyncio.Task[Group] | None:
        """Wait for the group to judge next: `expected`, the next in order, or the one submitted first of the finished.

        Returns None after `wake`. An exception of any task is raised at once.
        """
        while (ready := self._ready(expected, in_order=in_order)) is None:
            if (item := await self.queue.get()) is None:
                return None
            number, task = item
            task.result()
            heapq.heappush(self.finished, (number, task))
            self.done.add(task)
        self.judged += 1
        return ready

    def take(self, task: asyncio.Task[Group]) -> Group:
        """Remove a finished group and return it as it was issued."""
        self.done.discard(task)
        origin = self.running.pop(task)
        self.tasks.pop(origin.index)
        return origin

    async def cancel(self) -> None:
        """Cancel all tasks and wait for their end."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    def _ready(self, expected: int | None, *, in_order: bool) -> asyncio.Task[Group] | None:
        if expected is not None:
            task = self.tasks.get(expected)
            return task if task in self.done else None
        while self.finished and self.finished[0][1] not in self.running:
            heapq.heappop(self.finished)
        if not self.queue.empty() or not self.finished:
            return None
        number, task = self.finished[0]
        return task if not in_order or number == self.judged else None

    def _enqueue(self, number: int, task: asyncio.Task[Group]) -> None:
        self.queue.put_nowait((number, task))
