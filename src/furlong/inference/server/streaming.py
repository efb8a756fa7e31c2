"""Streams of tokens: completions as they grow, their text in pieces, and server-sent events within a limit of bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from furlong.chat.text_deltas import TextDeltas
from furlong.errors import EngineError
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.embedded.request import Finished, Progress
from furlong.inference.server.limits import RequestGuard, flag_of
from furlong.interfaces import SamplingParams

BACKLOG = 16  # reports of a stream that wait; more of them are merged into one event for each completion


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to generate.

    params_id: Equal for requests whose parameters differ in the seed at most.
    routes_from: Tokens at the start that the routed experts leave out.
    """

    rid: str
    ids: Sequence[int]
    params: SamplingParams
    params_id: int = 0
    routes_from: int = 0


@dataclass
class SoFar:
    """The tokens of a completion so far, and how many of them an event contained."""

    tokens: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    num_sent: int = 0


Step = tuple[int, SoFar, Finished | EngineError | None]


async def progress(
    engine: EmbeddedEngine, requests: Sequence[GenerateRequest], guard: RequestGuard
) -> AsyncGenerator[Step]:
    """Yield (index, tokens so far, result or error or None) as completions grow.

    Ends when every request has a result, or with an error for the others at the request's deadline. A consumer
    that stops early aborts all of them. Streams take turns on the event loop, one step each.
    """
    queue: asyncio.Queue[tuple[int, Progress | Finished | EngineError]] = asyncio.Queue()

    async def submit(index: int, request: GenerateRequest) -> None:
        def report(new: Progress) -> None:
            queue.put_nowait((index, new))

        try:
            finished = await engine.submit(request.ids, request.params, rid=request.rid, report=report, is_checked=True)
        except EngineError as error:
            queue.put_nowait((index, error))
        else:
            queue.put_nowait((index, finished))

    tasks = [asyncio.create_task(submit(index, request)) for index, request in enumerate(requests)]
    so_far = [SoFar() for _ in requests]
    still_open = dict.fromkeys(range(len(requests)))
    try:
        while still_open:
            try:
                async with asyncio.timeout_at(guard.deadline_s):
                    reports = [await queue.get()]
            except TimeoutError:
                for index in still_open:
                    yield index, so_far[index], EngineError(f"not finished in time; see {flag_of('request_timeout')}")
                return
            if queue.qsize() > BACKLOG:
                reports += [queue.get_nowait() for _ in range(queue.qsize())]
            for step in _merged(reports, so_far):
                if step[2] is not None:
                    del still_open[step[0]]
                began = time.perf_counter()
                yield step
                await guard.turns.wait(time.perf_counter() - began)  # the next step takes about as long
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _merged(reports: Sequence[tuple[int, Progress | Finished | EngineError]], so_far: Sequence[SoFar]) -> list[Step]:
    """Add reports to `so_far`, and return one step for each completion in them."""
    steps: dict[int, Finished | EngineError | None] = {}
    for index, report in reports:
        if isinstance(report, Progress):
            so_far[index].tokens += report.tokens
            so_far[index].log_probs += report.log_probs
            steps.setdefault(index, None)
        else:
            steps[index] = report
    return [(index, so_far[index], result) for index, result in steps.items()]


def text_deltas(engine: EmbeddedEngine, params: SamplingParams | None = None) -> TextDeltas:
    """Return the decoder of one completion; `params` are needed for `delta`."""
    if params is None:
        return TextDeltas(engine.tokenizer)
    trims = not params.no_stop_trim
    return TextDeltas(
        engine.tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        end_ids={*params.stop_token_ids, *engine.eos_ids} if trims else (),
        stops=params.stop if trims else (),
        held_chars=max((len(stop) - 1 for stop in params.stop), default=0),
    )


def decoded(engine: EmbeddedEngine, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
    """Text of tokens; empty without a tokenizer."""
    if engine.tokenizer is None:
        return ""
    return engine.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
