"""A taskset of verifiers (V1): sums of two numbers, with the share of right digits as the reward."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """The data of a task: the sum, beside the prompt."""

    answer: str = ""


class Sum(vf.Task[SumData]):
    """One sum."""

    @vf.reward(weight=1.0)
    async def digits(self, trace) -> float:
        """Return the share of right digits of the reply."""
        reply, answer = trace.last_reply, self.data.answer
        return sum(a == b for a, b in zip(reply, answer, strict=False)) / max(len(reply), len(answer))


class SumsConfig(vf.TasksetConfig):
    """Options of the taskset: `--environment verifiers:digit_sums?num_tasks=100`."""

    num_tasks: int = 2000


class DigitSums(vf.Taskset[Sum, SumsConfig]):
    """Sums of two numbers below 100."""

    def load(self) -> Iterator[Sum]:
        """Yield the tasks."""
        rng = random.Random(0)
        for _ in range(self.config.num_tasks):
            a, b = rng.randrange(10, 100), rng.randrange(10, 100)
            yield Sum(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)


__all__ = ["DigitSums"]
