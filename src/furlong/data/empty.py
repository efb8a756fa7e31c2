"""No data: replays, evaluations, and rollout functions that bring their own prompts."""

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
        """Raise DataError: there is nothing to hand out."""
        raise DataError(f"{n} prompt groups were asked for, but this run has no --prompt-data")

    def return_groups(self, groups: Sequence[Group]) -> None:
        """Raise DataError: nothing was handed out."""
        raise DataError(f"{len(groups)} prompt groups were given back, but this run has no --prompt-data")

    def state(self) -> dict[str, Any]:
        """No position."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError if the checkpoint is of a run that had data."""
        if state:
            raise CheckpointError("the checkpoint holds a data position, but this run reads no --prompt-data")

    def close(self) -> None:
        """Nothing is open."""


class EmptyPrompts:
    """Prompts without end and without text, which a rollout function fills in. Implements `data.dataset.Prompts`."""

    size = None

    def __init__(self) -> None:
        self._row = 0

    def begin(self, key: int | None) -> None:  # noqa: ARG002  the protocol's signature
        """Start an epoch; there is only one, and nothing to shuffle."""
        self._row = 0

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts."""
        first, self._row = self._row, self._row + n
        return [Prompt(row, "", []) for row in range(first, self._row)]

    def position(self) -> dict[str, Any]:
        """How many were taken."""
        return {"row": self._row}

    def seek(self, key: int | None, position: dict[str, Any]) -> None:  # noqa: ARG002  the protocol's signature
        """Go on after those."""
        self._row = position["row"]

    def settings(self) -> dict[str, Any]:
        """What has to be the same for a position to mean something."""
        return {"path": "none (--disable-rollout-global-dataset)"}

    def close(self) -> None:
        """Nothing is open."""
