"""Prompt groups in flight, and the pool that rollouts share: admission, age and choice.

1. Groups start while those issued and not trained are fewer than `ahead` + 1 batches (`admit`).
2. A group that is complete, and kept by the filter, is `ready`.
3. Rollouts take ready groups one rollout after the other: the first complete ones, but none becomes older than
   `max_staleness` weight versions by waiting, so a rollout may wait for a group that started long ago.

Nothing is cancelled or started again for its age.
"""

from __future__ import annotations

import asyncio
import copy
import heapq
from bisect import bisect_right
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

from furlong.core.sample import UNKNOWN_VERSION, Group, Sample
from furlong.rollout.episodes import RewardWait
from furlong.rollout.generate import reset_response

StaleTokens = Literal["pace", "mask", "drop"]

RESUMED = "resumed"  # reason in the ledger for groups that were running when the checkpoint was saved

_Numbered = tuple[int, asyncio.Task[Group]]


@dataclass
class Flight:
    """The tasks of groups that were submitted and not judged yet, numbered in order of submission.

    A finished task is in `queue` until its result is read, then in the heap `finished`. `running` maps each task that
    is not judged to the group as it was issued. `is_collecting` is False once no more groups are needed. `wait`
    measures the time in which samples are only scored.
    """

    submitted: int = 0
    judged: int = 0
    queue: asyncio.Queue[_Numbered | None] = field(default_factory=asyncio.Queue[_Numbered | None])
    finished: list[_Numbered] = field(default_factory=list[_Numbered])
    running: dict[asyncio.Task[Group], Group] = field(default_factory=dict[asyncio.Task[Group], Group])
    wait: RewardWait = field(default_factory=RewardWait)
    is_collecting: bool = True

    def submit(self, origin: Group, work: Coroutine[Any, Any, Group], name: str) -> None:
        """Start the task of a group. `origin`: the group to return if it is not completed."""
        task, number = asyncio.create_task(work, name=name), self.submitted
        self.running[task] = origin
        task.add_done_callback(lambda done: self.queue.put_nowait((number, done)))
        self.submitted += 1

    def wake(self) -> None:
        """Let `next_finished` return None now."""
        self.queue.put_nowait(None)

    async def next_finished(self, *, in_order: bool) -> tuple[Group, Group] | None:
        """Wait for the group to judge next: the next in order, or the one submitted first of the finished.

        Returns it as it was issued and as it is finished; None after `wake`. An exception of any task is raised at
        once.
        """
        while not self.queue.empty() or not self.finished or (in_order and self.finished[0][0] != self.judged):
            if (item := await self.queue.get()) is None:
                return None
            item[1].result()
            heapq.heappush(self.finished, item)
        self.judged += 1
        _, task = heapq.heappop(self.finished)
        return self.running.pop(task), task.result()

    async def cancel(self) -> None:
        """Cancel all tasks and wait for their end."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)


@dataclass
class GroupPool:
    """Groups of all rollouts. For one event loop.

    batch_size: groups in a rollout. max_staleness: bound of the age of tokens in weight versions, or None. stale: how
    it is kept; only "pace" delays rollouts. versions: weights that the first episode of each running group began with.
    next_rollout: the one that takes groups next. until: groups of the rollouts before it may start. version: of the
    engines' weights. data_s: seconds that the source took.
    """

    batch_size: int
    max_staleness: int | None
    stale: StaleTokens
    flight: Flight = field(default_factory=Flight)
    ready: list[Group] = field(default_factory=list[Group])
    spare: list[Group] = field(default_factory=list[Group])
    versions: dict[int, int] = field(default_factory=dict[int, int])
    collecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    next_rollout: int = 0
    until: int = 0
    version: int = 0
    data_ended: bool = False
    data_s: float = 0.0
    last_s: float = field(default_factory=monotonic)

    @property
    def room(self) -> int:
        """Number of groups that may start."""
        in_flight = len(self.ready) + len(self.spare) + len(self.flight.running)
        return max(0, (self.until - self.next_rollout) * self.batch_size - in_flight)

    @property
    def deadline(self) -> int:
        """The last rollout that may train on a group that starts now."""
        return max(self.until - 1, self.version + (self.max_staleness or 0))

    def admit(self, step: int, *, ahead: int, end: int, version: int) -> None:
        """Note that `step` rollouts are trained and the engines serve weights `version`."""
        self.next_rollout = max(self.next_rollout, step)
        self.until, self.version = min(step + ahead + 1, end), version

    def take_spares(self, count: int | None = None) -> list[Group]:
        """Remove and return groups that a filter keeps if no others are left."""
        taken, self.spare = self.spare[:count], [] if count is None else self.spare[count:]
        return taken

    def lap(self) -> float:
        """Return the seconds since the last rollout."""
        now, last = monotonic(), self.last_s
        self.last_s = now
        return max(now - last, 1e-6)

    def began(self, group: Group) -> None:
        """Note the weights that a group begins with."""
        self.versions.setdefault(group.index, self.version)

    def choose(self, rollout_id: int) -> list[Group] | None:
        """Remove and return the groups of a rollout, sorted by number; None while more must complete."""
        if len(self.ready) < self.batch_size:
            return None
        if self.max_staleness is None or self.stale != "pace":
            chosen = self.ready[: self.batch_size]
        else:
            ready = [oldest_version([group], self.version) for group in self.ready]
            waiting = [self.versions.get(group.index, self.version) for group in self.flight.running.values()]
            oldest = rollout_id - self.max_staleness
            places = choose_groups(ready, waiting, oldest=oldest, size=self.batch_size)
            if places is None:
                return None
            chosen = [self.ready[place] for place in places]
        taken = {group.index for group in chosen}
        self.ready = [group for group in self.ready if group.index not in taken]
        return sorted(chosen, key=lambda group: group.index)

    def snapshot(self) -> list[tuple[str, Group]]:
        """Return copies of all groups with their state, in order of number; running ones without what they have."""
        saved: list[tuple[str, Group]] = [("ready", copy.deepcopy(group)) for group in self.ready]
        saved += [("finished", copy.deepcopy(group)) for group in self.spare]
        for task, origin in self.flight.running.items():
            is_finished = task.done() and not task.cancelled() and task.exception() is None
            if is_finished:
                saved.append(("finished", copy.deepcopy(task.result())))
            else:
                saved.append(("running", without_responses(origin)))
        return sorted(saved, key=lambda each: each[1].index)


def choose_groups(ready: Sequence[int], running: Sequence[int], *, oldest: int, size: int) -> list[int] | None:
    """Return the positions in `ready` of the `size` groups to train on next; None to wait for more to complete.

    ready: the oldest weight version in each complete group, in order of completion. running: the same of the groups
    that are not complete; those without a token have the current version. Groups of version `oldest` or earlier must be
    in this batch, those of `oldest` + 1 in this or the next one, and so on. The first complete groups are taken as long
    as the batches until then have room for all others.

    >>> choose_groups([1, 0, 1], [0], oldest=0, size=2) is None  # waits for the running group of version 0
    True
    >>> choose_groups([1, 0, 1], [0], oldest=-1, size=2)
    [0, 1]
    """
    versions = sorted((*ready, *running))
    bounds = sorted({oldest, *(version for version in versions if version > oldest)})
    due = {bound: bisect_right(versions, bound) - (bound - oldest) * size for bound in bounds}
    due = {bound: min(count, size) for bound, count in due.items()}  # more than fit after a resume with other sizes
    chosen: list[int] = []
    for position, version in enumerate(ready):
        if len(chosen) == size:
            break
        room = size - len(chosen) - 1
        if all(count - (version <= bound) <= room for bound, count in due.items()):
            chosen.append(position)
            due = {bound: count - (version <= bound) for bound, count in due.items()}
    return chosen if len(chosen) == size else None


def without_responses(group: Group) -> Group:
    """Return a copy of a group, reset to its prompt."""
    group = copy.deepcopy(group)
    for sample in group.samples:
        reset_response(sample, sample.tokens[: sample.prompt_length])
    return group


def oldest_version(groups: Sequence[Group], default: int) -> int:
    """Return the weight version of the oldest token, `default` if there is none."""
    known = (v for group in groups for s in group.samples for v in s.token_versions if v != UNKNOWN_VERSION)
    return min(known, default=default)


def is_stale(sample: Sample, rollout_id: int, max_staleness: int) -> bool:
    """Return whether a token in the loss is older than the bound if the sample is trained on as `rollout_id`."""
    return any(_stale_positions(sample, rollout_id, max_staleness))


def mask_stale(groups: Sequence[Group], rollout_id: int, max_staleness: int) -> int:
    """Exclude tokens beyond the bound from the loss; return their number."""
    count = 0
    for sample in (sample for group in groups for sample in group.samples):
        stale = _stale_positions(sample, rollout_id, max_staleness)
        if any(stale):
            mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
            sample.loss_mask = [0 if is_old else kept for is_old, kept in zip(stale, mask, strict=True)]
            count += sum(stale)
    return count


def _stale_positions(sample: Sample, rollout_id: int, max_staleness: int) -> list[bool]:
    oldest = rollout_id - max_staleness
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    return [
        bool(kept) and UNKNOWN_VERSION < version < oldest
        for kept, version in zip(mask, sample.token_versions, strict=False)
    ]
