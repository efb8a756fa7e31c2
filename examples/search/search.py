"""A search agent: the policy asks an index of facts with `[WORD]`, and answers from what it finds.

user       capital of k7?
assistant  [k7]            a query
user       k7: ema         the best match (BM25, from SQLite's full-text search)
assistant  ema             the answer
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from furlong.environments import Episode, Rubric, Step, Task

NUM_FACTS = 500
QUERY = re.compile(r"\[(\w+)\]")


def facts() -> dict[str, str]:
    """Return the capital of each country of a made-up world."""
    rng = random.Random(5)
    return {f"k{number}": "".join(rng.choices("abemo", k=3)) for number in range(NUM_FACTS)}


def write_index(file: Path) -> None:
    """Write the facts to a full-text index."""
    with sqlite3.connect(file) as index:
        index.execute("CREATE VIRTUAL TABLE facts USING fts5(text)")
        index.executemany(
            "INSERT INTO facts VALUES (?)", [(f"{name}: {capital}",) for name, capital in facts().items()]
        )
    index.close()


def exact(episode: Episode) -> float:
    """Return the share of right characters of the answer."""
    right = sum(a == b for a, b in zip(episode.answer, episode.label, strict=False))
    return right / max(len(episode.answer), len(episode.label))


def queries(episode: Episode) -> int:
    """Return the number of searches."""
    return len(episode.answers) - 1


class Search:
    """Answers queries from the index; any other message is the answer to the question."""

    rubric = Rubric(exact, (queries, -0.05))

    def __init__(self, index: str) -> None:
        self.index = sqlite3.connect(index, check_same_thread=False)  # methods run in threads, one at a time

    def reset(self, task: Task, seed: int) -> list[dict[str, Any]]:  # noqa: ARG002  of the protocol
        """Ask the question of the row."""
        return task.messages

    def step(self, message: Mapping[str, Any]) -> Step:
        """Search, or end."""
        query = QUERY.fullmatch(message["content"])
        if query is None:
            return Step(done=True)
        ranked = "SELECT text FROM facts WHERE facts MATCH ? ORDER BY bm25(facts) LIMIT 1"
        row = self.index.execute(ranked, (f'"{query[1]}"',)).fetchone()
        return Step("nothing" if row is None else row[0])

    def close(self) -> None:
        """Close the index."""
        self.index.close()
