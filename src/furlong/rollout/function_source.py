"""The data source as functions of the user get it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from furlong.core.sample import Group, Sample
from furlong.errors import RolloutError
from furlong.interfaces import DataSource, Ledger

T = TypeVar("T")


class SourceForFunctions:
    """The data source as slime's rollout functions know it: `get_samples`, `add_samples` and `len` over its groups.

    The functions run in a thread of their own; source and ledger belong to the event loop's, which does the work.
    Other attributes are those of the object of --data-source-path, where there is one.
    """

    def __init__(self, source: DataSource, ledger: Ledger, *, loop: asyncio.AbstractEventLoop, rollout_id: int) -> None:
        self._source, self._ledger = source, ledger
        self._issued: dict[int, Group] = {}
        self._loop, self.rollout_id = loop, rollout_id

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next prompt groups."""
        return self._on_loop(lambda: self._get(num_samples))

    def add_samples(self, samples: Sequence[list[Sample]]) -> None:
        """Take unfinished groups back."""
        self._on_loop(lambda: self._add(samples))

    def __len__(self) -> int:
        """Groups of one epoch. Raises RolloutError while a stream was not read through."""
        return _num_groups(self._source)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the user's own data source."""
        return getattr(_own(self._source), name)

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
                f"--rollout-function-path returned a group with group_index {index}, which was not handed out; keep "
                "`group_index` of the samples that data_source.get_samples gave"
            )
        group = self._issued.pop(index)
        group.samples = samples
        return group

    def unclaimed(self) -> list[Group]:
        """Groups that were handed out and never came back."""
        left, self._issued = list(self._issued.values()), {}
        return left


class JudgedSource:
    """The data source as --rollout-all-samples-process-path gets it, after a rollout: its length, and nothing to take.

    Where the data comes from --data-source-path the function gets that object.
    """

    def __init__(self, source: DataSource) -> None:
        self._source = source

    def __len__(self) -> int:
        """Groups of one epoch. Raises RolloutError while a stream was not read through."""
        return _num_groups(self._source)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError: every group of the rollout is accounted for when the function is called."""
        raise AttributeError(
            f"--rollout-all-samples-process-path: data_source has len() and no {name}: every group of the rollout is "
            "trained on, dropped or given back already; to choose prompts yourself write a class for "
            "--data-source-path, which the function then gets as data_source"
        )


def source_for_samples_hook(source: DataSource) -> Any:
    """What --rollout-all-samples-process-path gets as `data_source`."""
    own = _own(source)
    return JudgedSource(source) if own is None else own


def _own(source: DataSource) -> Any:
    return getattr(source, "instance", None)


def _num_groups(source: DataSource) -> int:
    if source.groups_per_epoch is None:
        raise RolloutError(
            "len(data_source) is not known: the run has no --prompt-data, or a stream that was not read through yet; "
            "leave out --streaming-data to know it from the start"
        )
    return source.groups_per_epoch
