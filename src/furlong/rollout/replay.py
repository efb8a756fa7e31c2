"""Rollouts from dumps of an earlier run or from a user's rollout function, and the data sources that functions get."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics, mean, total
from furlong.core.outcome import outcome_from_value
from furlong.core.sample import Group, Sample, Status
from furlong.core.text import shortened
from furlong.errors import RolloutError
from furlong.interfaces import DataSource, Ledger, Rollout
from furlong.rollout.metrics import SampleReport, eval_shape
from furlong.rollout.train_batch import Conversion, batch_from_groups
from furlong.rollout.user_samples import check_sample

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ReplayRollout:
    """Implements `interfaces.Rollout` over dumps. `load(rollout_id)` reads one; `subsample` keeps that fraction."""

    def __init__(
        self,
        load: Callable[[int], list[Group]],
        conversion: Conversion,
        *,
        subsample: float | None = None,
        report: SampleReport | None = None,
    ) -> None:
        self._load, self._conversion, self._subsample = load, conversion, subsample
        self._report = report or SampleReport()

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """Read the dump of this rollout."""
        started = time.monotonic()
        groups = await asyncio.to_thread(self._load, rollout_id)
        if self._subsample is not None:
            groups = groups[: max(1, round(len(groups) * self._subsample))]
        batch = batch_from_groups(rollout_id, groups, self._conversion)
        batch.metrics.update(self._report.of_rollout(rollout_id, groups, {}, time.monotonic() - started))
        return batch

    async def evaluate(self, rollout_id: int) -> Metrics:  # noqa: ARG002  the protocol's signature
        """Report nothing: a replay has no engine."""
        return {}


@dataclass
class RolloutFnTrainOutput:
    """Result of a slime rollout function for training: groups as lists of samples, and metrics."""

    samples: list[list[Sample]]
    metrics: dict[str, float] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Result of a slime rollout function for evaluation.

    `data` is `{name: {"rewards": [...], "truncated": [...], "samples": [...]}}`.
    """

    data: dict[str, dict[str, Any]]
    metrics: dict[str, float] | None = None


class FunctionRollout:
    """Implements `interfaces.Rollout` with a user's `fn(args, rollout_id, data_source, evaluation=False)`.

    The function runs in a thread, and `on_groups` and `on_samples` get what it returns. It may return groups of an
    earlier call, and groups that it made. Groups that it neither returned nor keeps are dropped after the call; as an
    `interfaces.RolloutPool` it saves the others, without their responses, and a resumed run issues them again.
    """

    is_shared = False

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        source: DataSource,
        ledger: Ledger,
        conversion: Conversion,
        report: SampleReport | None = None,
        args: Any,
        vocab_size: int | None = None,
        on_groups: Callable[[int, list[Group]], None] | None = None,
        on_samples: Callable[[int, str, list[Sample]], None] | None = None,
    ) -> None:
        self._function, self._vocab_size = function, vocab_size
        self._on_groups, self._on_samples = on_groups, on_samples
        self._ledger = ledger
        self._source = HookSource(source, ledger)
        self._conversion, self._args = conversion, args
        self._report = report or SampleReport()
        self._no_numbers: set[str] = set()

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """Call the function and account for every group it took."""
        started = time.monotonic()
        with self._source.call(rollout_id, asyncio.get_running_loop()):
            result = await asyncio.to_thread(self._function, self._args, rollout_id, self._source, evaluation=False)
            if not isinstance(result, list) and not hasattr(result, "samples"):
                raise RolloutError(
                    f"--rollout-function-path returned {type(result).__name__}; it must return a list of groups, or a "
                    "RolloutFnTrainOutput"
                )
            lists = _lists(result if isinstance(result, list) else result.samples)
            extra = {} if isinstance(result, list) else result.metrics or {}
            groups = [self._source.group_of(self._checked(each)) for each in lists]
            for group in groups:
                self._ledger.generated(group, rollout_id)
        self._source.settle("rollout_function")
        if not groups:
            return None
        if self._on_groups is not None:
            self._on_groups(rollout_id, groups)
        batch = batch_from_groups(rollout_id, groups, self._conversion)
        seconds = time.monotonic() - started
        metrics = self._numbers(extra) | {"perf/rollout_time": total(seconds)}
        batch.metrics.update(self._report.of_rollout(rollout_id, groups, metrics, seconds))
        return batch

    def admit(self, step: int, *, ahead: int, end: int, version: int) -> None:
        """Do nothing: the function decides when groups start."""

    def snapshot(self) -> list[tuple[str, Group]]:
        """Return the groups that the function has, as they were issued."""
        return self._source.snapshot()

    def restore(self, saved: Sequence[tuple[str, Group]]) -> None:
        """Return the groups of a checkpoint to the source before the next call."""
        self._source.resumed = [group for _, group in saved]

    async def close(self) -> None:
        """Issue no more groups."""
        self._source.is_closed = True

    def _checked(self, group: Any) -> list[Sample]:
        samples = _flat(group)
        for sample in samples:
            if sample.status is Status.FAILED:
                continue
            check_sample(sample, "--rollout-function-path", self._vocab_size)
            outcome = None if sample.reward is None else outcome_from_value(sample.reward)
            if outcome is not None and outcome.kind == "failed":
                raise RolloutError(f"--rollout-function-path: sample {sample.index}: {outcome.reason}")
        return samples

    async def evaluate(self, rollout_id: int) -> Metrics:
        """Call the function for an evaluation; `eval/<name>` is the mean of a set's rewards, None excluded.

        Sets with `samples` also get the metrics of their samples.
        """
        metrics = await self._evaluate(rollout_id)
        self._source.settle("evaluation")
        return metrics

    async def _evaluate(self, rollout_id: int) -> Metrics:
        with self._source.call(rollout_id, asyncio.get_running_loop()):
            result = await asyncio.to_thread(self._function, self._args, rollout_id, self._source, evaluation=True)
        data: Any = result if isinstance(result, dict) else getattr(result, "data", None)
        if not isinstance(data, dict) or not all(_is_set(columns) for columns in data.values()):
            raise RolloutError(
                "the evaluation function (--eval-function-path, else --rollout-function-path) returned "
                f"{shortened(result)} for evaluation=True; it must return a dict of sets with their rewards, such as "
                '{"aime": {"rewards": [1.0, 0.0]}}, or a RolloutFnEvalOutput'
            )
        plain: dict[str, Any] = {} if isinstance(result, dict) else result.metrics or {}
        metrics: Metrics = {}
        for name, columns in data.items():
            samples = columns.get("samples") or ()
            metrics |= eval_shape(name, samples)
            if self._on_samples is not None:
                self._on_samples(rollout_id, name, list(samples))
            rewards = [float(r) for r in columns["rewards"] if r is not None]
            if rewards:
                metrics[f"eval/{name}"] = mean(sum(rewards) / len(rewards), len(rewards))
            if truncated := columns.get("truncated"):
                metrics[f"eval/{name}-truncated_ratio"] = mean(
                    sum(map(bool, truncated)) / len(truncated), len(truncated)
                )
        return self._report.of_evaluation(rollout_id, data, metrics, self._numbers(plain))

    def _numbers(self, metrics: Mapping[str, Any]) -> Metrics:
        """Return the metrics of the function that are numbers; the log names the others once."""
        numbers: Metrics = {}
        for name, value in metrics.items():
            try:
                numbers[name] = mean(float(value))
            except (TypeError, ValueError):
                if name not in self._no_numbers:
                    logger.warning(
                        "metric %s of the rollout function is %s, which is not a number: it is not recorded; leave it "
                        "out, or write it to the log", name, shortened(value),
                    )  # fmt: skip
                self._no_numbers.add(name)
        return numbers


def _is_set(columns: Any) -> bool:
    if not isinstance(columns, Mapping):
        return False
    try:
        for reward in cast("Any", columns["rewards"]):
            if reward is not None:
                float(reward)
    except (KeyError, OverflowError, TypeError, ValueError):
        return False
    return True


@dataclass
class _Taken:
    """A group that a rollout function has: as it was issued, and the samples that the function got."""

    origin: Group
    samples: list[weakref.ref[Sample]]
    is_held: bool = False


class HookSource:
    """The `data_source` argument of hooks: `len`, the attributes of the --data-source-path object, and the groups.

    A rollout function takes groups with `get_samples` and returns unfinished ones with `add_samples`. It runs in a
    thread, and may have its own threads that work between its calls, while source and ledger belong to the event
    loop; calls are executed there. Without a ledger there is only the length.
    """

    def __init__(self, source: DataSource, ledger: Ledger | None = None) -> None:
        self._source, self._ledger = source, ledger
        self._loop: asyncio.AbstractEventLoop | None = None
        self._taken: dict[int, _Taken] = {}
        self._trained: set[int] = set()
        self._num_calls = 0
        self.rollout_id = 0
        self.resumed: list[Group] = []
        self.is_closed = False

    @contextlib.contextmanager
    def call(self, rollout_id: int, loop: asyncio.AbstractEventLoop) -> Generator[None]:
        """Groups issued in this context belong to a call of the function."""
        self._loop, self.rollout_id = loop, rollout_id
        resumed, self.resumed = self.resumed, []
        if self._ledger is not None:
            for group in resumed:
                self._ledger.returned(group, "resumed")
        self._source.return_groups(resumed)
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next prompt groups; none after the end of the run."""

        def get(ledger: Ledger) -> list[list[Sample]]:
            groups = self._source.next_groups(num_samples)
            ledger.issued(groups, self.rollout_id)
            for group in groups:
                samples = [weakref.ref(sample) for sample in group.samples]
                self._taken[group.index] = _Taken(copy.deepcopy(group), samples)
            if not self._num_calls:
                self._hold(ledger)
            return [group.samples for group in groups]

        return self._on_loop("get_samples", get, [])

    def add_samples(self, samples: Sequence[list[Sample]]) -> None:
        """Return unfinished groups to the source, or add groups that the function made."""

        def add(ledger: Ledger) -> None:
            groups = [self.group_of(_flat(each)) for each in samples]
            for group in groups:
                self._trained.discard(group.index)
                ledger.returned(group, "add_samples")
            self._source.return_groups(groups)

        self._on_loop("add_samples", add, None)

    def __len__(self) -> int:
        """Return the groups of one epoch. Raises RolloutError until a stream has been read once."""
        if self._source.groups_per_epoch is None:
            raise RolloutError(
                "len(data_source) is unknown: the run has no --prompt-data, or a stream that has not been read once "
                "yet; drop --streaming-data to know it from the start"
            )
        return self._source.groups_per_epoch

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's data source; without one, a method of slime's."""
        instance = instance_of(self._source)
        if instance is None and name in ("get_metadata", "update_metadata", "get_buffer_length"):
            return getattr(self._source, name)
        if instance is None:
            raise AttributeError(
                f"data_source has no attribute {name!r}; it has get_samples, add_samples, get_metadata, "
                "update_metadata, get_buffer_length and len()"
            )
        return getattr(instance, name)

    def _on_loop(self, name: str, work: Callable[[Ledger], T], after_the_run: T) -> T:
        ledger, loop = self._ledger, self._loop
        if ledger is None or loop is None:
            raise AttributeError(
                f"--rollout-all-samples-process-path: data_source has only len(), not {name}: every group of the "
                "rollout is already trained on, dropped or returned; to choose prompts write a class for "
                "--data-source-path, which the function then gets as data_source"
            )

        if self.is_closed:
            return after_the_run

        async def run() -> T:
            return after_the_run if self.is_closed else work(ledger)

        return asyncio.run_coroutine_threadsafe(run(), loop).result()

    def group_of(self, samples: list[Sample]) -> Group:
        """Remove and return the issued group that these samples belong to, or issue them as one that user code made.

        Raises RolloutError if an issued group comes a second time, or if there are no samples.
        """
        index = samples[0].group_index if samples else None
        if not samples or index in self._trained:
            problem = f"group {index} a second time" if samples else "a group without samples"
            raise RolloutError(
                f"--rollout-function-path returned {problem}; a group of data_source.get_samples is trained on once: "
                "to train on samples again, or on others than it issued, return copies with group_index None"
            )
        if index is not None and (taken := self._taken.pop(index, None)) is not None:
            self._trained.add(index)
            return Group(index, samples, taken.origin.epoch, taken.origin.row)
        assert self._ledger is not None
        group = self._source.adopt([copy.copy(sample) for sample in samples])  # may come again: its numbers stay
        self._ledger.issued([group], self.rollout_id)
        return group

    def settle(self, reason: str) -> None:
        """After a call, drop the groups that the function has no sample of any more, and hold the others."""
        assert self._ledger is not None
        for index, taken in list(self._taken.items()):
            if not any(sample() for sample in taken.samples):
                self._ledger.dropped(self._taken.pop(index).origin, reason)
        self._hold(self._ledger)

    def _hold(self, ledger: Ledger) -> None:
        for taken in self._taken.values():
            if not taken.is_held:
                taken.is_held = True
                ledger.held(taken.origin, self.rollout_id)

    def snapshot(self) -> list[tuple[str, Group]]:
        """Return the groups that the function has, as they were issued."""
        return [("running", group) for group in (*self.resumed, *(taken.origin for taken in self._taken.values()))]


def instance_of(source: DataSource) -> Any:
    """Return the user's data source object, None if there is none."""
    return getattr(source, "instance", None)


class SplitRollout:
    """Produces with one rollout and evaluates with another. Implements `interfaces.Rollout`."""

    def __init__(self, rollout: Rollout, evaluation: Rollout) -> None:
        self.training, self._evaluation = rollout, evaluation

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """Produce with the training rollout."""
        return await self.training.produce(rollout_id)

    async def evaluate(self, rollout_id: int) -> Metrics:
        """Evaluate with the evaluation rollout."""
        return await self._evaluation.evaluate(rollout_id)


def _lists(groups: Any) -> list[Any]:
    listed = list(groups)
    if not listed or not all(isinstance(each, Sample) for each in listed):
        return listed
    by_index: dict[Any, list[Sample]] = {}
    for sample in listed:
        by_index.setdefault(id(sample) if sample.group_index is None else sample.group_index, []).append(sample)
    return list(by_index.values())


def _flat(group: Any) -> list[Sample]:
    members: list[Any] = list(group) if isinstance(group, list | tuple) else [None]
    samples: list[Any] = []
    for each in members:
        samples.extend(each if isinstance(each, list) else [each])
    if not all(isinstance(sample, Sample) for sample in samples):
        raise RolloutError(
            f"--rollout-function-path returned a {type(group).__name__} as a group"
            f"{'' if members == [None] else ' with members that are not samples'}; it must return a list of groups, "
            "each a list of Sample (or of lists of Sample for fanned-out samples)"
        )
    return samples
