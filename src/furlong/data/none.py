"""No data: replays, and rollout functions that bring their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from furlong.core.sample import Group
from furlong.errors import CheckpointError, DataError


class NoData:
    """Implements `ports.DataSource` for a run that reads no prompts."""

    groups_per_epoch = None

    def next_groups(self, n: int) -> list[Group]:
        """Raise DataError: there is nothing to hand out."""
        raise DataError(f"{n} prompt groups were asked for, but this run has no --prompt-data")

    def give_back(self, groups: Sequence[Group]) -> None:
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
