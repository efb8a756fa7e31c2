"""A rollout whose record says how its engines were loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics
from furlong.interfaces import Rollout


class MeasuredRollout:
    """Implements `interfaces.Rollout` around another one; adds what `measure` returns once a rollout is done."""

    def __init__(self, rollout: Rollout, measure: Callable[[], Metrics]) -> None:
        self._rollout, self._measure = rollout, measure

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """The samples of rollout `rollout_id`; None when the data has ended."""
        batch = await self._rollout.produce(rollout_id)
        if batch is None:
            return None
        return dataclasses.replace(batch, metrics=batch.metrics | self._measure())

    async def evaluate(self, rollout_id: int) -> Metrics:
        """Score the evaluation sets."""
        return await self._rollout.evaluate(rollout_id)
