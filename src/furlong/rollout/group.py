"""Generation and scoring of one prompt group."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.core.outcome import outcome_from_value
from furlong.core.sample import Group, Sample, Status
from furlong.core.tracing import tracer
from furlong.interfaces import Engine, Reward
from furlong.rollout.generate import Generation, generate_sample
from furlong.rollout.timers import RewardWait

T = TypeVar("T")


async def run_group(
    group: Group,
    *,
    engine: Engine,
    tokenizer: Any,
    generation: Generation,
    reward: Reward,
    rollout_id: int,
    continues: Callable[[], bool],
    wait: RewardWait,
    cuts: Mapping[int, int] | None = None,
) -> Group:
    """Generate and score all samples of a group; fanned-out samples replace their origin.

    An aborted group is returned unscored with ABORTED samples (`is_finished`). continues: whether requests aborted by a
    weight update are continued. cuts: sample index -> response length at which the sample is left aborted.
    """
    with wait.generating():
        produced = await gather_or_cancel(
            generate_sample(
                engine,
                tokenizer,
                sample,
                generation,
                rollout_id=rollout_id,
                continues=continues,
                cut_at=None if cuts is None or sample.index is None else cuts.get(sample.index),
            )
            for sample in group.samples
        )
    group.samples = [sample for samples in produced for sample in samples]
    if is_finished(group):
        with wait.scoring():
            await score(group.samples, reward, generation)
    return group


async def score(samples: Sequence[Sample], reward: Reward, generation: Generation) -> None:
    """Compute the rewards that user code has not set, and check those that it has.

    A failed or timed-out call, or an invalid reward, makes the sample FAILED and is logged.
    """
    unscored: list[Sample] = []
    for sample in samples:
        if sample.status is Status.FAILED:
            continue
        if sample.reward is None:
            unscored.append(sample)
        elif (outcome := outcome_from_value(sample.reward)).kind == "scored":
            sample.reward = outcome.reward
        else:
            sample.status, sample.outcome, sample.reward = Status.FAILED, outcome, None
            generation.log_failure("the reward", sample, outcome.reason)
    if not unscored:
        return
    with tracer.flight("reward", group=unscored[0].group_index, samples=len(unscored)):
        outcomes = await reward(unscored)
    for sample, outcome in zip(unscored, outcomes, strict=True):
        sample.outcome = outcome
        if outcome.kind == "scored":
            sample.reward = outcome.reward
        else:
            sample.status = Status.FAILED
            generation.log_failure("the reward", sample, outcome.reason)


def is_finished(group: Group) -> bool:
    """Return whether no sample of the group was aborted."""
    return all(sample.status is not Status.ABORTED for sample in group.samples)


def has_failed(group: Group) -> bool:
    """Return whether every sample of the group failed."""
    return all(sample.status is Status.FAILED for sample in group.samples)


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


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    If one raises, or this call is cancelled, the others are cancelled and awaited before the error propagates.

    >>> async def plus_one(number: int) -> int:
    ...     return number + 1
    >>> asyncio.run(gather_or_cancel(map(plus_one, [1, 2])))
    [2, 3]
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.cancelling():  # a second cancel would interrupt its cleanup
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
