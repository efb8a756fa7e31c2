"""Whatever the bytes of a data file are, reading it gives rows or an error that names the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_zoo import chat_tokenizer, numbered_rows, write_jsonl
from furlong.data.dataset import open_prompts, open_reader
from furlong.data.prompt import PromptFormat
from furlong.data.prompt_path import PromptDataPath
from furlong.data.row_readers import Cursor
from furlong.data.source import RolloutDataSource
from furlong.data.tokenized import write_tokenized
from furlong.errors import ConfigError, DataError

FORM = PromptFormat(label_key="label", metadata_key="metadata")
ROWS = numbered_rows(40)
TABLE = pa.table(
    {
        "input": [row["input"] for row in ROWS],
        "label": [row["label"] for row in ROWS],
        "metadata": [row["metadata"] for row in ROWS],
    }
)


def write_parquet(folder: Path, **options: Any) -> Path:
    pq.write_table(TABLE, folder / "a.parquet", row_group_size=16, **options)
    return folder / "a.parquet"


def write_arrow(folder: Path) -> Path:
    """Write a folder as datasets' save_to_disk does; return its data file."""
    file = folder / "data-00000-of-00001.arrow"
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, TABLE.schema) as out:
        out.write_table(TABLE, max_chunksize=16)
    files = {"_data_files": [{"filename": file.name}], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(files))
    return file


WRITERS: dict[str, Callable[[Path], Path]] = {
    "jsonl": lambda folder: write_jsonl(folder / "a.jsonl", ROWS),
    "parquet": write_parquet,
    "parquet with page checksums": lambda folder: write_parquet(folder, write_page_checksum=True, compression="none"),
    "arrow": write_arrow,
    "state.json": lambda folder: write_arrow(folder).with_name("state.json"),
}


def prompts_of(file: Path, streaming: bool = False) -> list[Any]:
    path = file if file.suffix in (".jsonl", ".parquet") else file.parent
    prompts = open_prompts(str(path), tokenizer=None, prompt_format=FORM, streaming=streaming)
    prompts.begin(None)
    return [(prompt.text, prompt.label, prompt.metadata) for prompt in prompts.take(1000)]


def outcome(file: Path, streaming: bool = False) -> tuple[list[Any] | None, str]:
    """Return the rows of a file, or None and the error that refuses it."""
    try:
        return prompts_of(file, streaming), ""
    except (DataError, ConfigError) as error:
        return None, str(error)


def test_a_file_that_is_cut_empty_or_something_else_is_named(tmp_path: Path) -> None:
    for kind, write in WRITERS.items():
        for streaming in (False, True):
            file = write(tmp_path)
            content = file.read_bytes()
            for damage in (b"", content[: len(content) // 2], b"{[" * 100):
                file.write_bytes(damage)
                rows, problem = outcome(file, streaming)
                is_rows = kind == "jsonl" and streaming is False and rows
                assert str(file.parent) in problem or is_rows, (kind, damage[:9])


def test_tokenized_files_have_page_checksums_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    tokenizer, file = chat_tokenizer(), tmp_path / "tokens.parquet"
    location = PromptDataPath(write_jsonl(tmp_path / "a.jsonl", ROWS))
    write_tokenized(location, open_reader(location, FORM), file, tokenizer=tokenizer, prompt_format=FORM)
    chunk = pq.read_metadata(file).row_group(0).column(3)
    content = bytearray(file.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"tokens\.parquet, row group 0, cannot be read"):
        open_prompts(str(file), tokenizer=tokenizer, prompt_format=FORM)


def test_damaged_offsets_of_an_arrow_file_are_an_error(tmp_path: Path) -> None:
    file = write_arrow(tmp_path)
    content = file.read_bytes()
    offsets = b"".join(n.to_bytes(4, "little") for n in (0, 1, 3, 6, 10))  # of "0", "x1", "xx2", "xxx3"
    place = content.index(offsets)
    file.write_bytes(content[: place + 4] + b"\0\0\0\x7f" + content[place + 8 :])
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow cannot be read"):
        prompts_of(file)


def test_a_damaged_state_json_of_an_arrow_folder_is_named(tmp_path: Path) -> None:
    file = write_arrow(tmp_path)
    entries = ("[]", "[1]", '[{"filename": 1}]', '[{"filename": "no.arrow"}]')
    for content in ("", "[]", *(f'{{"_data_files": {each}}}' for each in entries)):
        file.with_name("state.json").write_text(content)
        with pytest.raises(DataError, match=r"state\.json"):
            prompts_of(file)


def streamed(file: Path) -> RolloutDataSource:
    path = file if file.suffix in (".jsonl", ".parquet") else file.parent
    prompts = open_prompts(str(path), tokenizer=None, prompt_format=FORM, streaming=True, shuffle_buffer_size=4)
    return RolloutDataSource(prompts)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 3)


def extend(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b'{"input": "more", "label": "1"}\n')


def rewrite(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9] + b"\n" * 9)
    os.utime(file, ns=(0, 0))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("change", [cut, extend, rewrite, Path.unlink])
def test_a_file_that_changes_while_a_run_streams_it_is_an_error(
    kind: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    file = WRITERS[kind](tmp_path)
    source = streamed(file)
    source.next_groups(2)
    change(file)
    with pytest.raises(DataError, match=str(file)):
        source.next_groups(100)


def test_an_undamaged_file_of_each_format_has_the_same_rows(tmp_path: Path) -> None:
    rows = [prompts_of(WRITERS[kind](tmp_path), streaming) for kind in list(WRITERS)[:4] for streaming in (True, False)]
    assert rows == [rows[0]] * len(rows)
    assert len(rows[0]) == len(ROWS)


def test_reading_starts_at_any_row(tmp_path: Path) -> None:
    for kind in ["jsonl", "parquet", "arrow"]:
        file = WRITERS[kind](tmp_path)
        reader = open_reader(PromptDataPath(file if kind != "arrow" else file.parent), FORM)
        rows = list(reader.read(Cursor()))
        for start in (0, 1, 15, 16, 17, 39):
            cursor = rows[start - 1].after if start else Cursor()
            assert list(reader.read(cursor)) == rows[start:]
