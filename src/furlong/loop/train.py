"""The loop: generate, train, publish, save. Synchronous and asynchronous training are the same lines.

One step, in order:
1. `stream.next()` hands over the oldest rollout and starts the next ones, up to `ahead` beyond it;
2. the trainer runs all optimizer steps of that rollout; the ledger records its groups as trained;
3. when due, weights are published while generation is quiet, and verified;
4. one merged record goes to the trackers, with the evaluation if one was due;
5. when due, everything is saved, with the rollouts that are ahead. A save publishes first, so that a resumed run starts
   from the weights that the engines had, and so does an evaluation, which is of the step that it is reported with.
   Files may be written while the next steps run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics, maximum, mean, total, values
from furlong.core.trace import tracer
from furlong.errors import DataError
from furlong.interfaces import Parts, PauseMode, Tracker
from furlong.loop.checkpoints import Checkpoints
from furlong.loop.weight_update import WeightUpdater
from furlong.rollout.rollout_stream import RolloutStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """When what happens, in rollouts. `ahead` rollouts may run beyond the one in training; 0 is synchronous.

    A batch is at most `max_staleness` weight versions old when it is trained on. With `saves_on_hang` a rollout that
    the observer gives up leaves a checkpoint of the step before it.
    """

    num_rollout: int
    ahead: int = 0
    update_weights_interval: int = 1
    pause_mode: PauseMode = "finish"
    save_every: int | None = None
    eval_every: int | None = None
    eval_before_train: bool = True
    saves_on_hang: bool = False

    @property
    def max_staleness(self) -> int:
        """The bound on `rollout/staleness/max`."""
        return self.ahead + self.update_weights_interval - 1

    def eval_due(self, step: int) -> bool:
        """Whether to evaluate the weights after `step` rollouts."""
        if not self.eval_every or (step == 0 and not self.eval_before_train):
            return False
        return step % self.eval_every == 0 or step == self.num_rollout

    def save_due(self, step: int) -> bool:
        """Whether to save after `step` rollouts; the last one always is, if any is."""
        return self.save_every is not None and (step % self.save_every == 0 or step == self.num_rollout)

    def weight_update_due(self, step: int) -> bool:
        """Whether to publish after `step` rollouts: by interval, before a save or an evaluation, and at the end."""
        is_needed = self.save_due(step) or self.eval_due(step)
        return step % self.update_weights_interval == 0 or is_needed or step == self.num_rollout


async def train(parts: Parts, plan: Plan, checkpoints: Checkpoints, *, begun: Callable[[], None] | None = None) -> int:
    """Run `plan` from the checkpoint that is found, if any, after a call of `begun`; returns the rollouts done."""
    step, ahead = await checkpoints.restore(parts)
    saved = step
    if step >= plan.num_rollout > 0:
        logger.info("nothing to train: %d of %d rollouts are done; raise --num-rollout", step, plan.num_rollout)
    update_weights = WeightUpdater(parts.sync, parts.observer, parts.device_sharing)
    await update_weights(step)
    if begun is not None and step < plan.num_rollout:
        begun()
    journal = Journal(parts.trackers, is_patient=plan.ahead > 0)
    async with (
        checkpoints.settled(),
        RolloutStream(parts, first=step, end=plan.num_rollout, ahead=plan.ahead, pause=plan.pause_mode) as stream,
    ):
        stream.restore(ahead)
        if step == 0 and plan.eval_due(0):
            evaluation = stream.evaluate(0)
            await update_weights.finish_verification()
            await journal.add(0, {}, evaluation)
        while step < plan.num_rollout:
            clock = _Clock()
            checkpoints.check()
            batch = await _next(parts, plan, checkpoints, stream, step, update_weights, is_saved=step == saved)
            if batch is None:
                break
            await update_weights.finish_verification()
            clock.lap("perf/train_wait_time")
            async with parts.device_sharing.training():
                with tracer.span("train", rollout=step):
                    report = await parts.trainer.train(batch)
            clock.lap("perf/train_time")
            parts.ledger.trained(batch.group_ids.tolist(), step)
            report |= batch.metrics | _staleness(batch, step)
            step += 1
            if plan.weight_update_due(step):
                async with stream.quiet():
                    with tracer.span("publish weights", version=step):
                        report |= await update_weights(step)
            evaluation = stream.evaluate(step) if plan.eval_due(step) else None
            if evaluation is not None:  # of weights that are proven, as is the one that is held
                await journal.settle()
                await update_weights.finish_verification()
            await journal.add(step, report | clock.metrics() | parts.device_sharing.metrics(), evaluation)
            if plan.save_due(step):
                await journal.settle()
                with tracer.span("save", step=step):
                    await checkpoints.save(parts, stream, step)
                saved = step
            if parts.observer.stop_requested:
                break
        await journal.settle()
        if plan.save_every is not None and step > saved:  # the data ended, or a diagnosis the run, before one was due
            async with stream.quiet():
                await update_weights(step)
            await checkpoints.save(parts, stream, step)
            saved = step
        await update_weights.finish_verification()
        if parts.observer.stop_requested:
            parts.ledger.ended(is_saved=step == saved and checkpoints.save_dir is not None)
    return step


async def _next(
    parts: Parts,
    plan: Plan,
    checkpoints: Checkpoints,
    stream: RolloutStream,
    step: int,
    update_weights: WeightUpdater,
    *,
    is_saved: bool,
) -> RolloutBatch | None:
    """Wait for the rollout that is trained on next; None when the data has ended. The log says so.

    Updates the weights first if all engines were lost and their replacements have none.

    With `plan.saves_on_hang` a wait that the observer gives up leaves a checkpoint of `step`, unless it `is_saved`.
    Raises DataError if the data ended before anything was trained.
    """
    position = checkpoints.position(parts) if plan.saves_on_hang and not plan.ahead else None
    try:
        with tracer.span("wait for rollout", rollout=step):
            while await stream.needs_weights():
                async with stream.quiet():
                    await update_weights(step)
            batch = await stream.next()
    except asyncio.CancelledError:
        if position is not None and parts.observer.stop_requested and not is_saved:
            await checkpoints.save(parts, stream, step, position=position)
        raise
    if batch is None and not step:
        raise DataError(
            f"nothing was trained: the data ended before the first of {plan.num_rollout} rollouts was full; give more "
            "rows or epochs, a smaller --rollout-batch-size, or a filter that drops less (`furlong report RUN_DIR` "
            "counts what was dropped)"
        )
    if batch is None:
        logger.warning("the data ended after %d of %d rollouts", step, plan.num_rollout)
    elif not batch.loss_masks.any():  # its optimizer step is made all the same, with a gradient of 0
        logger.warning(
            "rollout %d: none of its %d response tokens is trained on, so nothing is learned from it; look at failed "
            "samples, --mask-truncated, --rollout-sample-filter-path and loss masks of generate functions",
            batch.rollout_id, len(batch.loss_masks),
        )  # fmt: skip
    return batch


class Journal:
    """Hands one merged record a step to the trackers, in order.

    A step that is evaluated is recorded when its evaluation is there. If `is_patient`, training goes on meanwhile and
    the record is held until the next one comes.
    """

    def __init__(self, trackers: Sequence[Tracker], *, is_patient: bool) -> None:
        self._trackers, self._is_patient = trackers, is_patient
        self._held: tuple[int, Metrics, Awaitable[Metrics] | None] | None = None

    async def add(self, step: int, metrics: Metrics, evaluation: Awaitable[Metrics] | None) -> None:
        """Record a step, after the one that is held."""
        await self.settle()
        self._held = (step, metrics, evaluation)
        if evaluation is None or not self._is_patient:
            await self.settle()

    async def settle(self) -> None:
        """Wait for the evaluation that a held record lacks, and hand the record over."""
        if self._held is None:
            return
        step, metrics, evaluation = self._held
        self._held = None
        if evaluation is not None:
            metrics = metrics | await evaluation
        for tracker in self._trackers:
            tracker.log(step, values(metrics))


class _Clock:
    """Wall time of one step, by phase."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: Metrics = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = total(now - self._last)
        self._last = now

    def metrics(self) -> Metrics:
        step_s = time.perf_counter() - self._start
        waited = self._laps["perf/train_wait_time"].value
        return self._laps | {"perf/step_time": total(step_s), "perf/wait_time_ratio": mean(waited / step_s)}


def _staleness(batch: RolloutBatch, step: int) -> Metrics:
    """Age of the policy that sampled each token, in rollouts trained since."""
    versions = batch.columns.get("token_versions")
    if versions is None:
        return {}
    known = versions[versions >= 0]
    if not len(known):
        return {}
    age = step - known
    return {
        "rollout/staleness/mean": mean(float(age.mean()), len(age)),
        "rollout/staleness/max": maximum(float(age.max())),
    }
