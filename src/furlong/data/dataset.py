"""Open a prompt file: as a table in memory (`data.source`), or as a stream, for files that are too large for that."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, cast

from furlong.config.task_specs import TaskMixture, TaskSpec, num_episodes, parse_tasks
from furlong.core.task_entries import task_entry
from furlong.core.text import shortened
from furlong.core.user_objects import find_object
from furlong.data.prompt import Prompt, PromptFormat, PromptRenderer, RowFilter
from furlong.data.prompt_path import PromptDataPath
from furlong.data.row_readers import (
    ArrowRows,
    Cursor,
    JsonLines,
    ParquetRows,
    RawRow,
    RowReader,
    plain_value,
    without_nulls,
)
from furlong.data.source import PromptTable, prompt_settings, shuffled
from furlong.data.tokenized import TOKENS, TokenizedRenderer, check_settings, read_tokenizer_settings
from furlong.errors import CheckpointError, ConfigError, DataError

RENDER_ROWS = 256
BLOCK_BYTES = 64 << 20


def open_prompts(
    prompt_data: str,
    *,
    tokenizer: Any,
    prompt_format: PromptFormat,
    streaming: bool = False,
    num_workers: int = 0,
    skip_bad_rows: bool = False,
    shuffle_buffer_size: int = 10_000,
) -> PromptTable | PromptStream:
    """Open `--prompt-data`. A table is read, rendered and filtered immediately, a stream on demand.

    Prompts written by `furlong data tokenize` are used without rendering. Raises DataError for a bad row (unless
    `skip_bad_rows`), ConfigError for an invalid slice, or for prompts that were tokenized with other settings.
    """
    location = PromptDataPath.parse(prompt_data)
    reader, renderer = open_rows(location, tokenizer=tokenizer, prompt_format=prompt_format, num_workers=num_workers)
    check = RowFilter(
        str(location.path),
        max_prompt_len=prompt_format.max_prompt_len,
        skip_bad_rows=skip_bad_rows,
        limit_flag=prompt_format.limit_flag,
    )
    if streaming:
        return PromptStream(location, reader, renderer, check, block_rows=shuffle_buffer_size)
    return PromptTable(location, reader, renderer, check)


def open_rows(
    location: PromptDataPath, *, tokenizer: Any, prompt_format: PromptFormat, num_workers: int = 0
) -> tuple[RowReader, PromptRenderer | TokenizedRenderer]:
    """Open a file's rows and their renderer. Raises ConfigError if the rows were tokenized with other settings."""
    if (settings := read_tokenizer_settings(location)) is not None:
        check_settings(location, settings, tokenizer, prompt_format)
        return open_reader(location, prompt_format, TOKENS), TokenizedRenderer(prompt_format)
    reader = open_reader(location, prompt_format)
    return reader, PromptRenderer(tokenizer, prompt_format, num_workers=num_workers)


def open_reader(location: PromptDataPath, prompt_format: PromptFormat, *columns: str) -> RowReader:
    """Open the rows of a run's data. Table formats decode only the columns of the format, and `columns`."""
    names, num_required = [*prompt_format.columns, *columns], 2 if prompt_format.label_key else 1
    match location.kind:
        case "jsonl":
            return JsonLines(location.path)
        case "parquet":
            return ParquetRows(location.path, names, num_required)
        case "arrow":
            return ArrowRows(location.path, location.files(), names, num_required)
        case "objects":
            return ObjectRows(find_object(str(location.path)), str(location.path), prompt_format)
        case "tasks":
            text = str(location.path)
            return TaskRows(text, prompt_format) if num_episodes(text) is None else EpisodeRows(text, prompt_format)


class PromptStream:
    """Prompts read on demand, with one block of rows in memory.

    The file is divided into blocks of `block_rows` rows, fewer if a block would exceed BLOCK_BYTES. Shuffling permutes
    rows within a block, by (key, block number). A position is the byte offset of a block and the number of its rows
    taken; to resume, the block is read again.
    """

    def __init__(
        self,
        location: PromptDataPath,
        reader: RowReader,
        renderer: PromptRenderer | TokenizedRenderer,
        check: RowFilter,
        *,
        block_rows: int,
    ) -> None:
        location.check_streamable()
        if block_rows < 1:
            raise ConfigError(f"the shuffle buffer size is {block_rows}; it must be at least 1")
        self._location, self._reader, self._renderer, self._check = location, reader, renderer, check
        by_size = None if reader.row_bytes is None else BLOCK_BYTES // max(1, reader.row_bytes)
        self._block_rows = block_rows if by_size is None else max(1, min(block_rows, by_size))
        self._settings = prompt_settings(location, renderer.format, skip_bad_rows=check.skip_bad_rows)
        self._settings |= {"streaming": True, "shuffle_buffer_size": block_rows}
        self._first: Cursor | None = None
        self._size: int | None = None
        self._rows: Iterator[RawRow] = iter(())
        self._key: int | None = None
        self._kept = 0
        self._at = (0, Cursor(), 0)  # last prompt taken: block number, block start, rows taken of the block
        self._ready: deque[tuple[tuple[int, Cursor, int], Prompt]] = deque()  # rendered, not yet taken
        self._block, self._block_start, self._block_end, self._rendered = 0, Cursor(), Cursor(), 0
        self._pending: deque[RawRow] = deque()  # rows of the block that are not rendered yet

    @property
    def size(self) -> int | None:
        """Prompts in one epoch; None until an epoch was read to its end."""
        return self._size

    @property
    def num_long(self) -> int:
        """Rows read so far that were dropped because their prompt is too long."""
        return self._check.num_long

    def begin(self, key: int | None) -> None:
        """Start an epoch at the first row of the slice."""
        self._open(key, self._start(), block=0)
        self._kept = 0

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts. Raises DataError for a bad row, or at the end of an epoch without prompts."""
        while len(self._ready) < n and self._render():
            pass
        taken = [self._ready.popleft() for _ in range(min(n, len(self._ready)))]
        prompts = [prompt for _, prompt in taken]
        if taken:
            self._at = taken[-1][0]
        self._kept += len(prompts)
        if len(prompts) < n:
            self._check.log_summary()
            if not self._kept:
                self._check.require_some()
            self._size = self._kept
        return prompts

    def position(self) -> dict[str, Any]:
        """Return the current block, how many of its rows were taken, and the counters."""
        block, start, taken = self._at
        return {"block": block, **start._asdict(), "taken": taken, "kept": self._kept, "size": self._size}

    def seek(self, key: int | None, position: dict[str, Any], *, by_row: bool = False) -> None:
        """Continue an epoch; reads one block. Raises CheckpointError if the block is shorter than the position.

        `by_row`: of other data, in which the block begins elsewhere; a block that is shorter then ends there.
        """
        cursor = Cursor(position["row"], position["line"], position["offset"])
        if by_row:
            cursor = self._cursor_of_row(position["row"])
        self._open(key, cursor, block=position["block"])
        self._kept, self._size = position["kept"], position["size"]
        taken = position["taken"]
        if taken:
            self._fill()
            if by_row:
                taken = min(taken, len(self._pending))
            if taken > len(self._pending):
                raise CheckpointError(
                    f"{self._location.path}: the checkpoint is at row {taken} of the block at {cursor}, which has only "
                    f"{len(self._pending)} rows; the file has changed"
                )
        for _ in range(taken):
            self._pending.popleft()
        self._rendered = taken
        self._at = (self._block, self._block_start, taken)

    def settings(self) -> dict[str, Any]:
        """Return the fingerprint, the keys, and the size of the shuffle buffer."""
        return dict(self._settings)

    def close(self) -> None:
        """Stop the workers and close the file."""
        self._renderer.close()
        self._rows = iter(())

    def _start(self) -> Cursor:
        if self._first is None:
            self._first = self._cursor_of_row(self._location.start or 0)
        return self._first

    def _cursor_of_row(self, row: int) -> Cursor:
        """Return the position before a row, or the end of a shorter file whose rows are not counted in advance."""
        if self._reader.num_rows is not None:
            return Cursor(row=row)
        cursor = Cursor()
        for raw in islice(self._reader.read(cursor), row):
            cursor = raw.after
        return cursor

    def _open(self, key: int | None, cursor: Cursor, *, block: int) -> None:
        self._key, self._block = key, block
        self._block_start = self._block_end = cursor
        self._rows = self._reader.read(cursor)
        self._pending.clear()
        self._ready.clear()
        self._rendered = 0
        self._at = (block, cursor, 0)

    def _fill(self) -> bool:
        block: list[RawRow] = []
        num_bytes = 0
        stop = self._location.stop
        while len(block) < self._block_rows and num_bytes < BLOCK_BYTES:
            if stop is not None and self._block_end.row >= stop:
                break
            raw = next(self._rows, None)
            if raw is None:
                break
            block.append(raw)
            self._block_end = raw.after
            num_bytes += len(raw.raw) if isinstance(raw.raw, bytes) else 0
        order = range(len(block)) if self._key is None else shuffled(len(block), key=self._key, block=self._block)
        self._pending.extend(block[i] for i in order)
        return bool(block)

    def _render(self) -> bool:
        if not self._pending:
            if self._rendered:
                self._block, self._block_start, self._rendered = self._block + 1, self._block_end, 0
            if not self._fill():
                return False
        for result in self._renderer.render(list(islice(self._pending, RENDER_ROWS))):
            admitted = self._check.admits(result)
            self._pending.popleft()
            self._rendered += 1
            if admitted:
                at = (self._block, self._block_start, self._rendered)
                self._ready.append((at, cast(Prompt, result)))
        return True


class ObjectRows:
    """Rows in this process: a list of dicts, a data set of `datasets`, or an iterable that can be read several times.

    Columns that the format does not name are metadata.
    """

    def __init__(self, rows: Any, name: str, prompt_format: PromptFormat) -> None:
        self._rows, self._name, self._format = rows, name, prompt_format
        self.num_rows: int | None = len(rows) if hasattr(rows, "__len__") else None
        self.row_bytes: int | None = None

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on. Raises DataError for one that is not a mapping."""
        for row, values in enumerate(islice(self._rows, cursor.row, None), cursor.row):
            where = f"{self._name} row {row}"
            if not isinstance(values, Mapping):
                raise DataError(f"{where} is {shortened(values)}, expected a dict of columns")
            plain = {name: without_nulls(plain_value(value)) for name, value in cast("Any", values).items()}
            yield RawRow(row, where, Cursor(row + 1), self._columns(plain))

    def _columns(self, values: dict[str, Any]) -> dict[str, Any]:
        key, columns = self._format.metadata_key, self._format.columns
        if key is None or not (others := {name: value for name, value in values.items() if name not in columns}):
            return values
        own = values.get(key)
        return {**values, key: {**others, **own} if isinstance(own, Mapping) else own or others}


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
