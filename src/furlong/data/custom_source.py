"""Data sources other than --prompt-data: the user's class, and sources without prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from furlong.config.hooks import HOOKS
from furlong.core.sample import Group, Sample
from furlong.core.text import shortened
from furlong.core.user_code import with_hook_errors
from furlong.data.prompt import Prompt
from furlong.data.source import STATE_VERSION, adopted, sample_seed
from furlong.errors import CheckpointError, ConfigError, DataError

METHODS = HOOKS["data_source"].methods


class CustomDataSource:
    """Adapts an object with `get_samples(n)`, `add_samples(groups)`, `save(id)`, `load(id)` and `__len__`.

    Groups and samples without numbers get the next ones, and samples without a seed the usual one. Text prompts without
    tokens are tokenized if there is a tokenizer. Groups have epoch -1, for a source without epochs. The object saves
    its own state: `state` calls `save` with the number of the save in this run, and `restore` calls `load`.
    `instance` is the object, which user functions get as `data_source`.
    """

    num_long_prompts = 0

    def __init__(self, instance: Any, *, tokenizer: Any = None, rollout_seed: int = 42) -> None:
        if missing := [name for name in METHODS if not callable(getattr(instance, name, None))]:
            raise ConfigError(
                f"--data-source-path: {type(instance).__name__} lacks the methods {missing}; "
                f"a data source has {list(METHODS)}"
            )
        self.instance, self._tokenizer, self._seed = instance, tokenizer, rollout_seed
        self._call = {
            name: with_hook_errors(getattr(instance, name), f"--data-source-path: {name}") for name in METHODS
        }
        self._next_group = self._next_sample = self._num_saves = 0

    @property
    def groups_per_epoch(self) -> int | None:
        """The object's length."""
        return self._call["__len__"]()

    def next_groups(self, n: int) -> list[Group]:
        """Return the object's next `n` groups. Raises DataError unless it returns a list of lists of samples."""
        answer = self._call["get_samples"](n)
        if not isinstance(answer, list) or not all(_is_group(item) for item in cast("list[Any]", answer)):
            raise DataError(
                f"--data-source-path: get_samples of {type(self.instance).__name__} returned {shortened(answer)}; it "
                "must return a list of non-empty lists of furlong.Sample"
            )
        groups = [self._numbered(samples) for samples in cast("list[list[Sample]]", answer)]
        if len(groups) > n or len({group.index for group in groups}) < len(groups):
            raise DataError(
                f"--data-source-path: get_samples({n}) of {type(self.instance).__name__} returned {len(groups)} groups "
                f"with group_index {[group.index for group in groups]}; return at most {n}, with distinct values"
            )
        return groups

    def return_groups(self, groups: Sequence[Group]) -> None:
        """Pass unfinished groups to the object's `add_samples`."""
        self._call["add_samples"]([group.samples for group in groups])

    def adopt(self, samples: list[Sample]) -> Group:
        """Return a group of samples that user code made, with the next numbers."""
        group = adopted(samples, self._next_group, self._next_sample, seed=self._seed)
        self._next_group += 1
        self._next_sample += len(samples)
        return group

    def state(self) -> dict[str, Any]:
        """Let the object save itself; return the save number and the counters."""
        self._num_saves += 1
        self._call["save"](self._num_saves)
        return {
            "version": STATE_VERSION,
            "class": type(self.instance).__qualname__,
            "save": self._num_saves,
            "next_group": self._next_group,
            "next_sample": self._next_sample,
        }

    def restore(self, state: dict[str, Any], *, data_changed: bool = False) -> None:  # noqa: ARG002  of the protocol
        """Let the object load its state. Raises CheckpointError if another class saved it."""
        saved, now = (state.get("version"), state.get("class")), (STATE_VERSION, type(self.instance).__qualname__)
        if saved != now:
            raise CheckpointError(
                f"the data state has (version, class) {saved}, this run has {now}; use the same class"
            )
        self._num_saves = state["save"]
        self._next_group, self._next_sample = state["next_group"], state["next_sample"]
        self._call["load"](self._num_saves)

    def close(self) -> None:
        """Do nothing: no resources are open."""

    def _numbered(self, samples: list[Sample]) -> Group:
        indices = {sample.group_index for sample in samples}
        if len(indices) > 1:
            raise DataError(f"the samples of one group have group_index {indices}; set the same value for all, or None")
        index = indices.pop()
        if index is None:
            index = self._next_group
        self._next_group = max(self._next_group, index + 1)
        for sample in samples:
            sample.group_index = index
            number = self._next_sample if sample.index is None else sample.index
            sample.index = number
            self._next_sample = max(self._next_sample, number + 1)
            if sample.rollout_id is None:
                sample.rollout_id = number
            if sample.seed is None:
                sample.seed = sample_seed(self._seed, number)
            if not sample.tokens and isinstance(sample.prompt, str) and self._tokenizer is not None:
                sample.tokens = list(self._tokenizer.encode(sample.prompt, add_special_tokens=False))
        return Group(index, samples, epoch=-1, row=index)


def _is_group(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(isinstance(s, Sample) for s in cast("list[Any]", item))


class EmptyDataSource:
    """Implements `interfaces.DataSource` for a run that reads no prompts."""

    groups_per_epoch = None
    num_long_prompts = 0

    def next_groups(self, n: int) -> list[Group]:
        """Raise DataError: there are no prompts."""
        raise DataError(f"{n} prompt groups were requested, but this run has no --prompt-data")

    def return_groups(self, groups: Sequence[Group]) -> None:
        """Raise DataError: no group was issued."""
        raise DataError(f"{len(groups)} prompt groups were returned, but this run has no --prompt-data")

    def adopt(self, samples: list[Sample]) -> Group:
        """Raise DataError: nothing asks for prompts."""
        raise DataError(f"a group of {len(samples)} samples was made, but this run has no --prompt-data")

    def state(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: dict[str, Any], *, data_changed: bool = False) -> None:  # noqa: ARG002  of the protocol
        """Raise CheckpointError if the checkpoint has a data position."""
        if state:
            raise CheckpointError("the checkpoint has a data position, but this run has no --prompt-data")

    def close(self) -> None:
        """Do nothing."""


class EmptyPrompts:
    """Endless empty prompts, which a rollout function fills in. Implements `data.source.Prompts`."""

    size = None
    num_long = 0

    def __init__(self) -> None:
        self._row = 0

    def begin(self, key: int | None) -> None:  # noqa: ARG002  the protocol's signature
        """Start the only epoch."""
        self._row = 0

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts."""
        first, self._row = self._row, self._row + n
        return [Prompt(row, "", []) for row in range(first, self._row)]

    def position(self) -> dict[str, Any]:
        """Return how many were taken."""
        return {"row": self._row}

    def seek(self, key: int | None, position: dict[str, Any], *, by_row: bool = False) -> None:  # noqa: ARG002
        """Continue after a position."""
        self._row = position["row"]

    def settings(self) -> dict[str, Any]:
        """Return the settings that must match for a position to be valid."""
        return {"path": "none (--disable-rollout-global-dataset)"}

    def close(self) -> None:
        """Do nothing."""
