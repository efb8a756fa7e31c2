"""Read raw, unvalidated rows of a data file in order, from any position and with bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from furlong.config.checks.value_checks import split_slice
from furlong.errors import ConfigError, DataError

READ_BYTES = 1 << 20
BATCH_ROWS = 1024
HASHED_BYTES = 1 << 20

DataKind = Literal["jsonl", "parquet", "arrow"]


@dataclass(frozen=True)
class PromptDataPath:
    """A data file or folder and a slice of its rows, as in `--prompt-data`.

    >>> PromptDataPath.parse("math.jsonl@[100:]")
    PromptDataPath(path=PosixPath('math.jsonl'), start=100, stop=None)
    """

    path: Path
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, text: str) -> PromptDataPath:
        """Split `file@[a:b]` into path and slice. Raises ConfigError for an invalid slice."""
        file, start, stop = split_slice(text)
        if "@[" in file:
            raise ConfigError(
                f"--prompt-data {text!r}: the suffix is not a slice; write file@[a:b], file@[a:] or file@[:b]"
            )
        return cls(Path(file), start, stop)

    @property
    def slice_text(self) -> str:
        """The slice as text, "[:]" for all rows."""
        return f"[{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}]"

    @property
    def kind(self) -> DataKind:
        """The format, from the suffix or the content of the folder. Raises DataError if it is unknown."""
        path = self.path
        if path.is_dir():
            if (path / "state.json").is_file():
                return "arrow"
            raise DataError(_folder_problem(path))
        if not path.is_file():
            raise DataError(f"no data at {path}: no such file or folder; check --prompt-data")
        if path.suffix in (".jsonl", ".ndjson"):
            return "jsonl"
        if path.suffix == ".parquet":
            return "parquet"
        raise DataError(
            f"{path}: unknown format {path.suffix!r}; "
            "use .jsonl, .parquet, or a folder written by datasets' save_to_disk"
        )

    def check_streamable(self) -> None:
        """Raise ConfigError for a slice that counts from the end, which a stream does not know."""
        if (self.start or 0) < 0 or (self.stop or 0) < 0:
            raise ConfigError(
                f"{self.path}@{self.slice_text}: a negative slice needs the number of rows, which is unknown for a "
                "stream; use non-negative bounds, or remove --streaming-data"
            )

    def files(self) -> list[Path]:
        """Return the files with rows, in row order."""
        return arrow_files(self.path) if self.kind == "arrow" else [self.path]

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies the data, not its path: size, hashes of the first and last MiB, and the slice."""
        files = self.files()
        head, tail = files[0], files[-1]
        with head.open("rb") as file:
            head_hash = xxhash.xxh3_128_hexdigest(file.read(HASHED_BYTES))
        with tail.open("rb") as file:
            file.seek(max(0, tail.stat().st_size - HASHED_BYTES))
            tail_hash = xxhash.xxh3_128_hexdigest(file.read(HASHED_BYTES))
        return {
            "size": sum(file.stat().st_size for file in files),
            "head": head_hash,
            "tail": tail_hash,
            "slice": self.slice_text,
        }


def arrow_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a save_to_disk folder, in row order. Raises DataError if one is missing."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    entries = state.get("_data_files")
    if not entries:
        raise DataError(f"{folder}/state.json lists no data files; save the dataset again with save_to_disk")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(f"{folder} has an indices mapping; call flatten_indices() on the dataset and save it again")
    files = [folder / entry["filename"] for entry in entries]
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(f"{folder}/state.json lists missing files: {missing}; copy the whole folder")
    return files


def _folder_problem(folder: Path) -> str:
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        return f"{folder} contains the splits {splits}; select one: {folder / (splits[0] if splits else 'train')}"
    inside = sorted(p.name for p in folder.iterdir())[:8]
    return (
        f"{folder} was not written by datasets' save_to_disk (no state.json; it contains {inside}); "
        "use a .jsonl or .parquet file, or write the folder with save_to_disk (pip install 'furlong[datasets]')"
    )


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


def open_reader(location: PromptDataPath, columns: list[str]) -> RowReader:
    """Open a data file; table formats decode only `columns`, if the file has them."""
    match location.kind:
        case "jsonl":
            return JsonLines(location.path)
        case "parquet":
            return ParquetRows(location.path, columns)
        case "arrow":
            return ArrowRows(location.path, location.files(), columns)


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

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on; `where` has the 1-based line."""
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


class ParquetRows:
    """A Parquet file, decoded one row group at a time."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.path, self.columns = path, columns
        meta = pq.read_metadata(path)
        size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
        self.num_rows: int | None = meta.num_rows
        self.row_bytes: int | None = size // max(1, meta.num_rows)

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on; earlier row groups are not read."""
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


class ArrowRows:
    """The memory-mapped Arrow stream files of a save_to_disk folder."""

    def __init__(self, path: Path, files: list[Path], columns: list[str]) -> None:
        self.path, self.files, self.columns = path, files, columns
        num_rows = sum(batch.num_rows for batch in self._batches())
        self.num_rows: int | None = num_rows
        self.row_bytes: int | None = sum(file.stat().st_size for file in files) // max(1, num_rows)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for path in self.files:
            with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
                yield from stream

    def read(self, cursor: Cursor) -> Iterator[RawRow]:
        """Yield rows from `cursor` on; earlier batches are mapped but not decoded."""
        first = 0
        for batch in self._batches():
            if first + batch.num_rows > cursor.row:
                batch_columns = batch.select(_present(self.columns, batch.schema.names))
                slices = (batch_columns.slice(i, BATCH_ROWS) for i in range(0, batch.num_rows, BATCH_ROWS))
                yield from _table_rows(self.path, slices, first, cursor.row)
            first += batch.num_rows


def _present(columns: list[str], names: list[str]) -> list[str]:
    """Return the columns that exist; all names if the first one (the prompt) is missing, for the error message."""
    return [name for name in columns if name in names] if columns[0] in names else names


def _table_rows(path: Path, batches: Any, first: int, skip_to: int) -> Iterator[RawRow]:
    row = first
    for batch in batches:
        end = row + batch.num_rows
        if end > skip_to:
            row = max(row, skip_to)
            for values in batch.slice(batch.num_rows - (end - row)).to_pylist():
                yield RawRow(
                    row,
                    f"{path} row {row}",
                    Cursor(row + 1),
                    {name: _without_nulls(value) for name, value in values.items()},
                )
                row += 1
        row = end


def _without_nulls(value: Any) -> Any:
    """Remove nulls inside a nested value: Arrow adds one for every key that another row of the column has."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: _without_nulls(item) for key, item in items if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[Any]", value)]
    return value
