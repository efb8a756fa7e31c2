"""The default rollout: keep enough groups in flight, filter the finished ones, stop when the batch is full."""

from __future__ import annotations

import asyncio
import copy
import heapq
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from furlong.config.sections import RolloutFlags
from furlong.core.batch import RolloutBatch
from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.core.metric import Metrics, mean, total
from furlong.core.sample import Group, Sample, Status
from furlong.core.tracing import heartbeat
from furlong.errors import RolloutError
from furlong.interfaces import DataSource, Ledger
from furlong.rollout.filters import DynamicFilterOutput, filter_output
from furlong.rollout.generate import (
    EvalSet,
    Generation,
    RewardWait,
    evaluate,
    has_failed,
    is_finished,
    reset_response,
    run_group,
    session_of,
)
from furlong.rollout.group_order import GroupOrder
from furlong.rollout.replay import source_for_samples_hook
from furlong.rollout.sample_metrics import SampleReport
from furlong.rollout.train_batch import Conversion, batch_from_groups

DROPS_PER_WARNING = 10  # batches' worth of dropped groups in one rollout
FAILED_BATCHES, FAILED_GROUPS = 4, 64  # consecutive failed groups that end the run, once others have succeeded
HOPELESS_BATCHES, HOPELESS_GROUPS = 20, 1000  # groups dropped by a filter that has kept none; the run ends
STARTED = "start_rollout_id"  # metadata of a sample: the rollout in which its partial response was started

logger = logging.getLogger(__name__)

_Numbered = tuple[int, asyncio.Task[Group]]


@dataclass
class _Round:
    """State of one `produce` call.

    Tasks are numbered in order of submission. A finished task is in `queue` until its result is read, then in `done`
    and in the heap `finished`. It stays in the heap after its group is judged, until it reaches the top. `tasks` maps a
    group's index to its task. `is_collecting` is False once the batch is full.
    """

    rollout_id: int
    submitted: int = 0
    judged: int = 0
    queue: asyncio.Queue[_Numbered] = field(default_factory=asyncio.Queue[_Numbered])
    finished: list[_Numbered] = field(default_factory=list[_Numbered])
    done: set[asyncio.Task[Group]] = field(default_factory=set[asyncio.Task[Group]])
    tasks: dict[int, asyncio.Task[Group]] = field(default_factory=dict[int, asyncio.Task[Group]])
    running: dict[asyncio.Task[Group], Group] = field(default_factory=dict[asyncio.Task[Group], Group])
    kept: list[Group] = field(default_factory=list[Group])
    failed: list[Group] = field(default_factory=list[Group])
    spare: list[Group] = field(default_factory=list[Group])
    seen: list[Group] = field(default_factory=list[Group])
    surplus: list[Group] = field(default_factory=list[Group])
    drops: Counter[str] = field(default_factory=Counter[str])
    data_s: float = 0.0
    wait: RewardWait = field(default_factory=RewardWait)
    num_aborted: int = 0  # groups in a row
    is_collecting: bool = True
    data_ended: bool = False


class EngineRollout:
    """Produces batches with an engine. Implements `interfaces.Rollout`.

    Several `produce` calls may run concurrently (asynchronous training); each takes its own groups from the source.

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
    ) -> None:
        self._generation, self._hooks = generation, generation.hooks
        self._source, self._ledger, self._conversion = source, ledger, conversion
        self._batch_size, self._in_order = batch_size, in_order
        self._submit_size = flags.over_sampling_batch_size or batch_size
        self._partial, self._mask_offpolicy = flags.partial_rollout, flags.mask_offpolicy_in_partial_rollout
        self._num_gpus, self._print_every = num_gpus, print_every
        self._eval_sets, self._on_groups = eval_sets, on_groups
        self._report = report or SampleReport()
        self._order = order or GroupOrder()

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """Collect one rollout. Return None if the data cannot fill it; the groups so far are dropped and logged."""
        started = time.monotonic()
        state = _Round(rollout_id)
        try:
            while len(state.kept) < self._batch_size:
                await self._submit(state)
                if not state.running:
                    break
                task = await self._next_finished(state)
                self._order.judged(rollout_id, state.running[task])
                self._judge(state, state.running.pop(task), task.result())
            if len(state.kept) < self._batch_size:
                self._use_spares(state)
        except BaseException:
            for task in state.running:
                task.cancel()
            await asyncio.gather(*state.running, return_exceptions=True)
            raise
        await self._stop(state)
        self._order.ended(rollout_id)
        if len(state.kept) < self._batch_size:
            return self._end_of_data(state)
        return self._finish(state, time.monotonic() - started)

    async def evaluate(self, rollout_id: int) -> Metrics:
        """Score every evaluation set with the weights that the engine serves."""
        return await evaluate(self._eval_sets, rollout_id, report=self._report)

    async def _next_finished(self, state: _Round) -> asyncio.Task[Group]:
        """Wait for the group to judge next. An exception of any task is raised at once."""
        expected = self._order.next_judged(state.rollout_id)
        if expected is not None and state.tasks.get(expected) not in state.running:
            raise RolloutError(
                f"rollout {state.rollout_id}: group {expected} must be judged next but is not running; use the flags, "
                "data and model of the run that --replay names"
            )
        while (ready := self._ready(state, expected)) is None:
            number, task = await state.queue.get()
            task.result()
            heapq.heappush(state.finished, (number, task))
            state.done.add(task)
        state.judged += 1
        return ready

    def _ready(self, state: _Round, expected: int | None) -> asyncio.Task[Group] | None:
        """Pick a finished group: `expected`, the next in order, or the one submitted first."""
        if expected is not None:
            return task if (task := state.tasks[expected]) in state.done else None
        while state.finished and state.finished[0][1] not in state.running:
            heapq.heappop(state.finished)
        if not state.queue.empty() or not state.finished:
            return None
        number, task = state.finished[0]
        return task if not self._in_order or number == state.judged else None

    async def _submit(self, state: _Round) -> None:
        """Submit groups, `submit_size` at a time, until those in flight, kept or spare can fill the batch."""
        size = self._batch_size
        while not state.data_ended and len(state.kept) + len(state.spare) + len(state.running) < size:
            await self._order.turn(state.rollout_id, "issued")
            started = time.perf_counter()
            groups = self._source.next_groups(self._submit_size)
            state.data_s += time.perf_counter() - started
            self._order.issued(state.rollout_id, groups)
            state.data_ended = not groups
            self._ledger.issued(groups, state.rollout_id)
            for group in groups:
                self._prepare_partial(group)
                # A custom function may change a sample, so the source gets a copy back.
                origin = copy.deepcopy(group) if self._generation.is_custom(group) else group
                task = asyncio.create_task(
                    run_group(
                        group,
                        self._generation,
                        rollout_id=state.rollout_id,
                        continues=lambda: state.is_collecting,
                        wait=state.wait,
                        cuts=self._order.cuts(state.rollout_id, group) if self._partial else None,
                    ),
                    name=f"rollout-{state.rollout_id}-group-{group.index}",
                )
                state.running[task] = origin
                state.tasks[group.index] = task
                task.add_done_callback(partial(_enqueue, state, state.submitted))
                state.submitted += 1

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
        if is_aborted or len(state.kept) >= self._batch_size:
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
        if decision.keep:
            self._ledger.generated(group, state.rollout_id)
            state.kept.append(group)
        elif decision.keep_when_insufficient:
            state.spare.append(group)
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
        state.is_collecting = False
        for group in state.spare:
            self._drop(state, group, "filter")
        if state.running:
            is_custom = {task: self._generation.is_custom(group) for task, group in state.running.items()}
            plain = [group for task, group in state.running.items() if not is_custom[task]]
            if plain and not (self._partial and self._order.is_replayed):
                await self._generation.engine.abort([session_of(s) for group in plain for s in group.samples])
            for task in state.running:
                if is_custom[task]:
                    task.cancel()
            results = await asyncio.gather(*state.running, return_exceptions=True)
            for (task, origin), result in zip(list(state.running.items()), results, strict=True):
                if isinstance(result, BaseException):
                    if not isinstance(result, asyncio.CancelledError):
                        raise result
                    state.surplus.append(origin)
                else:
                    state.surplus.append(origin if is_custom[task] else result)
            state.running.clear()
        if state.surplus:
            await self._return_surplus(state)

    async def _return_surplus(self, state: _Round) -> None:
        state.surplus.sort(key=lambda g: g.index)
        await self._order.turn(state.rollout_id, "returned")
        self._order.returned(state.rollout_id, state.surplus)
        for group in state.surplus:
            self._ledger.returned(group, "surplus" if is_finished(group) else "aborted")
            if not self._partial or (self._mask_offpolicy and is_finished(group)):
                _reset(group)
            _tag(group, state.rollout_id)
        self._source.return_groups(state.surplus)

    def _end_of_data(self, state: _Round) -> None:
        if state.kept:
            message = "rollout %d: the data ended with %d of %d groups; they are dropped (reason end_of_data)"
            logger.warning(message, state.rollout_id, len(state.kept), self._batch_size)
        for group in state.kept:
            self._ledger.dropped(group, "end_of_data")

    def _finish(self, state: _Round, seconds: float) -> RolloutBatch:
        groups = sorted(state.kept, key=lambda g: g.index)
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
        batch = batch_from_groups(state.rollout_id, groups, self._conversion)
        metrics = self._metrics(state, groups, samples, seconds)
        batch.metrics.update(self._report.of_rollout(state.rollout_id, groups, metrics, seconds))
        return batch

    def _metrics(self, state: _Round, groups: Sequence[Group], samples: Sequence[Sample], seconds: float) -> Metrics:
        metrics = _throughput(samples, seconds, self._num_gpus) | {
            "perf/data_time": total(state.data_s),
            "perf/reward_wait_time": total(state.wait.seconds),
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
        if state.surplus:
            metrics["rollout/returned_groups"] = total(len(state.surplus))
        return metrics

    def _print(self, rollout_id: int, samples: Sequence[Sample]) -> None:
        if self._print_every and rollout_id % self._print_every == 0 and samples:
            sample = samples[0]
            logger.info(
                "rollout %d, sample %s: prompt %r, response %r, label %r, reward %s, status %s",
                rollout_id, sample.index, sample.prompt, sample.response, sample.label, sample.reward,
                sample.status.value,
            )  # fmt: skip


def _enqueue(state: _Round, number: int, task: asyncio.Task[Group]) -> None:
    state.queue.put_nowait((number, task))


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


def _throughput(samples: Sequence[Sample], seconds: float, num_gpus: int) -> Metrics:
    tokens = sum(s.response_length for s in samples)
    effective = sum(s.effective_response_length for s in samples)
    longest = max((s.response_length for s in samples), default=0)
    return {
        "perf/rollout_time": total(seconds),
        "perf/tokens_per_gpu_per_sec": mean(tokens / seconds / num_gpus),
        "perf/effective_tokens_per_gpu_per_sec": mean(effective / seconds / num_gpus),
        "perf/longest_sample_tokens_per_sec": mean(longest / seconds),
    }


def exceeds_context(sample: Sample) -> bool:
    """Return whether the engine refused a request of the sample's function because it exceeds the context."""
    return sample.outcome is not None and sample.outcome.kind == "failed" and "context length" in sample.outcome.reason


def all_failed(rollout_id: int, groups: Sequence[Group]) -> Diagnosis:
    """Diagnose why every sample fails: the most frequent reasons, and which function or limit is responsible."""
    outcomes = [s.outcome for g in groups for s in g.samples if s.status is Status.FAILED and s.outcome is not None]
    counts = Counter(outcome.reason for outcome in outcomes)
    reasons = "; ".join(f"{n}x {reason}" for reason, n in counts.most_common(3))
    is_slow = sum(outcome.kind == "timed_out" for outcome in outcomes) * 2 > len(outcomes)
    finding = f"rollout {rollout_id}: every sample of {len(groups)} groups in a row failed: {reasons}"
    if sum(outcome.stage == "generate" for outcome in outcomes) * 2 <= len(outcomes):
        remedy = "raise --reward-timeout, or --num-reward-workers" if is_slow else "fix the reward function"
        cause = (
            "The reward function, or the server it calls, fails for every sample; failures do not count as reward 0."
        )
        test = "`furlong reward test` with the same flags runs it on a few rows"
        return diagnosis("REW03", finding, cause=cause, remedy=f"{remedy}; {test}")
    if is_slow:
        cause = "The engine is too slow for --generate-timeout, or responses do not end."
        remedy = "raise --generate-timeout, or lower --rollout-max-response-len"
        return diagnosis("STOP02", finding, cause=cause, remedy=remedy)
    failed = [s for g in groups for s in g.samples if s.status is Status.FAILED]
    if sum(map(exceeds_context, failed)) * 2 > len(failed):
        cause = "The history grows with each turn, and the function requests more tokens when the context is full."
        remedy = (
            "return the sample with status TRUNCATED when len(sample.tokens) approaches the context length; keep fewer "
            "turns, or raise --rollout-max-context-len"
        )
        return diagnosis("TOOL02", finding, cause=cause, remedy=remedy)
    return diagnosis(
        "HOOK01", finding, cause="It fails for every prompt.", remedy="fix --custom-generate-function-path"
    )
