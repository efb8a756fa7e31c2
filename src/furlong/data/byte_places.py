"""Describe a range of bytes of a data file in terms of its rows, for messages about changed content."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from furlong.data.source_file import SourceFile
from furlong.errors import DataError

CHUNK_BYTES = 1 << 20


def rows_at(path: Path, first: int, last: int) -> str:
    """Return the lines or rows that have bytes from `first` to `last`; "" for a format without such positions."""
    try:
        if path.suffix in (".jsonl", ".ndjson"):
            return _lines_at(path, first, last)
        return _parquet_rows_at(path, first, last) if path.suffix == ".parquet" else ""
    except DataError:  # the changed file cannot be read, so the bytes alone are its place
        return ""


def _lines_at(path: Path, first: int, last: int) -> str:
    counts = [0, 0]  # line ends before the range, and in it
    with SourceFile(path).reading(), path.open("rb") as file:
        for index, size in enumerate((first, last - first)):
            while size > 0 and (chunk := file.read(min(CHUNK_BYTES, size))):
                counts[index] += chunk.count(b"\n")
                size -= len(chunk)
    return f"lines {counts[0] + 1} to {sum(counts) + 1}"


def _parquet_rows_at(path: Path, first: int, last: int) -> str:
    with SourceFile(path).reading():
        meta = pq.read_metadata(path)
        rows, row = list[tuple[int, int]](), 0
        for number in range(meta.num_row_groups):
            group = meta.row_group(number)
            chunks = [group.column(i) for i in range(group.num_columns)]
            start = min(chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks)
            end = start + sum(chunk.total_compressed_size for chunk in chunks)
            if start <= last and end > first:
                rows.append((row, row + group.num_rows - 1))
            row += group.num_rows
    return f"rows {rows[0][0]} to {rows[-1][1]}" if rows else "the footer"
