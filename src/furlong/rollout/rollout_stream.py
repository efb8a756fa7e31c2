"""Stream of rollouts in order, some in flight ahead of training. Synchronous and asynchronous training share it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics
from furlong.core.tracing import tracer
from furlong.interfaces import Parts, PauseMode

logger = logging.getLogger(__name__)


class RolloutStream:
    """Runs at most `ahead` rollouts in flight ahead of training and returns batches in order of rollout id.

    A rollout starts when the rollout `ahead` places before it is passed to training, so a batch is at most
    `ahead + update_weights_interval - 1` weight versions old when it is trained on. With ahead = 1 rollouts overlap
    with training but not with each other.
    """

    def __init__(self, parts: Parts, *, first: int, end: int, ahead: int, pause: PauseMode) -> None:
        self._rollout, self._engine, self._device_sharing = parts.rollout, parts.engine, parts.device_sharing
        self._ledger = parts.ledger
        self._ahead = ahead
        self._pause_mode: PauseMode = pause
        self._ids = iter(range(first, end))
        self._running: deque[asyncio.Task[RolloutBatch | None]] = deque()
        self._evaluation: asyncio.Task[Metrics] | None = None

    async def needs_weights(self) -> bool:
        """Wait for the next rollout. Return True as soon as it can only finish after a weight update, else False."""
        self._fill(1)
        while self._running:
            if await self._waits_for_weights(self._running[0]):
                return True
            if self._running[0].result() is not None:
                return False
            self._running.popleft()
            self._ids = iter(())
        return False

    async def next(self) -> RolloutBatch | None:
        """Return the next rollout; None at the end of the data. Call after `needs_weights` has returned False.

        Consumes the oldest running rollout and starts the next ones. If several rollouts share the last data, the
        oldest may be empty while a later one is not.
        """
        while self._running:
            batch = await self._running[0]
            self._running.popleft()
            if batch is not None:
                self._fill(self._ahead)
                return batch
        return None

    def evaluate(self, rollout_id: int) -> asyncio.Task[Metrics]:
        """Start an evaluation of the weights that the engine serves; weights are not updated before it is done."""
        self._evaluation = asyncio.create_task(self._evaluate(rollout_id), name=f"evaluate-{rollout_id}")
        return self._evaluation

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """Pause generation during a weight update.

        "finish" waits for every running rollout and evaluation; "hold" and "abort" pause the engine within its next
        step, and its requests continue afterwards with the new weights. Without an engine every mode is "finish".
        Rollouts that can only continue with the new weights, because all engines were lost, are not waited for.
        """
        starved = self._evaluation is not None and await self._waits_for_weights(self._evaluation)
        if self._pause_mode == "finish" or self._engine is None:
            starved = starved or await self._waits_for_weights(*self._running)
            for task in self._running:
                if task.done():
                    task.result()  # a failed rollout ends the run now, not when its turn comes
        if starved:
            logger.warning("all engines were lost after the last training step: rollouts continue with new weights")
        if self._engine is None or (self._pause_mode == "finish" and not starved):
            yield
            return
        await self._engine.pause(self._pause_mode)
        try:
            yield
        finally:
            await self._engine.resume()

    async def finished(self) -> list[RolloutBatch]:
        """Wait for the rollouts in flight and return them without consuming them; for checkpoints.

        Rollouts without data are left out: a resumed run requests them again, and may have more epochs.
        """
        return [batch for batch in await asyncio.gather(*self._running) if batch is not None]

    def restore(self, batches: list[RolloutBatch]) -> None:
        """Add rollouts from a checkpoint as already produced.

        Those beyond the last rollout, if the resumed run is shorter, are not trained on but kept for `finished`.
        """
        for batch in batches:
            self._ledger.restored(batch.group_ids.tolist(), batch.rollout_id)
            next(self._ids, None)
            self._running.append(asyncio.create_task(_completed(batch)))

    async def _waits_for_weights(self, *tasks: asyncio.Task[Any]) -> bool:
        """Wait for the tasks. Return True as soon as they can only continue after a weight update, else False."""
        if self._engine is None:
            if tasks:
                await asyncio.wait(tasks)
            return False
        ended = asyncio.gather(*map(asyncio.shield, tasks), return_exceptions=True)
        needed = asyncio.ensure_future(self._engine.wait_until_weights_needed())
        try:
            await asyncio.wait({ended, needed}, return_when=asyncio.FIRST_COMPLETED)
            return not ended.done()
        finally:
            ended.cancel()
            needed.cancel()
            await asyncio.gather(ended, needed, return_exceptions=True)

    def _fill(self, slots: int) -> None:
        for rollout_id in itertools.islice(self._ids, max(0, slots - len(self._running))):
            task = asyncio.create_task(self._produce(rollout_id), name=f"rollout-{rollout_id}")
            task.add_done_callback(self._failed)
            self._running.append(task)

    async def _produce(self, rollout_id: int) -> RolloutBatch | None:
        async with self._device_sharing.generating():
            with tracer.flight("rollout", rollout=rollout_id):
                batch = await self._rollout.produce(rollout_id)
            if batch is not None and self._engine is not None:
                batch.metrics.update(self._engine.take_load())
        return batch

    async def _evaluate(self, rollout_id: int) -> Metrics:
        async with self._device_sharing.generating():
            with tracer.flight("evaluation", rollout=rollout_id):
                return await self._rollout.evaluate(rollout_id)

    def _failed(self, task: asyncio.Task[RolloutBatch | None]) -> None:
        """Log at once that a rollout in flight failed; the run ends when its turn comes, or sooner."""
        if self._ahead and not task.cancelled() and (error := task.exception()) is not None:
            logger.error("[ASYNC02] %s failed with %s: %s", task.get_name(), type(error).__name__, error)

    async def __aenter__(self) -> RolloutStream:
        if self._ahead:
            logger.info("Continuous async rollout worker started: up to %d rollouts ahead of training", self._ahead)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        tasks: list[asyncio.Task[Any]] = [*self._running, *([self._evaluation] if self._evaluation else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if error is not None:
            self._ledger.ended(is_saved=False)


async def _completed(batch: RolloutBatch) -> RolloutBatch | None:
    return batch
