"""Views of the data source for user functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from furlong.core.sample import Group, Sample
from furlong.errors import RolloutError
from furlong.interfaces import DataSource, Ledger

T = TypeVar("T")


class RolloutFunctionSource:
    """The `data_source` argument of slime's rollout functions: `get_samples`, `add_samples` and `len`.

    The function runs in a thread, while source and ledger belong to the event loop; calls are executed there. Other
    attributes are those of the --data-source-path object, if there is one.
    """

    def __init__(self, source: DataSource, ledger: Ledger, *, loop: asyncio.AbstractEventLoop, rollout_id: int) -> None:
        self._source, self._ledger = source, ledger
        self._issued: dict[int, Group] = {}
        self._loop, self.rollout_id = loop, rollout_id

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next prompt groups."""
        return self._on_loop(lambda: self._get(num_samples))

    def add_samples(self, samples: Sequence[list[Sample]]) -> None:
        """Return unfinished groups to the source."""
        self._on_loop(lambda: self._add(samples))

    def __len__(self) -> int:
        """Return the groups of one epoch. Raises RolloutError until a stream has been read once."""
        return _num_groups(self._source)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's data source."""
        return getattr(_instance(self._source), name)

    def _on_loop(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _get(self, num_samples: int) -> list[list[Sample]]:
        groups = self._source.next_groups(num_samples)
        self._ledger.issued(groups, self.rollout_id)
        self._issued.update({group.index: group for group in groups})
        return [group.samples for group in groups]

    def _add(self, samples: Sequence[list[Sample]]) -> None:
        groups = [self.group_of(each) for each in samples]
        for group in groups:
            self._ledger.returned(group, "add_samples")
        self._source.return_groups(groups)

    def group_of(self, samples: list[Sample]) -> Group:
        """Return the issued group that these samples belong to. Raises RolloutError if there is none."""
        index = samples[0].group_index if samples else None
        if index is None or index not in self._issued:
            raise RolloutError(
                f"--rollout-function-path returned a group with group_index {index}, which was not issued by "
                "data_source.get_samples in this rollout; keep `group_index` of its samples"
            )
        group = self._issued.pop(index)
        group.samples = samples
        return group

    def unclaimed(self) -> list[Group]:
        """Remove and return the issued groups that were not returned."""
        left, self._issued = list(self._issued.values()), {}
        return left


class SamplesHookSource:
    """The `data_source` argument of --rollout-all-samples-process-path: only its length.

    With --data-source-path the function gets that object instead.
    """

    def __init__(self, source: DataSource) -> None:
        self._source = source

    def __len__(self) -> int:
        """Return the groups of one epoch. Raises RolloutError until a stream has been read once."""
        return _num_groups(self._source)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError: every group of the rollout is already accounted for."""
        raise AttributeError(
            f"--rollout-all-samples-process-path: data_source has only len(), not {name}: every group of the rollout "
            "is already trained on, dropped or returned; to choose prompts write a class for --data-source-path, which "
            "the function then gets as data_source"
        )


def source_for_samples_hook(source: DataSource) -> Any:
    """Return the `data_source` argument of --rollout-all-samples-process-path."""
    instance = _instance(source)
    return SamplesHookSource(source) if instance is None else instance


def _instance(source: DataSource) -> Any:
    """Return the user's data source object, None if there is none."""
    return getattr(source, "instance", None)


def _num_groups(source: DataSource) -> int:
    if source.groups_per_epoch is None:
        raise RolloutError(
            "len(data_source) is unknown: the run has no --prompt-data, or a stream that has not been read once yet; "
            "drop --streaming-data to know it from the start"
        )
    return source.groups_per_epoch
