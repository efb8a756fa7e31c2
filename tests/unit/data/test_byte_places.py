from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from furlong.data.byte_places import rows_at


def test_bytes_of_json_lines_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"aaaa\nbbbb\ncccc\ndddd\n")
    assert rows_at(path, 0, 3) == "lines 1 to 1"
    assert rows_at(path, 5, 12) == "lines 2 to 3"


def test_bytes_of_parquet_are_named_by_the_rows_of_their_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": range(40), "b": range(40)}), path, row_group_size=10)
    meta = pq.read_metadata(path)
    chunk = meta.row_group(2).column(1)
    place = chunk.dictionary_page_offset or chunk.data_page_offset
    assert rows_at(path, place + 1, place + 2) == "rows 20 to 29"
    assert rows_at(path, place + 1, path.stat().st_size) == "rows 20 to 39"
    assert rows_at(path, path.stat().st_size - 9, path.stat().st_size) == "the footer"


def test_other_formats_and_damaged_files_have_no_place(tmp_path: Path) -> None:
    for name in ("a.arrow", "a.parquet"):
        (tmp_path / name).write_bytes(b"damaged")
        assert rows_at(tmp_path / name, 0, 3) == ""
