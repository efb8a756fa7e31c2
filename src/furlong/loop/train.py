"""The training loop. Synchronous and asynchronous training are the same lines.

One step, in order:
1. `stream.next()` returns the oldest rollout and starts the next ones, up to `ahead` beyond it;
2. the trainer runs all optimizer steps of that rollout; the ledger records its groups as trained;
3. when due, weights are updated while generation is paused, and verified;
4. one merged record goes to the trackers, with the evaluation if one was due;
5. when due, everything is saved, including the rollouts generated ahead.

A save or an evaluation updates the weights first: a resumed run starts from the weights that the engines had, and an
evaluation belongs to the step that it is reported with. Files may be written while the next steps run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

from furlong.core.batch import RolloutBatch
from furlong.core.garbage import GarbageCollector
from furlong.core.metric import Metrics, maximum, mean, total, values
from furlong.core.progress import progress
from furlong.core.tracing import tracer
from furlong.errors import DataError, SyncError
from furlong.interfaces import DeviceSharing, Observer, Parts, PauseMode, Tracker, WeightSync
from furlong.loop.checkpoints import Checkpoints
from furlong.loop.schedule import RunSchedule

MAX_NAMES = 64  # of unchanged tensors in an event

logger = logging.getLogger(__name__)


async def train(
    parts: Parts, schedule: RunSchedule, checkpoints: Checkpoints, *, on_start: Callable[[], None] | None = None
) -> int:
    """Train from the latest checkpoint, if any, to the end of `schedule`; return the number of rollouts done.

    `on_start` is called before the first step, unless nothing is left to train.
    """
    with progress.phase("loading the checkpoint"):
        step, ahead = await checkpoints.restore(parts)
    first = saved_step = step
    if step >= schedule.num_rollout > 0:
        logger.info("nothing to train: %d of %d rollouts are done; raise --num-rollout", step, schedule.num_rollout)
    update_weights = WeightUpdater(parts.sync, parts.observer, parts.device_sharing)
    await update_weights(step)
    if on_start is not None and step < schedule.num_rollout:
        on_start()
    recorder = StepRecorder(parts.trackers, defers_evaluations=schedule.ahead > 0)
    garbage = GarbageCollector()
    stream = RolloutStream(parts, first=step, end=schedule.num_rollout, ahead=schedule.ahead, pause=schedule.pause_mode)
    async with checkpoints.settled(), stream:
        stream.restore(ahead)
        if step == 0 and schedule.eval_due(0):
            await _evaluate_first(stream, recorder, update_weights)
        while step < schedule.num_rollout:
            clock = _Clock()
            checkpoints.check()
            batch = await _next(parts, schedule, checkpoints, stream, step, update_weights, is_saved=step == saved_step)
            if batch is None:
                break
            await update_weights.finish_verification()
            clock.lap("perf/train_wait_time")
            report = await _train_on(parts, batch, step)
            clock.lap("perf/train_time")
            parts.ledger.trained(batch.group_ids.tolist(), step)
            report |= batch.metrics | _staleness(batch, step)
            step += 1
            if schedule.weight_update_due(step):
                report |= await _update(stream, step, update_weights)
            stream.admit(step, version=update_weights.version)
            evaluation = stream.evaluate(step) if schedule.eval_due(step) else None
            if evaluation is not None:  # evaluations are recorded for verified weights only
                await recorder.flush()
                await update_weights.finish_verification()
            await recorder.add(step, report | clock.metrics() | parts.device_sharing.metrics(), evaluation)
            if schedule.save_due(step):
                await recorder.flush()
                with tracer.span("save", step=step):
                    await checkpoints.save(parts, stream.finished, step)
                saved_step = step
            garbage.collect()
            if parts.observer.stop_requested:
                break
        await recorder.flush()
        if schedule.save_every is not None and step > saved_step:  # the data or the run ended before a save was due
            await _update_and_save(parts, checkpoints, stream, step, update_weights)
            saved_step = step
        await update_weights.finish_verification()
        if step > first or checkpoints.lacks_model():
            await checkpoints.save_model(parts, step)
        if await stream.end() or parts.observer.stop_requested:
            parts.ledger.ended(is_saved=step == saved_step and checkpoints.save_dir is not None)
    return step


async def _train_on(parts: Parts, batch: RolloutBatch, step: int) -> Metrics:
    """Run the optimizer steps of one rollout on the trainer's devices."""
    async with parts.device_sharing.training():
        with tracer.span("train", rollout=step), progress.phase("training", unit="micro-batches", beat="micro-batch"):
            return await parts.trainer.train(batch)


async def _update(stream: RolloutStream, step: int, update_weights: WeightUpdater) -> Metrics:
    """Update the engines' weights while nothing is generated."""
    async with stream.paused():
        with tracer.span("update weights", version=step):
            return await update_weights(step)


async def _update_and_save(
    parts: Parts, checkpoints: Checkpoints, stream: RolloutStream, step: int, update_weights: WeightUpdater
) -> None:
    """Update the engines' weights, then save, so that a resumed run starts from the weights that the engines had."""
    await _update(stream, step, update_weights)
    await checkpoints.save(parts, stream.finished, step)


async def _evaluate_first(stream: RolloutStream, recorder: StepRecorder, update_weights: WeightUpdater) -> None:
    """Evaluate the initial weights."""
    evaluation = stream.evaluate(0)
    await update_weights.finish_verification()
    await recorder.add(0, {}, evaluation)


async def _next(
    parts: Parts,
    schedule: RunSchedule,
    checkpoints: Checkpoints,
    stream: RolloutStream,
    step: int,
    update_weights: WeightUpdater,
    *,
    is_saved: bool,
) -> RolloutBatch | None:
    """Wait for the rollout to train on next; None at the end of the data.

    Updates the weights first if all engines were lost and their replacements have none. If the observer stops a rollout
    that hangs, saves `step` with `saves_on_hang`, unless it `is_saved`. Raises DataError if nothing was trained.
    """
    position = checkpoints.position(parts) if schedule.saves_on_hang and not schedule.ahead else None
    try:
        with tracer.span("wait for rollout", rollout=step):
            while await stream.needs_weights():
                async with stream.paused():
                    await update_weights(step)
            batch = await stream.next()
    except asyncio.CancelledError:
        if position is not None and parts.observer.stop_requested and not is_saved:
            await checkpoints.save(parts, stream.finished, step, position=position)
        raise
    if batch is None and not step:
        raise DataError(
            f"nothing was trained: the data ended before the first of {schedule.num_rollout} rollouts was complete; "
            "add rows or epochs, or use a smaller --rollout-batch-size or a filter that drops less (`furlong report "
            "RUN_DIR` counts dropped groups)"
        )
    if batch is None:
        logger.warning("the data ended after %d of %d rollouts", step, schedule.num_rollout)
    elif not batch.loss_masks.any():  # the optimizer step is still taken, with zero gradient
        logger.warning(
            "rollout %d: all %d response tokens are masked, so nothing is learned from it; check failed samples, "
            "--mask-truncated, --rollout-sample-filter-path and the loss masks of generate functions",
            batch.rollout_id, len(batch.loss_masks),
        )  # fmt: skip
    return batch


class WeightUpdater:
    """Runs weight updates and compares the checksums of each with the previous one.

    Events: `weight_update_started` and `weight_update`, the latter with version, tensors, bytes and seconds.
    `weights_compared` when the checksums of two updates in a row are known, with version, tensors, the number that
    `changed`, and the first names that are `unchanged`. `weight_update_timeout` if engines did not answer in time, with
    the fields of `SyncError.late`.
    """

    def __init__(self, sync: WeightSync, observer: Observer, device_sharing: DeviceSharing) -> None:
        self._sync, self._observer, self._device_sharing = sync, observer, device_sharing
        self._last: dict[str, str] = {}
        self.version = 0

    async def __call__(self, version: int) -> Metrics:
        """Load the trainer's weights into the engines as `version`; return the metrics of the update."""
        await self.finish_verification()
        self._observer.notify("weight_update_started", version=version)
        try:
            async with self._device_sharing.updating_weights():
                with progress.phase("updating weights"):
                    report = await self._sync.update_weights(version)
        except SyncError as error:
            if error.late is not None:
                self._observer.notify("weight_update_timeout", **error.late)
            raise
        facts: dict[str, Any] = {
            "version": version,
            "tensors": report.num_tensors,
            "bytes": report.num_bytes,
            "seconds": round(report.seconds, 6),
        }
        self._observer.notify("weight_update", **facts)
        self.version = version
        self._compare(report.checksums)
        metrics = {
            "perf/update_weights_time": total(report.seconds),
            "perf/update_weights_verify_time": total(report.verify_s),
        }
        if report.wire_bytes is not None:
            metrics["perf/update_weights_wire_bytes"] = total(report.wire_bytes)
        return metrics

    async def finish_verification(self) -> None:
        """Wait until the engines' weights are verified. Raises SyncError if some differ."""
        self._compare(await self._sync.finish_verification())

    def _compare(self, checksums: dict[str, str]) -> None:
        """Report what changed since the previous update."""
        if not checksums:
            return
        if self._last:
            same = [name for name, value in checksums.items() if self._last.get(name) == value]
            changed = len(checksums) - len(same)
            facts = {"version": self.version, "tensors": len(checksums), "changed": changed}
            self._observer.notify("weights_compared", **facts, unchanged=same[:MAX_NAMES])
        self._last = checksums


class RolloutStream:
    """Runs at most `ahead` rollouts in flight ahead of training and returns batches in order of rollout id.

    A rollout starts when the rollout `ahead` places before it is passed to training, so a batch is at most
    `ahead + update_weights_interval - 1` weight versions old when it is trained on. With ahead = 1 rollouts overlap
    with training but not with each other.

    If rollouts share the groups in flight (`RolloutPool.is_shared`), the stream admits groups instead: up to `ahead`
    rollouts more than are trained. Groups then run on over weight updates, which wait for requests only.
    """

    def __init__(self, parts: Parts, *, first: int, end: int, ahead: int, pause: PauseMode) -> None:
        self._rollout, self._engine, self._device_sharing = parts.rollout, parts.engine, parts.device_sharing
        self._ledger = parts.ledger
        self._groups = parts.pool
        self._pool = parts.pool if parts.pool is not None and parts.pool.is_shared else None
        self._ahead, self._end = ahead, end
        self._first = first
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

    def admit(self, step: int, *, version: int) -> None:
        """Let more groups start: `step` rollouts are trained, and the engines serve weights `version`."""
        if self._pool is not None:
            self._pool.admit(step, ahead=self._ahead, end=self._end, version=version)

    async def end(self) -> bool:
        """Let no more groups start; return whether some are in flight, which no rollout will train on."""
        if self._groups is not None:
            await self._groups.close()
        return self._has_groups

    @property
    def _has_groups(self) -> bool:
        return self._groups is not None and bool(self._groups.snapshot())

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """Pause generation during a weight update.

        "finish" waits for every running rollout and evaluation, or, if rollouts share their groups, for the requests in
        the engine; "hold" and "abort" pause the engine within its next step, and its requests continue afterwards with
        the new weights. Without an engine every mode is "finish". Rollouts that can only continue with the new weights,
        because all engines were lost, are not waited for.
        """
        starved = self._evaluation is not None and await self._waits_for_weights(self._evaluation)
        if self._engine is None or (self._pool is None and self._pause_mode == "finish"):
            starved = starved or await self._waits_for_weights(*self._running)
            for task in self._running:
                if task.done():
                    task.result()  # a failed rollout ends the run now, not when its turn comes
        if starved:
            logger.warning("all engines were lost after the last training step: rollouts continue with new weights")
        is_idle = self._pool is None and not self._has_groups  # a rollout function may generate between its calls
        if self._engine is None or (is_idle and self._pause_mode == "finish" and not starved):
            yield
            return
        await self._engine.pause(self._pause_mode)
        try:
            yield
        finally:
            await self._engine.resume()

    async def finished(self) -> list[RolloutBatch]:
        """Wait for the rollouts in flight and return them without consuming them; for checkpoints.

        Rollouts without data are left out: a resumed run requests them again, and may have more epochs. If rollouts
        share their groups, only complete rollouts are returned: the groups are saved with the pool.
        """
        if self._pool is not None:
            done = [task.result() for task in self._running if task.done()]
            return [batch for batch in done if batch is not None]
        return [batch for batch in await asyncio.gather(*self._running) if batch is not None]

    def restore(self, batches: list[RolloutBatch]) -> None:
        """Add rollouts from a checkpoint as already produced, and let groups start.

        Those beyond the last rollout, if the resumed run is shorter, are not trained on but kept for `finished`.
        """
        for batch in batches:
            self._ledger.restored(batch.group_ids.tolist(), batch.rollout_id)
            next(self._ids, None)
            self._running.append(asyncio.create_task(_completed(batch)))
        self.admit(self._first + len(batches), version=self._first)

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
        await self.end()
        if error is not None:
            self._ledger.ended(is_saved=False)


async def _completed(batch: RolloutBatch) -> RolloutBatch | None:
    return batch


class StepRecorder:
    """Sends one merged record per step to the trackers, in order.

    A step with an evaluation is recorded when the evaluation is done. With `defers_evaluations`, training continues
    meanwhile and the record is kept until the next one is added.
    """

    def __init__(self, trackers: Sequence[Tracker], *, defers_evaluations: bool) -> None:
        self._trackers, self._defers_evaluations = trackers, defers_evaluations
        self._pending: tuple[int, Metrics, Awaitable[Metrics] | None] | None = None

    async def add(self, step: int, metrics: Metrics, evaluation: Awaitable[Metrics] | None) -> None:
        """Record a step, after the pending one."""
        await self.flush()
        self._pending = (step, metrics, evaluation)
        if evaluation is None or not self._defers_evaluations:
            await self.flush()

    async def flush(self) -> None:
        """Wait for the evaluation of the pending record, and send the record."""
        if self._pending is None:
            return
        step, metrics, evaluation = self._pending
        self._pending = None
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
    """Age of the policy that sampled each trained token, in rollouts trained since then."""
    versions = batch.columns.get("token_versions")
    if versions is None:
        return {}
    known = versions[(versions >= 0) & (batch.loss_masks > 0)]
    if not len(known):
        return {}
    age = step - known
    return {
        "rollout/staleness/mean": mean(float(age.mean()), len(age)),
        "rollout/staleness/max": maximum(float(age.max())),
    }
