"""Ordered prompts: a table in memory, or a stream over a file that is too large for that.

Both yield one epoch at a time, in an order determined by a key, and resume from a JSON-able position.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from furlong.data.prompt import Prompt, PromptFormat, PromptRenderer, RejectedRow
from furlong.data.row_readers import Cursor, PromptDataPath, RawRow, RowReader, open_reader, read_slice
from furlong.data.tokenized import TOKENS, TokenizedRenderer, check_settings, read_tokenizer_settings
from furlong.errors import CheckpointError, ConfigError, DataError

log = logging.getLogger(__name__)

RENDER_ROWS = 256
BLOCK_BYTES = 64 << 20
SHOWN_ROWS = 5
_U64 = (1 << 64) - 1


class Prompts(Protocol):
    """The prompts that a data source draws from. Call `begin` or `seek` before `take`."""

    @property
    def size(self) -> int | None:
        """Prompts in one epoch; None while unknown."""
        ...

    def begin(self, key: int | None) -> None:
        """Start an epoch, shuffled by `key`, or in file order if it is None."""
        ...

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts of the epoch; fewer at its end, [] after it."""
        ...

    def position(self) -> dict[str, Any]:
        """Return a JSON-able position in the epoch, for `seek`."""
        ...

    def seek(self, key: int | None, position: dict[str, Any]) -> None:
        """Continue an epoch from a `position`."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return what must be equal for a position to be valid: the data's fingerprint and the prompt format."""
        ...

    def close(self) -> None:
        """Stop workers and close files."""
        ...


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
    check = RowFilter(str(location.path), max_prompt_len=prompt_format.max_prompt_len, skip_bad_rows=skip_bad_rows)
    if streaming:
        return PromptStream(location, reader, renderer, check, block_rows=shuffle_buffer_size)
    return PromptTable(location, reader, renderer, check)


def open_rows(
    location: PromptDataPath, *, tokenizer: Any, prompt_format: PromptFormat, num_workers: int = 0
) -> tuple[RowReader, PromptRenderer | TokenizedRenderer]:
    """Open a file's rows and their renderer. Raises ConfigError if the rows were tokenized with other settings."""
    if (settings := read_tokenizer_settings(location)) is not None:
        check_settings(location, settings, tokenizer, prompt_format)
        return open_reader(location, [*prompt_format.columns, TOKENS]), TokenizedRenderer(prompt_format)
    reader = open_reader(location, prompt_format.columns)
    return reader, PromptRenderer(tokenizer, prompt_format, num_workers=num_workers)


def shuffled(n: int, *, key: int, block: int = 0) -> NDArray[np.int64]:
    """Return a permutation of range(n): the stable order of n raw Philox words under the key (`key`, `block`).

    Raw words of a bit generator are the same on every platform and numpy version; `Generator.permutation` is not.
    """
    philox = np.random.Philox(key=np.array([key & _U64, block & _U64], dtype=np.uint64))
    return np.argsort(philox.random_raw(n), kind="stable")


class RowFilter:
    """Rejects or counts bad rows, and logs once how many rows were left out and why."""

    def __init__(self, name: str, *, max_prompt_len: int | None, skip_bad_rows: bool) -> None:
        self.name = name
        self.max_prompt_len = max_prompt_len
        self.skip_bad_rows = skip_bad_rows
        self.num_kept = self.num_long = self.num_bad = 0
        self.first_bad: list[str] = []
        self._is_logged = False

    def admits(self, result: Prompt | RejectedRow) -> bool:
        """Return whether the row is a prompt to issue. Raises DataError for a bad row unless bad rows are skipped."""
        if isinstance(result, Prompt):
            self.num_kept += 1
            return True
        if result.num_tokens is not None:
            self.num_long += 1
            return False
        message = f"{result.where}: {result.reason}"
        if not self.skip_bad_rows:
            raise DataError(f"{message}; correct the row, or skip such rows with --skip-bad-rows")
        self.num_bad += 1
        if len(self.first_bad) < SHOWN_ROWS:
            self.first_bad.append(message)
        return False

    def log_summary(self) -> None:
        """Log what was left out, on the first call only."""
        if self._is_logged:
            return
        self._is_logged = True
        total = self.num_kept + self.num_long + self.num_bad
        if self.num_bad:
            log.warning(
                "%s: skipped %d of %d rows (bad rows); the first: %s",
                self.name,
                self.num_bad,
                total,
                self.first_bad,
            )
        if self.num_long:
            limit = self.max_prompt_len
            log.warning("%s: dropped %d of %d prompts longer than %s tokens", self.name, self.num_long, total, limit)

    def require_some(self) -> None:
        """Raise DataError if nothing was kept."""
        if not self.num_kept:
            counts = f"{self.num_bad} bad rows, {self.num_long} prompts over {self.max_prompt_len} tokens"
            hint = (
                self.first_bad[0] if self.first_bad else "check --prompt-data, its slice, and --rollout-max-prompt-len"
            )
            raise DataError(f"{self.name} has no usable prompts ({counts}); {hint}")


def _settings(location: PromptDataPath, prompt_format: PromptFormat, *, skip_bad_rows: bool) -> dict[str, Any]:
    return {
        **location.fingerprint(),
        "input_key": prompt_format.input_key,
        "label_key": prompt_format.label_key,
        "metadata_key": prompt_format.metadata_key,
        "tool_key": prompt_format.tool_key,
        "apply_chat_template": prompt_format.apply_chat_template,
        "max_prompt_len": prompt_format.max_prompt_len,
        "skip_bad_rows": skip_bad_rows,
    }


class PromptTable(Sequence[Prompt]):
    """All prompts in memory, in file order. Implements `Prompts` with known size."""

    def __init__(
        self,
        location: PromptDataPath,
        reader: RowReader,
        renderer: PromptRenderer | TokenizedRenderer,
        check: RowFilter,
    ) -> None:
        rows = read_slice(reader, location)
        self._prompts: list[Prompt] = []
        try:
            while chunk := list(islice(rows, 16 * RENDER_ROWS)):
                self._prompts += [cast(Prompt, result) for result in renderer.render(chunk) if check.admits(result)]
        finally:
            renderer.close()
        check.log_summary()
        check.require_some()
        self._settings = _settings(location, renderer.format, skip_bad_rows=check.skip_bad_rows)
        self._settings |= {"streaming": False, "num_prompts": len(self._prompts)}
        self._order: NDArray[np.int64] | None = None
        self._next = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        return self._prompts[index]

    @property
    def size(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    def begin(self, key: int | None) -> None:
        """Start an epoch."""
        self._order = None if key is None else shuffled(len(self._prompts), key=key)
        self._next = 0

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts of the epoch."""
        start, self._next = self._next, min(self._next + n, len(self._prompts))
        if self._order is None:
            return self._prompts[start : self._next]
        return [self._prompts[i] for i in self._order[start : self._next]]

    def position(self) -> dict[str, Any]:
        """Return how many prompts of the epoch were taken."""
        return {"taken": self._next}

    def seek(self, key: int | None, position: dict[str, Any]) -> None:
        """Continue an epoch."""
        self.begin(key)
        self._next = int(position["taken"])

    def settings(self) -> dict[str, Any]:
        """Return the fingerprint, the keys, and the number of prompts."""
        return dict(self._settings)

    def close(self) -> None:
        """Do nothing: files and workers are closed after reading."""


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
        if (location.start or 0) < 0 or (location.stop or 0) < 0:
            raise ConfigError(
                f"{location.path}@{location.slice_text}: a negative slice needs the number of rows, which is unknown "
                "for a stream; use non-negative bounds, or remove --streaming-data"
            )
        if block_rows < 1:
            raise ConfigError(f"the shuffle buffer size is {block_rows}; it must be at least 1")
        self._location, self._reader, self._renderer, self._check = location, reader, renderer, check
        by_size = None if reader.row_bytes is None else BLOCK_BYTES // max(1, reader.row_bytes)
        self._block_rows = block_rows if by_size is None else max(1, min(block_rows, by_size))
        self._settings = _settings(location, renderer.format, skip_bad_rows=check.skip_bad_rows)
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

    def seek(self, key: int | None, position: dict[str, Any]) -> None:
        """Continue an epoch; reads one block. Raises CheckpointError if the block is shorter than the position."""
        cursor = Cursor(position["row"], position["line"], position["offset"])
        self._open(key, cursor, block=position["block"])
        self._kept, self._size = position["kept"], position["size"]
        taken = position["taken"]
        if taken:
            self._fill()
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
            skip = self._location.start or 0
            self._first = Cursor()
            if skip and self._reader.num_rows is None:
                for raw in islice(self._reader.read(Cursor()), skip):
                    self._first = raw.after
            elif skip:
                self._first = Cursor(row=skip)
        return self._first

    def _open(self, key: int | None, cursor: Cursor, *, block: int) -> None:
        self._key, self._block = key, block
        self._block_start = self._block_end = cursor
        self._rows = self._reader.read(cursor)
        self._pending.clear()
        self._ready.clear()
        self._rendered = 0
        self._at = (block, cursor, 0)

    def _fill(self) -> bool:
        """Read the next block into `_pending`, in shuffled order; False at the end of the data."""
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
        """Render the next rows; False at the end of the data. A bad row that raises stays next in line."""
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
