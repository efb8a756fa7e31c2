"""The default rollout: keep enough groups in flight, filter the finished ones, stop when the batch is full.

There is one scheduler of groups. A rollout takes finished groups from a `Flight` until its batch is full. Each rollout
has its own flight, which ends with it, or all share the one of a `GroupPool`, which outlives them.
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

from furlong.catalogue import Diagnosis, diagnosis
from furlong.config.sections import RolloutFlags
from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics, mean, total
from furlong.core.progress import Phase, progress
from furlong.core.sample import Group, Sample, Status
from furlong.core.text import shortened
from furlong.core.tracing import heartbeat
from furlong.errors import DataError, RolloutError
from furlong.interfaces import DataSource, Ledger
from furlong.rollout.episodes import SILENT
from furlong.rollout.filters import filter_output
from furlong.rollout.generate import (
    EvalSet,
    Generation,
    evaluate,
    has_failed,
    is_finished,
    kind_of,
    reset_response,
    run_group,
    session_of,
)
from furlong.rollout.group_pool import (
    RESUMED,
    Flight,
    GroupPool,
    is_stale,
    mask_stale,
    oldest_version,
    without_responses,
)
from furlong.rollout.metrics import SampleReport, outcome_metrics
from furlong.rollout.replay import HookSource, instance_of
from furlong.rollout.teachers import FAILED
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
        self._pool = pool
        self._max_staleness, self._stale = flags.max_token_staleness, flags.stale_tokens
        self._restored: list[tuple[str, Group]] = []
        self._has_kept = False  # a group of any rollout

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """Collect one rollout. Return None if the data cannot fill it; the groups so far are dropped and logged."""
        with progress.phase("rollout", unit="samples") as phase:
            if self._pool is not None:
                return await self._produce_shared(self._pool, rollout_id, phase)
            return await self._produce(rollout_id)

    async def _produce(self, rollout_id: int) -> RolloutBatch | None:
        started = time.monotonic()
        state = _Round(rollout_id, Flight())
        saved, self._restored = self._restored, []
        for _, group in saved:  # of a checkpoint: issued again from the start
            self._ledger.returned(group, RESUMED)
        self._source.return_groups([without_responses(group) for _, group in saved])
        try:
            while len(state.kept) < self._batch_size:
                self._submit(state)
                if not state.flight.running:
                    break
                finished = await state.flight.next_finished(in_order=self._in_order)
                assert finished is not None  # only pools wake
                self._judge(state, *finished)
            while state.spare and len(state.kept) < self._batch_size:
                group = state.spare.pop(0)
                self._ledger.generated(group, rollout_id)
                state.kept.append(group)
        except BaseException:
            await state.flight.cancel()
            raise
        await self._stop(state)
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

    def _continue_restored(self, pool: GroupPool) -> None:
        saved, self._restored = self._restored, []
        for state, group in saved:
            pool.versions[group.index] = oldest_version([group], pool.version)
            if state == "ready":
                self._ledger.restored([group.index], pool.deadline)
                pool.ready.append(group)
            elif state == "finished":
                pool.flight.submit(group, asyncio.sleep(0, group), name=f"group-{group.index}")
            else:
                del pool.versions[group.index]
                self._ledger.issued([group], pool.deadline)
                self._start(pool.flight, group, pool.next_rollout)

    def _issue(self, pool: GroupPool) -> None:
        while (room := pool.room) and not pool.data_ended:
            started = time.perf_counter()
            groups = self._source.next_groups(room)
            pool.data_s += time.perf_counter() - started
            pool.data_ended = not groups
            self._ledger.issued(groups, pool.deadline)
            for group in groups:
                self._start(pool.flight, group, pool.next_rollout)

    async def _produce_shared(self, pool: GroupPool, rollout_id: int, phase: Phase) -> RolloutBatch | None:
        async with pool.collecting:
            state = _Round(rollout_id, pool.flight)
            pool.next_rollout, pool.data_ended = rollout_id, False
            while (groups := self._choose(state, pool)) is None:
                self._issue(pool)
                if not pool.flight.running:
                    break
                finished = await pool.flight.next_finished(in_order=False)
                if finished is None:  # a change of admission
                    continue
                self._judge(state, *finished)
                phase.done = sum(len(group.samples) for group in pool.ready)
                pool.versions.pop(finished[0].index, None)
                if state.surplus:  # a function gave the group up: it is issued again
                    self._return_surplus(state)
            for group in pool.take_spares():
                self._drop(state, group, "filter")
            state.data_s, pool.data_s = pool.data_s, 0.0
            if groups is None:
                state.kept, pool.ready = pool.ready, []
                return self._end_of_data(state)
            pool.next_rollout = rollout_id + 1
            return self._finish(state, groups, pool.lap())

    def _choose(self, state: _Round, pool: GroupPool) -> list[Group] | None:
        if self._stale == "drop":
            for group in [group for group in pool.ready if self._is_stale(group, state.rollout_id)]:
                pool.ready.remove(group)
                self._drop(state, group, "stale")
        if len(pool.ready) < self._batch_size <= len(pool.ready) + len(pool.spare):
            for group in pool.take_spares(self._batch_size - len(pool.ready)):
                self._ledger.generated(group, state.rollout_id)
                pool.ready.append(group)
        return pool.choose(state.rollout_id)

    def _submit(self, state: _Round) -> None:
        size = self._batch_size
        while not state.data_ended and len(state.kept) + len(state.spare) + len(state.flight.running) < size:
            started = time.perf_counter()
            groups = self._source.next_groups(self._submit_size)
            state.data_s += time.perf_counter() - started
            state.data_ended = not groups
            self._ledger.issued(groups, state.rollout_id)
            for group in groups:
                for sample in group.samples:  # partial responses
                    if sample.response_length and self._mask_offpolicy:
                        sample.loss_mask = [0] * sample.response_length
                    if sample.status is Status.ABORTED:
                        sample.status = Status.PENDING
                self._start(state.flight, group, state.rollout_id)

    def _start(self, flight: Flight, group: Group, rollout_id: int) -> None:
        # A custom function may change a sample, so the source gets a copy back.
        origin = copy.deepcopy(group) if self._generation.is_custom(group) else group
        pool = self._pool
        progress.expect(self._batch_size * len(group.samples))
        work = run_group(
            group,
            self._generation,
            rollout_id=rollout_id,
            continues=lambda: flight.is_collecting,
            wait=flight.wait,
            began=None if pool is None else lambda: pool.began(group),
        )
        flight.submit(origin, work, name=f"rollout-{rollout_id}-group-{group.index}")

    def _judge(self, state: _Round, origin: Group, group: Group) -> None:
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
            if len(state.failed) >= (max(FAILED_GROUPS, FAILED_BATCHES * size) if self._has_kept else max(size, 2)):
                raise RolloutError(
                    all_failed(state.rollout_id, state.failed, is_custom=self._generation.is_custom(group)).text()
                )
            return
        state.failed.clear()
        chosen = self._hooks.dynamic_sampling_filter
        decision = filter_output(True if chosen is None else chosen(self._generation.args, group.samples))
        if decision.keep and self._stale == "drop" and self._is_stale(group, state.rollout_id):
            self._drop(state, group, "stale")
        elif decision.keep:
            self._ledger.generated(group, state.rollout_id)
            self._has_kept = True
            state.kept.append(group)
            if pool is not None:
                pool.ready.append(group)
        elif decision.keep_when_insufficient:
            (state.spare if pool is None else pool.spare).append(group)
        else:
            self._drop(state, group, decision.reason or "filter")
            num_seen = len(state.seen)
            if state.kept or state.spare or num_seen < max(HOPELESS_GROUPS, HOPELESS_BATCHES * self._batch_size):
                return
            raise RolloutError(f"rollout {state.rollout_id}: {_all_dropped(num_seen, state.drops)}")

    def _is_stale(self, group: Group, rollout_id: int) -> bool:
        bound = self._max_staleness
        return bound is not None and any(is_stale(sample, rollout_id, bound) for sample in group.samples)

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

    async def _stop(self, state: _Round) -> None:
        flight = state.flight
        flight.is_collecting = False
        for group in state.spare:
            self._drop(state, group, "filter")
        if flight.running:
            is_custom = {task: self._generation.is_custom(group) for task, group in flight.running.items()}
            plain = [group for task, group in flight.running.items() if not is_custom[task]]
            if plain:
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
            self._return_surplus(state)

    def _return_surplus(self, state: _Round) -> None:
        for group in state.surplus:
            is_whole = is_finished(group)
            self._ledger.returned(group, "surplus" if is_whole else "aborted")
            for sample in group.samples:
                if not self._partial or (self._mask_offpolicy and is_whole):
                    reset_response(sample, sample.tokens[: sample.prompt_length])  # generated again with newer weights
                # the rollout in which the response was started, under slime's name, for --buffer-filter-path
                if sample.response_length:
                    sample.metadata.setdefault(STARTED, state.rollout_id)
                else:
                    sample.metadata.pop(STARTED, None)
        self._source.return_groups(state.surplus)
        state.num_returned += len(state.surplus)
        state.surplus = []

    def _end_of_data(self, state: _Round) -> None:
        for group in state.kept:
            self._ledger.dropped(group, "end_of_data")
        has_filter = self._hooks.dynamic_sampling_filter is not None
        if has_filter and state.drops and not (self._has_kept or state.rollout_id):
            raise DataError(f"nothing was trained: {_all_dropped(len(state.seen), state.drops)}")
        if state.kept:
            message = "rollout %d: the data ended with %d of %d groups; they are dropped (reason end_of_data)"
            logger.warning(message, state.rollout_id, len(state.kept), self._batch_size)

    def _finish(self, state: _Round, kept: Sequence[Group], seconds: float) -> RolloutBatch:
        groups = sorted(kept, key=lambda g: g.index)
        samples = [sample for group in groups for sample in group.samples]
        args = self._generation.args
        if self._hooks.rollout_sample_filter is not None:
            self._hooks.rollout_sample_filter(args, [group.samples for group in groups])
        if self._hooks.rollout_all_samples_process is not None:
            all_samples = [group.samples for group in sorted(state.seen, key=lambda g: g.index)]
            instance = instance_of(self._source)
            source = HookSource(self._source) if instance is None else instance
            self._hooks.rollout_all_samples_process(args, all_samples, source)
        if self._on_groups is not None:
            self._on_groups(state.rollout_id, groups)
        if self._print_every and state.rollout_id % self._print_every == 0 and samples:
            logger.info(
                "rollout %d, sample %s: prompt %r, response %r, label %r, reward %s, status %s",
                state.rollout_id, samples[0].index, samples[0].prompt, samples[0].response, samples[0].label,
                samples[0].reward, samples[0].status.value,
            )  # fmt: skip
        num_masked = 0
        if self._stale == "mask" and self._max_staleness is not None:
            num_masked = mask_stale(groups, state.rollout_id, self._max_staleness)
        batch = batch_from_groups(state.rollout_id, groups, self._conversion)
        metrics = self._metrics(state, groups, samples, seconds)
        if num_masked:
            metrics["rollout/staleness/masked_frac"] = mean(num_masked / max(1, len(batch.loss_masks)))
        batch.metrics.update(self._report.of_rollout(state.rollout_id, groups, metrics, seconds))
        spread = batch.metrics.get("rollout/reward_range")
        if spread is not None and spread.value == 0:
            shown = {key: shortened(getattr(samples[0], key)) for key in ("prompt", "response", "label")}
            self._generation.on_event("equal_rewards", rollout=state.rollout_id, **shown)
        return batch

    def _metrics(self, state: _Round, groups: Sequence[Group], samples: Sequence[Sample], seconds: float) -> Metrics:
        longest_response = max((s.response_length for s in samples), default=0)
        metrics = self._generation.load.take() | {
            "perf/rollout_time": total(seconds),
            "perf/tokens_per_gpu_per_sec": mean(sum(s.response_length for s in samples) / seconds / self._num_gpus),
            "perf/effective_tokens_per_gpu_per_sec": mean(
                sum(s.effective_response_length for s in samples) / seconds / self._num_gpus
            ),
            "perf/longest_sample_tokens_per_sec": mean(longest_response / seconds),
            "perf/data_time": total(state.data_s),
            "perf/reward_wait_time": total(state.flight.wait.take()),
        }
        if self._generation.teachers is not None:
            metrics |= self._generation.teachers.take(samples)
        if any(map(self._generation.is_custom, groups)):
            metrics["perf/generate_held_time"] = total(self._generation.load.take_blocked())
        longest = self._generation.max_tokens or math.inf
        exceeded = [exceeds_context(sample) or len(sample.tokens) >= longest for sample in samples]
        context_len = self._generation.flags.rollout_max_context_len
        if samples and (context_len is not None or any(exceeded)):
            context = context_len or math.inf
            full = [len(s.tokens) >= context or is_over for s, is_over in zip(samples, exceeded, strict=True)]
            metrics["rollout/context_full_frac"] = mean(sum(full) / len(full), len(full))
        metrics |= {f"rollout/dynamic_filter/drop_{reason}": total(n) for reason, n in state.drops.items()}
        if lost := [sample for group in state.seen if has_failed(group) for sample in group.samples]:
            counts = outcome_metrics([*samples, *lost])
            metrics |= {f"rollout/{name}": count for name, count in counts.items() if name.startswith("reward_")}
        if num_long := self._source.num_long_prompts:
            metrics["rollout/dropped_long_prompts"] = total(num_long)
        if state.num_returned:
            metrics["rollout/returned_groups"] = total(state.num_returned)
        return metrics


def _all_dropped(num_seen: int, drops: Counter[str]) -> str:
    return (
        f"all of the first {num_seen} groups were dropped ({dict(drops)}), so there is nothing to train on; check "
        "--dynamic-sampling-filter-path and the rewards it judges (--rm-type or --custom-rm-path), or use prompts that "
        "the model sometimes solves"
    )


def exceeds_context(sample: Sample) -> bool:
    """Return whether the engine refused a request of the sample's function because it exceeds the context."""
    return sample.outcome is not None and sample.outcome.kind == "failed" and "context length" in sample.outcome.reason


def all_failed(rollout_id: int, groups: Sequence[Group], *, is_custom: bool) -> Diagnosis:
    """Diagnose why every sample fails: the most frequent reasons, and which function or limit is responsible."""
    outcomes = [s.outcome for g in groups for s in g.samples if s.status is Status.FAILED and s.outcome is not None]
    first = {kind_of(outcome.reason): outcome.reason for outcome in reversed(outcomes)}
    counts = Counter(kind_of(outcome.reason) for outcome in outcomes)
    reasons = "; ".join(f"{n}x {first[kind]}" for kind, n in counts.most_common(3))
    is_slow = sum(outcome.kind == "timed_out" for outcome in outcomes) * 2 > len(outcomes)
    finding = f"rollout {rollout_id}: every sample of {len(groups)} groups in a row failed: {reasons}"
    if sum(outcome.stage == "generate" for outcome in outcomes) * 2 <= len(outcomes):
        remedy = "raise --reward-timeout, or --num-reward-workers" if is_slow else "fix the error above"
        cause = "Rewards fail for every sample; failures do not count as reward 0."
        test = "`furlong reward test` with the same flags scores a few rows"
        return diagnosis("REW03", finding, cause=cause, remedy=f"{remedy}; {test}")
    if sum(outcome.reason.startswith(FAILED) for outcome in outcomes) * 2 > len(outcomes):
        cause, remedy = "The teacher can score none of these samples.", "fix the errors above"
        return diagnosis("OPD01", finding, cause=cause, remedy=remedy)
    if is_slow and not is_custom:
        cause = "The engine is too slow for --generate-timeout, or responses do not end."
        remedy = "raise --generate-timeout, or lower --rollout-max-response-len"
        return diagnosis("STOP02", finding, cause=cause, remedy=remedy)
    failed = [s for g in groups for s in g.samples if s.status is Status.FAILED]
    if sum(SILENT in s.metadata for s in failed) * 2 > len(failed):
        return diagnosis("AGT07", finding)
    if sum(map(exceeds_context, failed)) * 2 > len(failed):
        cause = "The history grows with each turn, and the function requests more tokens when the context is full."
        remedy = (
            "return the sample with status TRUNCATED when len(sample.tokens) approaches the context length; keep fewer "
            "turns, or raise --rollout-max-context-len"
        )
        return diagnosis("TOOL02", finding, cause=cause, remedy=remedy)
    return diagnosis(
        "HOOK01",
        finding,
        cause="Each of these samples failed: the function or command, or what it needs (a server, memory, files).",
        remedy="raise --generate-timeout, or make what they wait for faster" if is_slow else "fix these errors",
    )
