"""Samples as tables for trackers: the first ones of each rollout and evaluation."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from furlong.core.sample import Sample

MAX_CHARS = 10_000  # of a text in a table
TRAINED = "rollout"  # the table of training samples; the others have the names of evaluation sets
COLUMNS = ("step", "group", "sample", "reward", "status", "tokens", "prompt", "response", "label")
TEXTS = COLUMNS[-3:]


@dataclass(frozen=True)
class SampleTable:
    """Samples of one step: rows of `COLUMNS`."""

    name: str
    step: int
    rows: list[list[Any]]

    @property
    def key(self) -> str:
        """The name in a tracker."""
        return f"samples/{self.name}"

    def columns(self) -> dict[str, list[Any]]:
        """Return the values by column."""
        return {name: [row[i] for row in self.rows] for i, name in enumerate(COLUMNS)}


@runtime_checkable
class SampleTracker(Protocol):
    """A tracker that also shows samples."""

    def log_samples(self, table: SampleTable) -> None:
        """Record a table."""
        ...


class SampleTables:
    """Collects the first `most` samples of rollouts and evaluations until trackers take them. Thread-safe."""

    def __init__(self, most: int | None) -> None:
        self._most = most or 0
        self._tables: list[SampleTable] = []
        self._lock = threading.Lock()

    def add(self, step: int, name: str, samples: Sequence[Sample]) -> None:
        """Add a table for `step`, as in metrics.jsonl."""
        if self._most and samples:
            table = SampleTable(name, step, [_row(step, sample) for sample in samples[: self._most]])
            with self._lock:
                self._tables.append(table)

    def take(self, step: int) -> list[SampleTable]:
        """Remove and return the tables up to `step`: with asynchronous rollouts there may be later ones."""
        with self._lock:
            due = [table for table in self._tables if table.step <= step]
            self._tables = [table for table in self._tables if table.step > step]
        return due


def _row(step: int, sample: Sample) -> list[Any]:
    reward = sample.reward if sample.reward is None or isinstance(sample.reward, int | float) else _text(sample.reward)
    return [
        step, sample.group_index, sample.index, reward, sample.status.value, sample.response_length,
        _text(sample.prompt), _text(sample.response), _text(sample.label),
    ]  # fmt: skip


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    return text[:MAX_CHARS]
