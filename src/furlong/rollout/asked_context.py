"""Compares the token ids that an engine was asked to complete with the context that a sample trains them in.

A custom generate function may ask with other ids than the sample has before the completion: with a cut history, a
system prompt that is not kept, or text that was encoded again. The engine's log-probs then belong to another context.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from furlong.core.sample import Sample


@dataclass(frozen=True)
class ContextDifference:
    """Trained tokens `start` to `stop` of a response that were sampled in another context.

    asked_len: tokens that the engine was asked with. trained_len: tokens before `start` in the sample, the prompt
    included. common_len: how many of them are the same from the beginning on.
    """

    start: int
    stop: int
    asked_len: int
    trained_len: int
    common_len: int

    def __str__(self) -> str:
        return (
            f"response tokens {self.start} to {self.stop} were sampled after {self.asked_len} tokens and are trained "
            f"after {self.trained_len}; the first {self.common_len} of both are the same"
        )


def context_differences(
    sample: Sample, asked: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
) -> list[ContextDifference]:
    """Compare each trained completion of a sample with the request that it answers.

    `asked` and `sampled` are the input ids and the completion of each request. A run of trained tokens is read as
    completions one after another; where no completion fits, the rest of the run is not compared.
    """
    prompt_length, tokens = sample.prompt_length, sample.tokens
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    differences: list[ContextDifference] = []
    position = prompt_length
    for is_trained, run in itertools.groupby(mask):
        end = position + len(list(run))
        at = position if is_trained else end
        while at < end and (fitting := _requests_at(tokens, at, end, sampled)):
            same = [i for i in fitting if len(asked[i]) == at and list(asked[i]) == tokens[:at]]
            request = max(same or fitting, key=lambda i: len(sampled[i]))
            stop = min(at + len(sampled[request]), end)
            if not same:
                common = common_length(asked[request], tokens[:at])
                part = (at - prompt_length, stop - prompt_length)
                differences.append(ContextDifference(*part, len(asked[request]), at, common))
            at = stop
        position = end
    return differences


def _requests_at(tokens: list[int], at: int, end: int, sampled: Sequence[Sequence[int]]) -> list[int]:
    """Return the requests whose completion, or the part of it that fits, is in `tokens` from `at` on."""
    left = end - at
    return [
        i
        for i, completion in enumerate(sampled)
        if completion and tokens[at : at + min(len(completion), left)] == list(completion[:left])
    ]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two lists."""
    count = min(len(a), len(b))
    if a[:count] == b[:count]:
        return count
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
