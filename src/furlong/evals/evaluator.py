"""Runs the tasks of evaluation sets that are not done yet, and records them as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import monotonic

from furlong.core.event_loop import gather_or_cancel
from furlong.core.sample import Group, Sample
from furlong.evals.eval_records import EvalFile, Record, records_of
from furlong.evals.eval_summary import EvalSummary, summarize
from furlong.inference.chat_endpoint import ChatEndpoint
from furlong.rollout.episodes import RewardWait
from furlong.rollout.generate import EvalSet, run_group, session_of
from furlong.wiring.rollout import Evaluation

Progress = Callable[[str, int, int], None]


async def run_evaluation(
    evaluation: Evaluation, file: EvalFile, *, num_tasks: int | None, concurrency: int, progress: Progress
) -> list[EvalSummary]:
    """Evaluate the first `num_tasks` tasks of each set; returns the summaries of new and earlier records.

    concurrency: tasks at one time. progress: called with name, tasks done and tasks in all.
    """
    try:
        await evaluation.start()
        return [await _run_set(evaluation, each, file, num_tasks, concurrency, progress) for each in evaluation.sets]
    finally:
        await evaluation.close()


async def _run_set(
    evaluation: Evaluation, each: EvalSet, file: EvalFile, num_tasks: int | None, concurrency: int, progress: Progress
) -> EvalSummary:
    groups = each.groups()[:num_tasks]
    records = [r for i in range(len(groups)) for r in file.done.get((each.name, i), ())]
    waiting = [group for group in groups if (each.name, _task(group)) not in file.done]
    permits, done = asyncio.Semaphore(concurrency), len(groups) - len(waiting)

    async def run(group: Group) -> None:
        nonlocal done
        async with permits:
            new = await _run_task(evaluation, each, group)
        file.append(new)
        records.extend(new)
        done += 1
        progress(each.name, done, len(groups))

    progress(each.name, done, len(groups))
    await gather_or_cancel(map(run, waiting))
    return summarize(each.name, records)


async def _run_task(evaluation: Evaluation, each: EvalSet, group: Group) -> list[Record]:
    task, started = _task(group), monotonic()
    sessions = {int(sample.index or 0): session_of(sample) for sample in group.samples}
    finished = await run_group(group, each.generation, rollout_id=0, continues=lambda: True, wait=RewardWait())
    if isinstance(evaluation.engine, ChatEndpoint) and evaluation.engine.refusal is not None:
        raise evaluation.engine.refusal
    return records_of(
        each.name,
        task,
        finished.samples,
        reward_key=each.reward_key,
        seconds=monotonic() - started,
        tokens=_tokens(evaluation, sessions, finished.samples),
    )


def _task(group: Group) -> int:
    return int(group.index)


def _tokens(evaluation: Evaluation, sessions: Mapping[int, str], samples: list[Sample]) -> dict[int, int]:
    """Return the sampled tokens by sample: an endpoint's count, otherwise those of all leaves of the episode."""
    if isinstance(evaluation.engine, ChatEndpoint):
        usage = evaluation.engine.usage
        return {index: usage.pop(name).completion_tokens for index, name in sessions.items() if name in usage}
    counts: dict[int, int] = {}
    for sample in samples:
        index = int(sample.index or 0)
        counts[index] = counts.get(index, 0) + sample.effective_response_length
    return counts
