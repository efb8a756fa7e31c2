"""Data sources without prompt data: for replays, evaluations, and rollout functions with their own prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from furlong.core.sample import Group
from furlong.data.prompt import Prompt
from furlong.errors import CheckpointError, DataError


class EmptyDataSource:
    """Implements `interfaces.DataSource` for a run that reads no prompts."""

    groups_per_epoch = None

    def next_groups(self, n: int) -> list[Group]:
        """Raise DataError: there are no prompts."""
        raise DataError(f"{n} prompt groups were requested, but this run has no --prompt-data")

    def return_groups(self, groups: Sequence[Group]) -> None:
        """Raise DataError: no group was issued."""
        raise DataError(f"{len(groups)} prompt groups were returned, but this run has no --prompt-data")

    def state(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError if the checkpoint has a data position."""
        if state:
            raise CheckpointError("the checkpoint has a data position, but this run has no --prompt-data")

    def close(self) -> None:
        """Do nothing."""


class EmptyPrompts:
    """Endless empty prompts, which a rollout function fills in. Implements `data.dataset.Prompts`."""

    size = None

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

    def seek(self, key: int | None, position: dict[str, Any]) -> None:  # noqa: ARG002  the protocol's signature
        """Continue after a position."""
        self._row = position["row"]

    def settings(self) -> dict[str, Any]:
        """Return the settings that must match for a position to be valid."""
        return {"path": "none (--disable-rollout-global-dataset)"}

    def close(self) -> None:
        """Do nothing."""
