"""Groups that came back unfinished, waiting to be handed out again before new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from furlong.core.sample import Group, Sample
from furlong.errors import DataError

BufferFilter = Callable[[Any, int | None, list[list[Sample]], int], list[list[Sample]]]


class ReturnedGroups:
    """A queue of groups, first in first out unless a `--buffer-filter-path` function picks.

    The function is called as slime calls it: `fn(args, rollout_id, buffer, num_samples)` with `rollout_id` None and
    the buffer as lists of samples. It returns at most `num_samples` of them and removes these from `buffer`. A group
    that it removes and does not return is dropped, which `on_drop(group, reason)` is told.
    """

    def __init__(
        self,
        *,
        buffer_filter: BufferFilter | None = None,
        args: Any = None,
        on_drop: Callable[[Group, str], None] | None = None,
    ) -> None:
        self._filter, self._args, self._on_drop = buffer_filter, args, on_drop
        self._groups: dict[int, Group] = {}

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def put(self, groups: Iterable[Group]) -> None:
        """Add groups at the end. Raises DataError for one that is already there."""
        for group in groups:
            if group.index in self._groups:
                raise DataError(
                    f"group {group.index} was given back twice; give a group back once each time it was handed out"
                )
            self._groups[group.index] = group

    def clear(self) -> None:
        """Forget all groups."""
        self._groups.clear()

    def take(self, n: int) -> list[Group]:
        """Remove and return up to `n` groups."""
        if n < 1 or not self._groups:
            return []
        if self._filter is None:
            return [self._groups.pop(index) for index in list(self._groups)[:n]]
        return self._picked(self._filter, n)

    def _picked(self, pick: BufferFilter, n: int) -> list[Group]:
        """Let the user's function pick, and check that every group is either picked, left, or dropped."""
        buffer = [group.samples for group in self._groups.values()]
        index_of = {id(group.samples): index for index, group in self._groups.items()}
        answer = cast(Any, pick(self._args, None, buffer, n))
        if not isinstance(answer, list):
            raise DataError(f"--buffer-filter-path returned {type(answer).__name__}; it must return a list of groups")
        picked = cast("list[list[Sample]]", answer)
        strange = sum(id(samples) not in index_of for samples in [*picked, *buffer])
        picked_ids = [index_of[id(samples)] for samples in picked if id(samples) in index_of]
        left_ids = {index_of[id(samples)] for samples in buffer if id(samples) in index_of}
        both = left_ids.intersection(picked_ids)
        if strange or both or len(picked) > n or len(set(picked_ids)) < len(picked):
            raise DataError(
                f"--buffer-filter-path returned {len(picked)} groups for {n} asked: {strange} not of the buffer, "
                f"{len(both)} were left in the buffer too; return its own lists, each once, and remove them from it"
            )
        groups = [self._groups.pop(index) for index in picked_ids]
        for index in [index for index in self._groups if index not in left_ids]:
            group = self._groups.pop(index)
            if self._on_drop is not None:
                self._on_drop(group, "buffer_filter")
        return groups
