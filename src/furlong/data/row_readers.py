"""Raw rows of a data file, read in order from any point with bounded memory. Nothing is checked or decoded here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq

from furlong.data.location import DataLocation

READ_BYTES = 1 << 20
BATCH_ROWS = 1024


class Cursor(NamedTuple):
    """A point between two rows: the next row's index, its line number minus one, and its byte offset."""

    row: int = 0
    line: int = 0
    offset: int = 0


class RawRow(NamedTuple):
    """One row as it lies in the file: the bytes of a JSON line, or a dict of columns. `row` counts from 0."""

    row: int
    where: str
    after: Cursor
    raw: bytes | dict[str, Any]


class RowReader(Protocol):
    """Reads one data location."""

    @property
    def num_rows(self) -> int | None:
        """Rows in the file; None if that needs a pass over it."""
        ...

    @property
    def row_bytes(self) -> int | None:
        """Mean size of a row in bytes; None if that needs a pass over the file."""
        ...

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on."""
        ...


def open_reader(location: DataLocation, columns: list[str]) -> RowReader:
    """Open a location; table formats decode `columns` only, where the file has them."""
    match location.kind:
        case "jsonl":
            return JsonLines(location.path)
        case "parquet":
            return ParquetRows(location.path, columns)
        case "arrow":
            return ArrowRows(location.path, location.files(), columns)


def sliced(reader: RowReader, location: DataLocation) -> Iterator[RawRow]:
    """The rows of the location's slice, as Python slices a list."""
    start, stop = location.start or 0, location.stop
    if start >= 0 and (stop is None or stop >= 0):
        return islice(reader.read(Cursor()), start, stop)
    return iter(list(reader.read(Cursor()))[start:stop])


@dataclass(frozen=True)
class JsonLines:
    """A JSON Lines file. Blank lines are not rows, but count as lines."""

    path: Path
    num_rows: int | None = None
    row_bytes: int | None = None

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on; `where` names the 1-based line."""
        row, line, offset = cursor
        with self.path.open("rb", buffering=READ_BYTES) as file:
            file.seek(offset)
            for raw in file:
                offset += len(raw)
                line += 1
                if raw.isspace():
                    continue
                row += 1
                yield RawRow(row - 1, f"{self.path} line {line}", Cursor(row, line, offset), raw)


@dataclass(frozen=True)
class ParquetRows:
    """A Parquet file, decoded one row group at a time."""

    path: Path
    columns: list[str]
    num_rows: int = field(init=False)
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        meta = pq.read_metadata(self.path)
        size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
        object.__setattr__(self, "num_rows", meta.num_rows)
        object.__setattr__(self, "row_bytes", size // max(1, meta.num_rows))

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on; row groups before it are not read."""
        with pq.ParquetFile(self.path) as file:
            meta = file.metadata
            ends = list(accumulate(meta.row_group(i).num_rows for i in range(meta.num_row_groups)))
            groups = [i for i, end in enumerate(ends) if end > cursor.row]
            if not groups:
                return
            first = ends[groups[0] - 1] if groups[0] else 0
            columns = _present(self.columns, file.schema_arrow.names)
            batches = file.iter_batches(batch_size=BATCH_ROWS, row_groups=groups, columns=columns)
            yield from _table_rows(self.path, batches, first, cursor.row)


@dataclass(frozen=True)
class ArrowRows:
    """The Arrow stream files of a save_to_disk folder, memory mapped."""

    path: Path
    files: list[Path]
    columns: list[str]
    num_rows: int = field(init=False)
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        num_rows = sum(batch.num_rows for batch in self._batches())
        object.__setattr__(self, "num_rows", num_rows)
        object.__setattr__(self, "row_bytes", sum(f.stat().st_size for f in self.files) // max(1, num_rows))

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for path in self.files:
            with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
                yield from stream

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on; batches before it are mapped but not decoded."""
        first = 0
        for batch in self._batches():
            if first + batch.num_rows > cursor.row:
                batch_columns = batch.select(_present(self.columns, batch.schema.names))
                slices = (batch_columns.slice(i, BATCH_ROWS) for i in range(0, batch.num_rows, BATCH_ROWS))
                yield from _table_rows(self.path, slices, first, cursor.row)
            first += batch.num_rows


def _present(wanted: list[str], names: list[str]) -> list[str]:
    """The wanted columns that exist; all if the first, the prompt's, is missing, so that the error can name them."""
    return [name for name in wanted if name in names] if wanted[0] in names else names


def _table_rows(path: Path, batches: Any, first: int, skip_to: int) -> Iterator[RawRow]:
    row = first
    for batch in batches:
        end = row + batch.num_rows
        if end > skip_to:
            row = max(row, skip_to)
            for values in batch.slice(batch.num_rows - (end - row)).to_pylist():
                yield RawRow(row, f"{path} row {row}", Cursor(row + 1), _without_nulls(values))
                row += 1
        row = end


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out the nulls inside nested values: Arrow writes one for every key that other rows of the column have."""
    return {key: _strip(value) for key, value in values.items()}


def _strip(value: Any) -> Any:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: _strip(item) for key, item in items if item is not None}
    if isinstance(value, list):
        return [_strip(item) for item in cast("list[Any]", value)]
    return value
