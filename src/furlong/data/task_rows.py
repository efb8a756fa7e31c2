"""Rows of procedural tasks: made when they are read, and equal for equal task, options, seed and row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from furlong.config.checks.task_specs import TaskMixture, TaskSpec, parse_tasks
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


def _prompt(task: TaskSpec, question: str) -> str | list[dict[str, str]]:
    if task.system_prompt is None:
        return question
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return [
        {"role": "system", "content": SYSTEM_PROMPTS[task.system_prompt].strip()},
        {"role": "user", "content": question},
    ]
