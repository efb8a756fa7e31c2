"""Calls of rollout functions, filters of groups and filters of the buffer, as user code makes them."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from furlong.core.sample import Sample
from furlong.rollout.filters import DynamicFilterOutput, filter_output
from furlong.rollout.replay import RolloutFnEvalOutput, RolloutFnTrainOutput


class DataSource(abc.ABC):
    """Base class of data sources for `--data-source-path`; `docs/reference/hooks.md` describes the methods."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups."""

    @abc.abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take back unfinished groups."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Save the state for a checkpoint."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Load the state of a checkpoint."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of groups in one epoch."""


def call_rollout_fn(
    function: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function; a plain list or dict becomes the result type."""
    output = function(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)


def call_dynamic_filter(function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Call a filter; None keeps the group."""
    return DynamicFilterOutput(True) if function is None else filter_output(function(*args, **kwargs))


def pop_first(args: Any, rollout_id: int | None, buffer: list[Any], num_samples: int) -> list[Any]:  # noqa: ARG001
    """Remove and return the first groups of the buffer, as the run does without --buffer-filter-path."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken
