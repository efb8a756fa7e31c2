"""Read raw, unvalidated rows of a data file in order, from any position and with bounded memory.

Whatever a file contains, rows are those that its format describes, or a DataError names the file and the place.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from furlong.data.prompt_path import PromptDataPath, SourceFile
from furlong.errors import DataError

READ_BYTES = 1 << 20
BATCH_ROWS = 1024
MAX_LINE_BYTES = 1 << 28


class Cursor(NamedTuple):
    """A position between two rows: the next row's index, the number of lines before it, and its byte offset."""

    row: int = 0
    line: int = 0
    offset: int = 0


class RawRow(NamedTuple):
    """One unparsed row: the bytes of a JSON line, or a dict of columns. `row` counts from 0."""

    row: int
    where: str
    after: Cursor
    raw: bytes | dict[str, Any]


class RowReader(Protocol):
    """Reads the rows of one data file or folder: `num_rows` of on average `row_bytes`, None if not known in advance."""

    num_rows: int | None
    row_bytes: int | None

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on."""
        ...


def read_slice(reader: RowReader, location: PromptDataPath) -> Iterator[RawRow]:
    """Return the rows of the path's slice, with Python's slice semantics."""
    start, stop = location.start or 0, location.stop
    if start >= 0 and (stop is None or stop >= 0):
        return islice(reader.read(Cursor()), start, stop)
    return iter(list(reader.read(Cursor()))[start:stop])


class JsonLines:
    """A JSON Lines file. Blank lines are not rows, but count as lines."""

    num_rows: int | None = None
    row_bytes: int | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = SourceFile(path)

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on; `where` has the 1-based line. Raises DataError if the file has changed."""
        row, line, offset = cursor
        checked = offset
        with self._file.reading(), self.path.open("rb", buffering=READ_BYTES) as file:
            self._file.check_unchanged()
            file.seek(offset)
            while raw := file.readline(MAX_LINE_BYTES):
                offset += len(raw)
                line += 1
                if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    raise DataError(
                        f"{self.path} line {line} is longer than {MAX_LINE_BYTES >> 20} MiB; the file is not JSON "
                        "Lines: write one object per line"
                    )
                is_torn = not raw.endswith(b"\n") or offset > self._file.num_bytes  # or the last line
                if is_torn or offset - checked >= READ_BYTES:
                    self._file.check_unchanged()
                    checked = offset
                if raw.isspace():
                    continue
                row += 1
                yield RawRow(row - 1, f"{self.path} line {line}", Cursor(row, line, offset), raw)
            self._file.check_unchanged()


class ParquetRows:
    """A Parquet file, decoded one row group at a time. Checksums of pages are compared where the file has them."""

    def __init__(self, path: Path, columns: list[str], num_required: int = 1) -> None:
        self.path, self.columns, self.num_required = path, columns, num_required
        self._file = SourceFile(path)
        with self._file.reading("its footer"), self._open() as file:
            meta = file.metadata
            sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
            num_bytes = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
        self.num_rows: int | None = meta.num_rows
        self.row_bytes: int | None = num_bytes // max(1, meta.num_rows)
        self._ends = list(accumulate(sizes))

    def _open(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.path, page_checksum_verification=True)

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on; earlier row groups are not read. Raises DataError."""
        with self._file.reading("its footer"), self._open() as file:
            self._file.check_unchanged()
            columns = _present(self.columns, file.schema_arrow.names, self.num_required)
            first = 0
            for group, end in enumerate(self._ends):
                if end > cursor.row:
                    with self._file.reading(f"row group {group}"):
                        batches = file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=columns)
                        yield from _table_rows(self._file, batches, first, end, cursor.row)
                first = end
            self._file.check_unchanged()


class ArrowRows:
    """The Arrow stream files of a save_to_disk folder, read one record batch at a time."""

    def __init__(self, path: Path, files: list[Path], columns: list[str], num_required: int = 1) -> None:
        self.path, self.columns, self.num_required = path, columns, num_required
        self._files = [SourceFile(file) for file in files]
        self._ends = list(accumulate(map(_num_rows, self._files)))
        num_rows = self._ends[-1]
        self.num_rows: int | None = num_rows
        self.row_bytes: int | None = sum(file.num_bytes for file in self._files) // max(1, num_rows)

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on; earlier files are not read. Raises DataError."""
        first = 0
        for file, end in zip(self._files, self._ends, strict=True):
            if end > cursor.row:
                with file.reading(), pa.OSFile(str(file.path)) as source, pa.ipc.open_stream(source) as stream:
                    file.check_unchanged()
                    columns = _present(self.columns, stream.schema.names, self.num_required)
                    batches = (piece for batch in stream for piece in _pieces(batch.select(columns)))
                    yield from _table_rows(file, batches, first, end, cursor.row)
            first = end


def _num_rows(file: SourceFile) -> int:
    """Count the rows of an Arrow stream file; values are not read, as the file is mapped meanwhile."""
    with file.reading(), pa.memory_map(str(file.path)) as source, pa.ipc.open_stream(source) as stream:
        return sum(batch.num_rows for batch in stream)


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    return (batch.slice(i, BATCH_ROWS) for i in range(0, batch.num_rows, BATCH_ROWS))


def _present(columns: list[str], names: list[str], num_required: int) -> list[str]:
    """Return the columns that exist; all names if a required one, of the first, is missing, for the error message.

    For `a.b`, which is a key of an object, the column is `a`.
    """
    roots = [name if name in names else name.partition(".")[0] for name in columns]
    return names if {*roots[:num_required]} - {*names} else [name for name in dict.fromkeys(roots) if name in names]


def _table_rows(file: SourceFile, batches: Any, first: int, end: int, skip_to: int) -> Iterator[RawRow]:
    """Yield the rows of batches that have the rows `first` to `end` of the table, from row `skip_to` on."""
    row = first
    for batch in batches:
        batch.validate(full=True)
        file.check_unchanged()
        skipped = min(max(0, skip_to - row), batch.num_rows)
        row += skipped
        for values in batch.slice(skipped).to_pylist():
            yield RawRow(
                row,
                f"{file.path} row {row}",
                Cursor(row + 1),
                {name: without_nulls(value) for name, value in values.items()},
            )
            row += 1
    if row != end:
        raise DataError(
            f"{file.path} is damaged: rows from {first} on end at {row}, expected {end}; copy or write it again"
        )


def plain_value(value: Any) -> Any:
    """Return a value of a row in this process as JSON has it: numpy's arrays as lists, times as text, NaN as null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in cast("list[Any]", value)]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return None if value != value else value  # pandas writes NaN for a missing cell


def without_nulls(value: Any) -> Any:
    """Remove nulls inside a nested value: Arrow adds one for every key that another row of the column has."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: without_nulls(item) for key, item in items if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in cast("list[Any]", value)]
    return value
