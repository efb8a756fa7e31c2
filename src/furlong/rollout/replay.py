"""Rollouts from dumps of an earlier run or from a user's rollout function, and wrappers around other rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics, mean, total
from furlong.core.outcome import outcome_from_value
from furlong.core.sample import Group, Sample, Status
from furlong.data.custom_source import RolloutFunctionSource
from furlong.errors import RolloutError
from furlong.interfaces import DataSource, Ledger, Rollout
from furlong.rollout.agent import check_sample
from furlong.rollout.sample_metrics import SampleReport, eval_shape
from furlong.rollout.train_batch import Conversion, batch_from_groups


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

    The function runs in a thread.
    """

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
    ) -> None:
        self._function, self._vocab_size = function, vocab_size
        self._source, self._ledger = source, ledger
        self._conversion, self._args = conversion, args
        self._report = report or SampleReport()

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """Call the function and account for every group it took."""
        started = time.monotonic()
        source = self._source_for(rollout_id)
        result = await asyncio.to_thread(self._function, self._args, rollout_id, source, evaluation=False)
        if not isinstance(result, list) and not hasattr(result, "samples"):
            raise RolloutError(
                f"--rollout-function-path returned {type(result).__name__}; it must return a list of groups, or a "
                "RolloutFnTrainOutput"
            )
        lists = result if isinstance(result, list) else result.samples
        extra = {} if isinstance(result, list) else result.metrics or {}
        groups = [source.group_of(self._checked(each)) for each in lists]
        for group in groups:
            self._ledger.generated(group, rollout_id)
        for group in source.unclaimed():
            self._ledger.dropped(group, "rollout_function")
        if not groups:
            return None
        batch = batch_from_groups(rollout_id, groups, self._conversion)
        seconds = time.monotonic() - started
        metrics = {name: mean(float(value)) for name, value in extra.items()} | {"perf/rollout_time": total(seconds)}
        batch.metrics.update(self._report.of_rollout(rollout_id, groups, metrics, seconds))
        return batch

    def _checked(self, group: Any) -> list[Sample]:
        """Return the checked samples of a group. Raises RolloutError for an invalid group."""
        samples = _flat(group)
        for sample in samples:
            if sample.status is Status.FAILED:
                continue
            check_sample(sample, "--rollout-function-path", self._vocab_size)
            outcome = None if sample.reward is None else outcome_from_value(sample.reward)
            if outcome is not None and outcome.kind == "failed":
                raise RolloutError(f"--rollout-function-path: sample {sample.index}: {outcome.reason}")
        return samples

    def _source_for(self, rollout_id: int) -> RolloutFunctionSource:
        loop = asyncio.get_running_loop()
        return RolloutFunctionSource(self._source, self._ledger, loop=loop, rollout_id=rollout_id)

    async def evaluate(self, rollout_id: int) -> Metrics:
        """Call the function for an evaluation; `eval/<name>` is the mean of a set's rewards, None excluded.

        Sets with `samples` also get the metrics of their samples.
        """
        source = self._source_for(rollout_id)
        result = await asyncio.to_thread(self._function, self._args, rollout_id, source, evaluation=True)
        for group in source.unclaimed():
            self._ledger.dropped(group, "evaluation")
        if not isinstance(result, dict) and not hasattr(result, "data"):
            raise RolloutError(
                "the evaluation function (--eval-function-path, else --rollout-function-path) returned "
                f"{type(result).__name__} for evaluation=True; it must return a dict of sets with their rewards, or a "
                "RolloutFnEvalOutput"
            )
        data: dict[str, dict[str, Any]] = result if isinstance(result, dict) else result.data
        plain: dict[str, float] = {} if isinstance(result, dict) else result.metrics or {}
        metrics: Metrics = {}
        for name, columns in data.items():
            metrics |= eval_shape(name, columns.get("samples") or ())
            rewards = [float(r) for r in columns["rewards"] if r is not None]
            if rewards:
                metrics[f"eval/{name}"] = mean(sum(rewards) / len(rewards), len(rewards))
            if truncated := columns.get("truncated"):
                metrics[f"eval/{name}-truncated_ratio"] = mean(
                    sum(map(bool, truncated)) / len(truncated), len(truncated)
                )
        extra = {name: mean(float(value)) for name, value in plain.items()}
        return self._report.of_evaluation(rollout_id, data, metrics, extra)


class SplitRollout:
    """Produces with one rollout and evaluates with another. Implements `interfaces.Rollout`."""

    def __init__(self, rollout: Rollout, evaluation: Rollout) -> None:
        self._rollout, self._evaluation = rollout, evaluation

    async def produce(self, rollout_id: int) -> RolloutBatch | None:
        """Produce with the training rollout."""
        return await self._rollout.produce(rollout_id)

    async def evaluate(self, rollout_id: int) -> Metrics:
        """Evaluate with the evaluation rollout."""
        return await self._evaluation.evaluate(rollout_id)


def _flat(group: Any) -> list[Sample]:
    """Return the samples of a group, flattening fanned-out samples."""
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
