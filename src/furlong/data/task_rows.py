"""Rows of procedural tasks: made when they are read, and equal for equal task, options, seed and row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from furlong.config.task_specs import TaskMixture, TaskSpec, num_episodes, parse_tasks
from furlong.core.task_entries import task_entry
from furlong.data.prompt import PromptFormat
from furlong.data.row_readers import Cursor, RawRow
from furlong.errors import DataError


class TaskRows:
    """The rows that `--prompt-data reasoning-gym:...` names: question, answer, and what the verifier needs."""

    def __init__(self, text: str, prompt_format: PromptFormat) -> None:
        self.text = text
        self._mixture: TaskMixture = parse_tasks(text)
        self._format = prompt_format
        self.num_rows: int | None = self._mixture.size
        self.row_bytes: int | None = None

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on. Raises DataError if the package cannot make one."""
        for row in range(cursor.row, self._mixture.size):
            task, index = self._mixture.row(row)
            yield RawRow(row, f"{self.text} row {row}", Cursor(row + 1), self._columns(task, index, row))

    def _columns(self, task: TaskSpec, index: int, row: int) -> dict[str, Any]:
        try:
            entry = task_entry(task.key, self._mixture.seed, index)
        except Exception as error:
            raise DataError(
                f"{self.text} row {row}: {task.name} raised {type(error).__name__}: {error}; change its options or seed"
            ) from error
        columns = self._format
        values: dict[str, Any] = {columns.input_key: _prompt(task, entry["question"])}
        if columns.label_key:
            values[columns.label_key] = str(entry["answer"])
        if columns.metadata_key:
            values[columns.metadata_key] = {"reasoning_gym": task.key, "seed": self._mixture.seed, "index": index}
        return values


class EpisodeRows:
    """The rows that `--prompt-data episodes:N` names: metadata {"episode": i} and a placeholder prompt."""

    def __init__(self, text: str, prompt_format: PromptFormat) -> None:
        self.text = text
        self._format = prompt_format
        self.num_rows: int | None = num_episodes(text)
        self.row_bytes: int | None = None

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on."""
        for row in range(cursor.row, self.num_rows or 0):
            values: dict[str, Any] = {self._format.input_key: f"episode {row}"}
            if self._format.label_key:
                values[self._format.label_key] = ""
            if self._format.metadata_key:
                values[self._format.metadata_key] = {"episode": row}
            yield RawRow(row, f"{self.text} row {row}", Cursor(row + 1), values)


def _prompt(task: TaskSpec, question: str) -> str | list[dict[str, str]]:
    if task.system_prompt is None:
        return question
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return [
        {"role": "system", "content": SYSTEM_PROMPTS[task.system_prompt].strip()},
        {"role": "user", "content": question},
    ]
