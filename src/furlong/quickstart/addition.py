"""Task of the quickstart: sums of two two-digit numbers, and a teacher that mostly forgets to carry."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from furlong.files.atomic import atomic_file

HELD_OUT = 300
Problem = tuple[int, int]


def held_out_problems() -> list[Problem]:
    """Return the fixed problems that are used neither by the teacher nor in training."""
    everything = [(a, b) for a in range(100) for b in range(100)]
    return random.Random(2024).sample(everything, HELD_OUT)


def problems(count: int, *, seed: int) -> Iterator[Problem]:
    """Draw problems that are not held out."""
    held_out = set(held_out_problems())
    rng = random.Random(seed)
    while count:
        problem = (rng.randrange(100), rng.randrange(100))
        if problem not in held_out:
            count -= 1
            yield problem


def sum_without_carry(a: int, b: int) -> int:
    """Add digit by digit without carries: 47 + 85 gives 22."""
    return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10


def write_prompts(path: Path, chosen: Iterable[Problem]) -> None:
    """Write JSONL rows {"prompt": "47+85=", "label": "132"}."""
    _write(path, ({"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in chosen))


def write_demonstrations(path: Path, chosen: Iterable[Problem], *, right: float, seed: int) -> None:
    """Write rows whose label is the teacher's answer: the correct sum with probability `right`."""
    rng = random.Random(seed)
    _write(
        path,
        (
            {"prompt": f"{a}+{b}=", "label": str(a + b if rng.random() < right else sum_without_carry(a, b))}
            for a, b in chosen
        ),
    )


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    with atomic_file(path) as draft, draft.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
