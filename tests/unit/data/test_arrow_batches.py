from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from furlong.data.arrow_batches import count_rows

OPTIONS = {
    "plain": None,
    "compressed": pa.ipc.IpcWriteOptions(compression="zstd"),
    "before 0.15": pa.ipc.IpcWriteOptions(use_legacy_format=True),
}


def write(path: Path, options: pa.ipc.IpcWriteOptions | None = None) -> bytes:
    table = pa.table({"n": range(50), "text": ["x" * n for n in range(50)]})
    table = table.append_column("same", pa.array(["a", "b"] * 25).dictionary_encode())
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table, max_chunksize=7)
    return path.read_bytes()


def count(path: Path) -> int:
    with path.open("rb") as file:
        return count_rows(file)


@pytest.mark.parametrize("kind", OPTIONS)
def test_rows_of_all_batches_are_counted(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "x.arrow", OPTIONS[kind])
    assert count(tmp_path / "x.arrow") == 50


@pytest.mark.slow
def test_a_damaged_or_cut_file_is_a_value_error_or_a_count(tmp_path: Path) -> None:
    path, draw = tmp_path / "x.arrow", random.Random(0)
    content = write(path)
    refused = 0
    for number in range(300):
        changed = bytearray(content)
        changed[draw.randrange(len(changed))] ^= draw.randrange(1, 256)
        path.write_bytes(changed[: draw.randrange(len(changed))] if number % 2 else changed)
        try:
            assert count(path) >= 0
        except ValueError:
            refused += 1
    assert refused > 100
