"""The default rollout: keep enough groups in flight, filter what comes back, stop when the batch is full."""

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
from typing import Any

from furlong.core.batch import RolloutBatch
from furlong.core.heartbeat import heartbeat
from furlong.core.metric import Metrics, mean, total
from furlong.core.sample import Group, Sample, Status
from furlong.errors import RolloutError
from furlong.interfaces import DataSource, Engine, Ledger, Reward
from furlong.rollout.convert import Conversion, batch_from_groups
from furlong.rollout.evaluate import EvalSet, evaluate
from furlong.rollout.filters import DynamicFilterOutput, verdict
from furlong.rollout.function_source import source_for_samples_hook
from furlong.rollout.generate import Generation, forget_response, session_of
from furlong.rollout.group import all_failed, has_failed, is_finished, outgrew_context, run_group
from furlong.rollout.group_order import Order
from furlong.rollout.reward_wait import RewardWait
from furlong.rollout.sample_report import SampleReport

DROPS_PER_WARNING = 10  # batches' worth of dropped groups in one rollout
FAILED_BATCHES, FAILED_GROUPS = 4, 64  # that fail in a row, after others that did not: what scores or generates is gone
HOPELESS_BATCHES, HOPELESS_GROUPS = 20, 1000  # of which a filter keeps none: it keeps none at all
STARTED = "start_rollout_id"  # in a sample's metadata: the rollout that began a response which a later one goes on with

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collection:
    """How many groups make a rollout, and what may keep a group out of it. Hooks have slime's signatures.

    `submit_size` groups are handed to the engine at a time (slime's over-sampling batch size). With `partial`, groups
    that were cut off when the batch was full keep their tokens and are continued later; `mask_offpolicy` leaves those
    tokens out of the loss. With `in_order` groups are judged in the order in which they were issued, however fast they
    come back: then the batch is a function of weights, seeds and data alone, and short responses have no advantage.
    Else the first to come back are taken. `num_gpus` generate, or processes on CPUs: speeds are of each.
    """

    batch_size: int
    submit_size: int
    in_order: bool = False
    partial: bool = False
    mask_offpolicy: bool = False
    dynamic_filter: Callable[..., Any] | None = None
    sample_filter: Callable[..., Any] | None = None
    all_samples_process: Callable[..., Any] | None = None
    print_every: int | None = None
    num_gpus: int = 1


_Numbered = tuple[int, asyncio.Task[Group]]


@dataclass
class _Round:
    """The state of one `produce` call.

    Tasks are numbered as they are submitted. A task that ends is in `back` until its result was looked at, then in
    `ended` and in the heap `finished`, where it stays after its group is judged, until it comes to the top. `tasks` are
    the tasks by their group's index.
    """

    rollout_id: int
    submitted: int = 0
    judged: int = 0
    back: asyncio.Queue[_Numbered] = field(default_factory=asyncio.Queue[_Numbered])
    finished: list[_Numbered] = field(default_factory=list[_Numbered])
    ended: set[asyncio.Task[Group]] = field(default_factory=set[asyncio.Task[Group]])
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
    wanted: bool = True
    data_ended: bool = False


class EngineRollout:
    """Produces batches with an engine. Implements `interfaces.Rollout`.

    Several `produce` calls may run at once (asynchronous training); each takes its own groups from the source.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        tokenizer: Any,
        source: DataSource,
        reward: Reward,
        ledger: Ledger,
        how: Generation,
        collection: Collection,
        conversion: Conversion,
        eval_sets: Sequence[EvalSet] = (),
        report: SampleReport | None = None,
        on_groups: Callable[[int, list[Group]], None] | None = None,
        order: Order | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._source = engine, tokenizer, source
        self._reward, self._ledger, self._how = reward, ledger, how
        self._collection, self._conversion = collection, conversion
        self._eval_sets, self._on_groups = eval_sets, on_groups
        self._report = report or SampleReport()
        self._order = order or Order()

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """Collect one rollout. Returns None, with the groups at hand dropped and said, when the data cannot fill it."""
        started = time.monotonic()
        state = _Round(rollout_id)
        try:
            while len(state.kept) < self._collection.batch_size:
                await self._submit(state)
                if not state.running:
                    break
                task = await self._next_back(state)
                self._order.judged(rollout_id, state.running[task])
                self._take(state, state.running.pop(task), task.result())
            if len(state.kept) < self._collection.batch_size:
                self._use_spares(state)
        except BaseException:
            for task in state.running:
                task.cancel()
            await asyncio.gather(*state.running, return_exceptions=True)
            raise
        await self._stop(state)
        self._order.ended(rollout_id)
        if len(state.kept) < self._collection.batch_size:
            return self._end_of_data(state)
        return self._finish(state, time.monotonic() - started)

    async def evaluate(self, rollout_id: int) -> Metrics:
        """Score every evaluation set with the weights that the engine serves."""
        return await evaluate(self._engine, self._tokenizer, self._eval_sets, rollout_id, report=self._report)

    async def _next_back(self, state: _Round) -> asyncio.Task[Group]:
        """Wait for the group that is judged next. Raises what any of them raises, as soon as it does."""
        wanted = self._order.next_judged(state.rollout_id)
        if wanted is not None and state.tasks.get(wanted) not in state.running:
            raise RolloutError(
                f"rollout {state.rollout_id}: group {wanted} is to be judged next but is not running; give the flags, "
                "data and model of the run that --replay names"
            )
        while (ready := self._ready(state, wanted)) is None:
            number, task = await state.back.get()
            task.result()
            heapq.heappush(state.finished, (number, task))
            state.ended.add(task)
        state.judged += 1
        return ready

    def _ready(self, state: _Round, wanted: int | None) -> asyncio.Task[Group] | None:
        """Pick from the groups that are back: `wanted`, the next in order, or the one submitted first."""
        if wanted is not None:
            return task if (task := state.tasks[wanted]) in state.ended else None
        while state.finished and state.finished[0][1] not in state.running:
            heapq.heappop(state.finished)
        if not state.back.empty() or not state.finished:
            return None
        number, task = state.finished[0]
        return task if not self._collection.in_order or number == state.judged else None

    async def _submit(self, state: _Round) -> None:
        """Top up what is in flight to what is still missing, `submit_size` groups at a time."""
        while not state.data_ended and len(state.kept) + len(state.running) < self._collection.batch_size:
            await self._order.turn(state.rollout_id, "issued")
            asked = time.perf_counter()
            groups = self._source.next_groups(self._collection.submit_size)
            state.data_s += time.perf_counter() - asked
            self._order.issued(state.rollout_id, groups)
            state.data_ended = not groups
            self._ledger.issued(groups, state.rollout_id)
            for group in groups:
                self._mask_old_tokens(group)
                # A custom function may change a sample as it likes, so what goes back to the source is a copy.
                origin = copy.deepcopy(group) if self._how.is_custom(group) else group
                task = asyncio.create_task(
                    run_group(
                        group,
                        engine=self._engine,
                        tokenizer=self._tokenizer,
                        how=self._how,
                        reward=self._reward,
                        rollout_id=state.rollout_id,
                        is_wanted=lambda: state.wanted,
                        wait=state.wait,
                        cuts=self._order.cuts(state.rollout_id, group) if self._collection.partial else None,
                    ),
                    name=f"rollout-{state.rollout_id}-group-{group.index}",
                )
                state.running[task] = origin
                state.tasks[group.index] = task
                task.add_done_callback(partial(_came_back, state, state.submitted))
                state.submitted += 1

    def _mask_old_tokens(self, group: Group) -> None:
        for sample in group.samples:
            if sample.response_length and self._collection.mask_offpolicy:
                sample.loss_mask = [0] * sample.response_length
            if sample.status is Status.ABORTED:
                sample.status = Status.PENDING

    def _take(self, state: _Round, origin: Group, group: Group) -> None:
        """Decide what becomes of a group that came back."""
        heartbeat.beat("group")
        if not is_finished(group) or len(state.kept) >= self._collection.batch_size:
            state.surplus.append(group if self._collection.partial and not self._how.is_custom(origin) else origin)
            return
        state.seen.append(group)
        if has_failed(group):
            state.failed.append(group)
            self._drop(state, group, "all_failed")
            size = self._collection.batch_size
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
            self._check_hope(state)

    def _check_hope(self, state: _Round) -> None:
        """Raise RolloutError if the filter has dropped every group for so long that it will go on."""
        num_seen = len(state.seen)
        if state.kept or state.spare or num_seen < max(HOPELESS_GROUPS, HOPELESS_BATCHES * self._collection.batch_size):
            return
        raise RolloutError(
            f"rollout {state.rollout_id}: all of the first {num_seen} groups were dropped ({dict(state.drops)}), so "
            "nothing is left to train on; look at --dynamic-sampling-filter-path, at the rewards that it judges "
            "(--rm-type or --custom-rm-path), or take prompts that the model sometimes solves"
        )

    def _filter(self, group: Group) -> DynamicFilterOutput:
        if self._collection.dynamic_filter is None:
            return DynamicFilterOutput(True)
        return verdict(self._collection.dynamic_filter(self._how.args, group.samples))

    def _drop(self, state: _Round, group: Group, reason: str) -> None:
        state.drops[reason] += 1
        batches, rest = divmod(state.drops.total(), DROPS_PER_WARNING * self._collection.batch_size)
        if not rest and batches.bit_count() == 1:  # after 10, 20, 40, ... batches' worth
            logger.warning(
                "rollout %d: %d groups dropped so far (%s) while %d of %d are kept; if this goes on, look at "
                "rewards and at --dynamic-sampling-filter-path",
                state.rollout_id, state.drops.total(), dict(state.drops), len(state.kept), self._collection.batch_size,
            )  # fmt: skip
        self._ledger.dropped(group, reason)

    def _use_spares(self, state: _Round) -> None:
        while state.spare and len(state.kept) < self._collection.batch_size:
            group = state.spare.pop(0)
            self._ledger.generated(group, state.rollout_id)
            state.kept.append(group)

    async def _stop(self, state: _Round) -> None:
        """End what is still running and give it back to the source."""
        state.wanted = False
        for group in state.spare:
            self._drop(state, group, "filter")
        if state.running:
            is_custom = {task: self._how.is_custom(group) for task, group in state.running.items()}
            plain = [group for task, group in state.running.items() if not is_custom[task]]
            if plain and not (self._collection.partial and self._order.is_followed):
                await self._engine.abort([session_of(s) for group in plain for s in group.samples])
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
            state.surplus.sort(key=lambda g: g.index)
            await self._order.turn(state.rollout_id, "returned")
            self._order.returned(state.rollout_id, state.surplus)
            for group in state.surplus:
                self._ledger.returned(group, "surplus" if is_finished(group) else "aborted")
                if not self._collection.partial or (self._collection.mask_offpolicy and is_finished(group)):
                    _restart(group)
                _tag(group, state.rollout_id)
            self._source.return_groups(state.surplus)

    def _end_of_data(self, state: _Round) -> None:
        if state.kept:
            logger.warning(
                "rollout %d: the data ended with %d of %d groups; they are dropped (reason end_of_data)",
                state.rollout_id,
                len(state.kept),
                self._collection.batch_size,
            )
        for group in state.kept:
            self._ledger.dropped(group, "end_of_data")

    def _finish(self, state: _Round, seconds: float) -> RolloutBatch:
        groups = sorted(state.kept, key=lambda g: g.index)
        samples = [sample for group in groups for sample in group.samples]
        if self._collection.sample_filter is not None:
            self._collection.sample_filter(self._how.args, [group.samples for group in groups])
        if self._collection.all_samples_process is not None:
            everything = [group.samples for group in sorted(state.seen, key=lambda g: g.index)]
            self._collection.all_samples_process(self._how.args, everything, source_for_samples_hook(self._source))
        if self._on_groups is not None:
            self._on_groups(state.rollout_id, groups)
        self._print(state.rollout_id, samples)
        batch = batch_from_groups(state.rollout_id, groups, self._conversion)
        metrics = _throughput(samples, seconds, self._collection.num_gpus) | {
            "perf/data_time": total(state.data_s),
            "perf/reward_wait_time": total(state.wait.seconds),
        }
        if any(map(self._how.is_custom, groups)):
            metrics["perf/generate_held_time"] = total(self._how.held.take())
        refused = list(map(outgrew_context, samples))
        if samples and (self._how.max_context_len is not None or any(refused)):
            context = self._how.max_context_len or math.inf
            full = [len(s.tokens) >= context or is_refused for s, is_refused in zip(samples, refused, strict=True)]
            metrics["rollout/context_full_frac"] = mean(sum(full) / len(full), len(full))
        metrics |= {f"rollout/dynamic_filter/drop_{reason}": total(n) for reason, n in state.drops.items()}
        if state.surplus:
            metrics["rollout/returned_groups"] = total(len(state.surplus))
        batch.metrics.update(self._report.of_rollout(state.rollout_id, groups, metrics, seconds))
        return batch

    def _print(self, rollout_id: int, samples: Sequence[Sample]) -> None:
        every = self._collection.print_every
        if every and rollout_id % every == 0 and samples:
            s = samples[0]
            logger.info(
                "rollout %d, sample %s: prompt %r, response %r, label %r, reward %s, status %s",
                rollout_id, s.index, s.prompt, s.response, s.label, s.reward, s.status.value,
            )  # fmt: skip


def _came_back(state: _Round, number: int, task: asyncio.Task[Group]) -> None:
    state.back.put_nowait((number, task))


def _tag(group: Group, rollout_id: int) -> None:
    """Note the rollout that a response was begun in, under slime's name, for --buffer-filter-path."""
    for sample in group.samples:
        if sample.response_length:
            sample.metadata.setdefault(STARTED, rollout_id)
        else:
            sample.metadata.pop(STARTED, None)


def _restart(group: Group) -> None:
    """Forget what was generated for a group, so that it is generated anew from the weights of then."""
    for sample in group.samples:
        forget_response(sample, sample.tokens[: sample.prompt_length])


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
