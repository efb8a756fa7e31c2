"""An environment whose rubric looks at what the episode left in it; `log` gets what happens to each instance."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from furlong.environments import Episode, Rubric, Step
from furlong.errors import InfraError


def left(episode: Episode, environment: Workshop) -> float:
    """Return the number of turns, which only the instance knows."""
    environment.note("judged")
    if environment.closed:
        raise AssertionError("closed before it was judged")
    if environment.fault == "judge_blocks":
        time.sleep(100)
    if environment.fault == "judge_raises":
        raise ValueError("a bug")
    if environment.fault == "judge_infra":
        raise InfraError("the sandbox is gone")
    if environment.fault == "judge_text":
        return "many"  # pyright: ignore[reportReturnType]
    return float(environment.turn)


async def slowly(episode: Episode, environment: Workshop) -> bool:
    if environment.fault == "judge_hangs":
        await asyncio.sleep(100)
    return episode.answer == "four"


def answers(episode: Episode) -> int:
    return len(episode.answers)


class Workshop:
    """Ends after two turns, or has a fault in its second step."""

    rubric = Rubric(left, (slowly, 0.5), (answers, 0.01))

    def __init__(self, log: str, fault: str = "") -> None:
        self.log, self.fault, self.turn, self.closed = Path(log), fault, 0, 0
        self.note("made")

    def note(self, what: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{what}\n")

    def reset(self, task: Any, seed: int) -> str:
        if self.fault == "slow_reset":
            time.sleep(0.6)
        self.note("ready")
        return "begin"

    async def step(self, message: Any) -> Step:
        self.turn += 1
        if self.turn == 2 and self.fault == "step_hangs":
            await asyncio.sleep(100)
        if self.turn == 2 and self.fault == "step_raises":
            raise ValueError("a bug")
        return Step("again", done=self.turn == 2)

    async def close(self) -> None:
        self.closed += 1
        await asyncio.sleep(0.05)
        if self.fault == "slow_close":
            await asyncio.sleep(1.5)
        self.note("closed")
