"""The default rollout: keep enough groups in flight, filter the finished ones, stop when the batch is full.

There is one scheduler of groups. A rollout takes finished groups from a `Flight` until its batch is full. Each rollout
has a flight of its own, which ends with it, or all share the one of a `GroupPool`, which outlives them.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from furlong.config.sections import RolloutFlags
from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics, mean, total
from furlong.core.sample import Group, Sample, Status
from furlong.core.tracing import heartbeat
from furlong.errors import RolloutError
from furlong.interfaces import DataSource, Ledger
from furlong.rollout.eval_rollout import EvalSet, evaluate
from furlong.rollout.filters import DynamicFilterOutput, filter_output
from furlong.rollout.flight import Flight
from furlong.rollout.generate import (
    Generation,
    has_failed,
    is_finished,
    reset_response,
    run_group,
    session_of,
)
from furlong.rollout.group_order import GroupOrder
from furlong.rollout.group_pool import RESUMED, GroupPool, is_stale, mask_stale, oldest_version, without_responses
from furlong.rollout.replay import source_for_samples_hook
from furlong.rollout.rollout_report import all_failed, exceeds_context, throughput
from furlong.rollout.sample_metrics import SampleReport
from furlong.rollout.train_batch import Conversion, batch_from_groups

DROPS_PER_WARNING = 10  # batches' worth of dropped groups in one rollout
FAILED_BATCHES, FAILED_GROUPS = 4, 64  # consecutive failed groups that end the run, once others have succeeded
HOPELESS_BATCHES, HOPELESS_GROUPS = 20, 1000  # groups dropped by a filter that has kept none; the run ends
STARTED = "start_rollout_id"  # metadata of a sample: the rollout in which its partial response was started

logger = logging.getLogger(__name__)


@dataclass
class _Round:
    """State of one `produce` call: its groups in flight, which a pool shares, and what became of the finished ones."""

    rollout_id: int
    flight: Flight
    kept: list[Group] = field(default_factory=list[Group])
    failed: list[Group] = field(default_factory=list[Group])
    spare: list[Group] = field(default_factory=list[Group])
    seen: list[Group] = field(default_factory=list[Group])
    surplus: list[Group] = field(default_factory=list[Group])
    num_returned: int = 0
    drops: Counter[str] = field(default_factory=Counter[str])
    data_s: float = 0.0
    num_aborted: int = 0  # groups in a row
    data_ended: bool = False


class EngineRollout:
    """Produces batches with an engine. Implements `interfaces.Rollout` and `interfaces.RolloutPool`.

    Several `produce` calls may run concurrently (asynchronous training). Each takes its own groups from the source;
    with a `pool` they take complete groups from it, one call after the other.

    batch_size: groups in a batch; --over-sampling-batch-size groups are submitted at a time. in_order: judge groups in
    the order of issue, so that a batch depends on weights, seeds and data only and short responses have no advantage;
    otherwise groups are judged as they finish. num_gpus: GPUs (or CPU processes) that generate, for metrics per GPU.
    print_every: log one sample every so many rollouts.
    """

    def __init__(
        self,
        *,
        generation: Generation,
        source: DataSource,
        ledger: Ledger,
        conversion: Conversion,
        flags: RolloutFlags,
        batch_size: int,
        in_order: bool = False,
        num_gpus: int = 1,
        print_every: int | None = None,
        eval_sets: Sequence[EvalSet] = (),
        report: SampleReport | None = None,
        on_groups: Callable[[int, list[Group]], None] | None = None,
        order: GroupOrder | None = None,
        pool: GroupPool | None = None,
    ) -> None:
        self._generation, self._hooks = generation, generation.hooks
        self._source, self._ledger, self._conversion = source, ledger, conversion
        self._batch_size, self._in_order = batch_size, in_order
        self._submit_size = flags.over_sampling_batch_size or batch_size
        self._partial, self._mask_offpolicy = flags.partial_rollout, flags.mask_offpolicy_in_partial_rollout
        self._num_gpus, self._print_every = num_gpus, print_every
        self._eval_sets, self._on_groups = eval_sets, on_groups
        self._report = report or SampleReport()
        self._order = generation.load.order = order or GroupOrder()
        self._pool = pool
        self._max_staleness, self._stale = flags.max_token_staleness, flags.stale_tokens
        self._restored: list[tuple[str, Group]] = []

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """Collect one rollout. Return None if the data cannot fill it; the groups so far are dropped and logged."""
        if self._pool is not None:
            return await self._produce_shared(self._pool, rollout_id)
        started = time.monotonic()
        state = _Round(rollout_id, Flight())
        self._give_back_restored()
        try:
            while len(state.kept) < self._batch_size:
                await self._submit(state)
                if not state.flight.running:
                    break
                self._judge(state, *await self._next_finished(state))
            if len(state.kept) < self._batch_size:
                self._use_spares(state)
        except BaseException:
            await state.flight.cancel()
            raise
        await self._stop(state)
        self._order.ended(rollout_id)
        if len(state.kept) < self._batch_size:
            return self._end_of_data(state)
        return self._finish(state, state.kept, time.monotonic() - started)

    async def evaluate(self, rollout_id: int) -> Metrics:
        """Score every evaluation set with the weights that the engine serves."""
        return await evaluate(self._eval_sets, rollout_id, report=self._report)

    @property
    def is_shared(self) -> bool:
        """Whether rollouts share the groups in flight."""
        return self._pool is not None

    def admit(self, step: int, *, ahead: int, end: int, version: int) -> None:
        """Start groups while those issued and not trained are fewer than `ahead` + 1 batches, up to rollout `end`."""
        if self._pool is not None:
            self._pool.admit(step, ahead=ahead, end=end, version=version)
            self._continue_restored(self._pool)
            self._issue(self._pool)
            self._pool.flight.wake()

    async def before_update(self, version: int) -> None:
        """In a replayed run, wait until the requests that earlier weights answered are answered."""
        if self._pool is not None:
            await self._order.before_update(version, until=self._pool.end)

    def snapshot(self) -> list[tuple[str, Group]]:
        """Return copies of the groups in flight with their state."""
        return [*self._restored, *(self._pool.snapshot() if self._pool is not None else ())]

    def restore(self, saved: Sequence[tuple[str, Group]]) -> None:
        """Continue with the groups of a checkpoint; without a pool, issue them again."""
        self._restored = list(saved)

    async def close(self) -> None:
        """Cancel the groups of the pool."""
        if self._pool is not None:
            self._pool.flight.is_collecting = False
            await self._pool.flight.cancel()

    def _give_back_restored(self) -> None:
        """Return the groups of a checkpoint to the source, to be issued again from the start."""
        saved, self._restored = self._restored, []
        for _, group in saved:
            self._ledger.returned(group, RESUMED)
        self._source.return_groups([without_responses(group) for _, group in saved])

    def _continue_restored(self, pool: GroupPool) -> None:
        saved, self._restored = self._restored, []
        for state, group in saved:
            pool.versions[group.index] = oldest_version([group], pool.version)
            if state == "ready":
                self._ledger.restored([group.index], pool.deadline)
                pool.ready.append(group)
            elif state == "finished":
                pool.flight.submit(group, _completed(group), name=f"group-{group.index}")
            else:
                del pool.versions[group.index]
                self._ledger.issued([group], pool.deadline)
                self._start(pool.flight, group, pool.next_rollout)

    def _issue(self, pool: GroupPool) -> None:
        """Start as many groups as may start."""
        while (room := pool.room) and not pool.data_ended:
            started = time.perf_counter()
            groups = self._source.next_groups(room)
            pool.data_s += time.perf_counter() - started
            pool.data_ended = not groups
            self._ledger.issued(groups, pool.deadline)
            for group in groups:
                self._start(pool.flight, group, pool.next_rollout)

    async def _produce_shared(self, pool: GroupPool, rollout_id: int) -> RolloutBatch | None:
        """Take the next complete groups. A call waits for those of earlier rollouts."""
        async with pool.collecting:
            state = _Round(rollout_id, pool.flight)
            pool.next_rollout, pool.data_ended = rollout_id, False
            while (groups := self._choose(state, pool)) is None:
                self._issue(pool)
                if not pool.flight.running:
                    break
                await self._judge_next(state, pool)
            for group in pool.take_spares():
                self._drop(state, group, "filter")
            state.data_s, pool.data_s = pool.data_s, 0.0
            self._order.ended(rollout_id)
            if groups is None:
                state.kept, pool.ready = pool.ready, []
                return self._end_of_data(state)
            pool.next_rollout = rollout_id + 1
            self._order.collected(rollout_id, groups)
            return self._finish(state, groups, pool.lap())

    async def _judge_next(self, state: _Round, pool: GroupPool) -> None:
        """Wait for a group to be complete, or for a change of admission."""
        expected = self._order.next_judged(state.rollout_id)
        if expected is not None and expected not in pool.flight.tasks and pool.data_ended:
            raise _not_running(state.rollout_id, expected)
        task = await pool.flight.next_finished(expected, in_order=False)
        if task is None:
            return
        origin, group = pool.flight.take(task), task.result()
        self._order.judged(state.rollout_id, origin, is_shared=True)
        self._judge(state, origin, group)
        pool.versions.pop(origin.index, None)
        if state.surplus:  # a function gave the group up: it is issued again
            self._return_surplus(state)

    def _choose(self, state: _Round, pool: GroupPool) -> list[Group] | None:
        """Return the groups of the rollout; None while more must complete."""
        if self._stale == "drop":
            for group in [group for group in pool.ready if self._is_stale(group, state.rollout_id)]:
                pool.ready.remove(group)
                self._drop(state, group, "stale")
        if len(pool.ready) < self._batch_size <= len(pool.ready) + len(pool.spare):
            for group in pool.take_spares(self._batch_size - len(pool.ready)):
                self._ledger.generated(group, state.rollout_id)
                pool.ready.append(group)
        return pool.choose(state.rollout_id)

    async def _next_finished(self, state: _Round) -> tuple[Group, Group]:
        """Wait for the group to judge next; return it as it was issued and finished. An error is raised at once."""
        expected = self._order.next_judged(state.rollout_id)
        if expected is not None and expected not in state.flight.tasks:
            raise _not_running(state.rollout_id, expected)
        task = await state.flight.next_finished(expected, in_order=self._in_order)
        assert task is not None  # only pools wake
        origin = state.flight.take(task)
        self._order.judged(state.rollout_id, origin)
        return origin, task.result()

    async def _submit(self, state: _Round) -> None:
        """Submit groups, `submit_size` at a time, until those in flight, kept or spare can fill the batch."""
        size = self._batch_size
        while not state.data_ended and len(state.kept) + len(state.spare) + len(state.flight.running) < size:
            await self._order.turn(state.rollout_id, "issued")
            started = time.perf_counter()
            groups = self._source.next_groups(self._submit_size)
            state.data_s += time.perf_counter() - started
            self._order.issued(state.rollout_id, groups)
            state.data_ended = not groups
            self._ledger.issued(groups, state.rollout_id)
            for group in groups:
                self._prepare_partial(group)
                self._start(state.flight, group, state.rollout_id)

    def _start(self, flight: Flight, group: Group, rollout_id: int) -> None:
        # A custom function may change a sample, so the source gets a copy back.
        origin = copy.deepcopy(group) if self._generation.is_custom(group) else group
        pool = self._pool
        work = run_group(
            group,
            self._generation,
            rollout_id=rollout_id,
            continues=lambda: flight.is_collecting,
            wait=flight.wait,
            cuts=self._order.cuts(rollout_id, group) if self._partial else None,
            began=None if pool is None else lambda: pool.began(group),
        )
        flight.submit(origin, work, name=f"rollout-{rollout_id}-group-{group.index}")

    def _prepare_partial(self, group: Group) -> None:
        """Mask the tokens of an earlier policy if requested, and let aborted samples continue."""
        for sample in group.samples:
            if sample.response_length and self._mask_offpolicy:
                sample.loss_mask = [0] * sample.response_length
            if sample.status is Status.ABORTED:
                sample.status = Status.PENDING

    def _judge(self, state: _Round, origin: Group, group: Group) -> None:
        """Keep, spare or drop a finished group. Raises RolloutError if groups keep failing or being dropped."""
        heartbeat.beat("group")
        is_aborted = not is_finished(group)
        state.num_aborted = state.num_aborted + 1 if is_aborted else 0
        if state.num_aborted >= max(FAILED_GROUPS, FAILED_BATCHES * self._batch_size):
            raise RolloutError(
                f"rollout {state.rollout_id}: {state.num_aborted} groups in a row have samples with status 'aborted', "
                "so the batch is never full; a custom generate function must set another status, such as completed or "
                "failed, unless its request was aborted"
            )
        pool = self._pool
        if is_aborted or (pool is None and len(state.kept) >= self._batch_size):
            state.surplus.append(group if self._partial and not self._generation.is_custom(origin) else origin)
            return
        state.seen.append(group)
        if has_failed(group):
            state.failed.append(group)
            self._drop(state, group, "all_failed")
            size = self._batch_size
            if len(state.failed) >= (max(FAILED_GROUPS, FAILED_BATCHES * size) if state.kept else max(size, 2)):
                raise RolloutError(all_failed(state.rollout_id, state.failed).text())
            return
        state.failed.clear()
        decision = self._filter(group)
        if decision.keep and self._stale == "drop" and self._is_stale(group, state.rollout_id):
            self._drop(state, group, "stale")
        elif decision.keep:
            self._ledger.generated(group, state.rollout_id)
            state.kept.append(group)
            if pool is not None:
                pool.ready.append(group)
        elif decision.keep_when_insufficient:
            (state.spare if pool is None else pool.spare).append(group)
        else:
            self._drop(state, group, decision.reason or "filter")
            self._check_hopeless(state)

    def _check_hopeless(self, state: _Round) -> None:
        """Raise RolloutError if the filter has dropped every group for a long time."""
        num_seen = len(state.seen)
        if state.kept or state.spare or num_seen < max(HOPELESS_GROUPS, HOPELESS_BATCHES * self._batch_size):
            return
        raise RolloutError(
            f"rollout {state.rollout_id}: all of the first {num_seen} groups were dropped ({dict(state.drops)}), so "
            "there is nothing to train on; check --dynamic-sampling-filter-path and the rewards it judges (--rm-type "
            "or --custom-rm-path), or use prompts that the model sometimes solves"
        )

    def _is_stale(self, group: Group, rollout_id: int) -> bool:
        bound = self._max_staleness
        return bound is not None and any(is_stale(sample, rollout_id, bound) for sample in group.samples)

    def _filter(self, group: Group) -> DynamicFilterOutput:
        dynamic_filter = self._hooks.dynamic_sampling_filter
        if dynamic_filter is None:
            return DynamicFilterOutput(True)
        return filter_output(dynamic_filter(self._generation.args, group.samples))

    def _drop(self, state: _Round, group: Group, reason: str) -> None:
        state.drops[reason] += 1
        batches, rest = divmod(state.drops.total(), DROPS_PER_WARNING * self._batch_size)
        if not rest and batches.bit_count() == 1:  # after 10, 20, 40, ... batches' worth
            logger.warning(
                "rollout %d: %d groups dropped so far (%s) while %d of %d are kept; if this continues, check the "
                "rewards and --dynamic-sampling-filter-path",
                state.rollout_id, state.drops.total(), dict(state.drops), len(state.kept), self._batch_size,
            )  # fmt: skip
        self._ledger.dropped(group, reason)

    def _use_spares(self, state: _Round) -> None:
        while state.spare and len(state.kept) < self._batch_size:
            group = state.spare.pop(0)
            self._ledger.generated(group, state.rollout_id)
            state.kept.append(group)

    async def _stop(self, state: _Round) -> None:
        """Abort what is still running and return it to the source."""
        flight = state.flight
        flight.is_collecting = False
        for group in state.spare:
            self._drop(state, group, "filter")
        if flight.running:
            is_custom = {task: self._generation.is_custom(group) for task, group in flight.running.items()}
            plain = [group for task, group in flight.running.items() if not is_custom[task]]
            if plain and not (self._partial and self._order.is_replayed):
                await self._generation.engine.abort([session_of(s) for group in plain for s in group.samples])
            for task in flight.running:
                if is_custom[task]:
                    task.cancel()
            results = await asyncio.gather(*flight.running, return_exceptions=True)
            for (task, origin), result in zip(list(flight.running.items()), results, strict=True):
                if isinstance(result, BaseException):
                    if not isinstance(result, asyncio.CancelledError):
                        raise result
                    state.surplus.append(origin)
                else:
                    state.surplus.append(origin if is_custom[task] else result)
            flight.running.clear()
        if state.surplus:
            state.surplus.sort(key=lambda g: g.index)
            await self._order.turn(state.rollout_id, "returned")
            self._order.returned(state.rollout_id, state.surplus)
            self._return_surplus(state)

    def _return_surplus(self, state: _Round) -> None:
        for group in state.surplus:
            self._ledger.returned(group, "surplus" if is_finished(group) else "aborted")
            if not self._partial or (self._mask_offpolicy and is_finished(group)):
                _reset(group)
            _tag(group, state.rollout_id)
        self._source.return_groups(state.surplus)
        state.num_returned += len(state.surplus)
        state.surplus = []

    def _end_of_data(self, state: _Round) -> None:
        if state.kept:
            message = "rollout %d: the data ended with %d of %d groups; they are dropped (reason end_of_data)"
            logger.warning(message, state.rollout_id, len(state.kept), self._batch_size)
        for group in state.kept:
            self._ledger.dropped(group, "end_of_data")

    def _finish(self, state: _Round, kept: Sequence[Group], seconds: float) -> RolloutBatch:
        groups = sorted(kept, key=lambda g: g.index)
        samples = [sample for group in groups for sample in group.samples]
        args = self._generation.args
        if self._hooks.rollout_sample_filter is not None:
            self._hooks.rollout_sample_filter(args, [group.samples for group in groups])
        if self._hooks.rollout_all_samples_process is not None:
            all_samples = [group.samples for group in sorted(state.seen, key=lambda g: g.index)]
            self._hooks.rollout_all_samples_process(args, all_samples, source_for_samples_hook(self._source))
        if self._on_groups is not None:
            self._on_groups(state.rollout_id, groups)
        self._print(state.rollout_id, samples)
        num_masked = 0
        if self._stale == "mask" and self._max_staleness is not None:
            num_masked = mask_stale(groups, state.rollout_id, self._max_staleness)
        batch = batch_from_groups(state.rollout_id, groups, self._conversion)
        metrics = self._metrics(state, groups, samples, seconds)
        if num_masked:
            metrics["rollout/staleness/masked_frac"] = mean(num_masked / max(1, len(batch.loss_masks)))
        batch.metrics.update(self._report.of_rollout(state.rollout_id, groups, metrics, seconds))
        return batch

    def _metrics(self, state: _Round, groups: Sequence[Group], samples: Sequence[Sample], seconds: float) -> Metrics:
        metrics = throughput(samples, seconds, self._num_gpus) | self._generation.load.take()
        metrics |= {
            "perf/data_time": total(state.data_s),
            "perf/reward_wait_time": total(state.flight.wait.take()),
        }
        if any(map(self._generation.is_custom, groups)):
            metrics["perf/generate_held_time"] = total(self._generation.blocking.take())
        longest = self._generation.max_tokens or math.inf
        exceeded = [exceeds_context(sample) or len(sample.tokens) >= longest for sample in samples]
        if samples and (self._generation.max_context_len is not None or any(exceeded)):
            context = self._generation.max_context_len or math.inf
            full = [len(s.tokens) >= context or is_over for s, is_over in zip(samples, exceeded, strict=True)]
            metrics["rollout/context_full_frac"] = mean(sum(full) / len(full), len(full))
        metrics |= {f"rollout/dynamic_filter/drop_{reason}": total(n) for reason, n in state.drops.items()}
        if state.num_returned:
            metrics["rollout/returned_groups"] = total(state.num_returned)
        return metrics

    def _print(self, rollout_id: int, samples: Sequence[Sample]) -> None:
        if self._print_every and rollout_id % self._print_every == 0 and samples:
            sample = samples[0]
            logger.info(
                "rollout %d, sample %s: prompt %r, response %r, label %r, reward %s, status %s",
                rollout_id, sample.index, sample.prompt, sample.response, sample.label, sample.reward,
                sample.status.value,
            )  # fmt: skip


async def _completed(group: Group) -> Group:
    return group


def _not_running(rollout_id: int, expected: int) -> RolloutError:
    return RolloutError(
        f"rollout {rollout_id}: group {expected} must be judged next but is not running; use the flags, data and model "
        "of the run that --replay names"
    )


def _tag(group: Group, rollout_id: int) -> None:
    """Record the rollout in which a response was started, under slime's name, for --buffer-filter-path."""
    for sample in group.samples:
        if sample.response_length:
            sample.metadata.setdefault(STARTED, rollout_id)
        else:
            sample.metadata.pop(STARTED, None)


def _reset(group: Group) -> None:
    """Discard a group's responses, so that it is generated again with newer weights."""
    for sample in group.samples:
        reset_response(sample, sample.tokens[: sample.prompt_length])
