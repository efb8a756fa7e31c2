"""The record of what a run stands on, and what is said about a difference."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from furlong.errors import CheckpointError, DataError
from furlong.files import run_inputs
from furlong.files.run_inputs import Change, InputFile, RunInput, RunInputs, flat_settings, read_inputs


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_inputs, "BLOCK_BYTES", 16)


def recorded(*inputs: RunInput) -> Any:
    """Return the record as a checkpoint contains it."""

    async def record() -> Any:
        return await reader.record()

    reader = RunInputs(inputs)
    reader.start()
    try:
        return json.loads(json.dumps(asyncio.run(record())))
    finally:
        reader.close()


def changes(saved: Any, *inputs: RunInput) -> list[Change]:
    async def compared() -> list[Change]:
        return await reader.changes(saved, [each.kind for each in inputs])

    reader = RunInputs(inputs)
    reader.start()
    try:
        return asyncio.run(compared())
    finally:
        reader.close()


def file_input(path: Path, **options: Any) -> RunInput:
    return RunInput("data", f"--prompt-data {path}", [InputFile(path, **options)])


def settings_input(**values: Any) -> RunInput:
    return RunInput("config", "--hf-checkpoint m", settings=lambda: values)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=80), st.binary(max_size=80))
def test_files_differ_exactly_if_their_bytes_do(tmp_path: Path, before: bytes, now: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(before)
    saved = recorded(file_input(path))
    path.write_bytes(now)
    assert bool(changes(saved, file_input(path))) == (before != now)


def test_a_change_is_reported_with_its_first_block_and_the_number_of_others(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"0123456789abcdef" * 5 + b"end")
    saved = recorded(file_input(path))
    path.write_bytes(b"0123456789abcdef" * 2 + b"X123456789abcdef" * 2 + b"0123456789abcdefend")

    def place(path: Path, first: int, last: int) -> str:
        return f"lines of {path.name} {first}-{last}"

    (change,) = changes(saved, file_input(path, place=place))
    assert change.kind == "data"
    assert "2 of 6 blocks" in change.text
    assert "block 2 (bytes 32 to 47, lines of a.jsonl 32-47)" in change.text


def test_a_longer_and_a_shorter_file_are_reported_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 40)
    saved = recorded(file_input(path))
    for size, block in ((41, 2), (20, 1)):
        path.write_bytes(b"x" * size)
        (change,) = changes(saved, file_input(path))
        assert f"its size was 40 bytes, is {size}" in change.text
        assert f"block {block} " in change.text


def test_a_file_that_was_moved_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 40)
    saved = recorded(file_input(tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "b")
    assert changes(saved, file_input(tmp_path / "b")) == []


def test_an_input_that_follows_its_path_is_compared_at_that_path_only(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").write_bytes(b"y")

    def reference(name: str) -> RunInput:
        return RunInput("reference", f"--ref-load {name}", [InputFile(tmp_path / name)], follows_path=True)

    saved = recorded(reference("a"))
    assert changes(saved, reference("b")) == []
    (tmp_path / "a").write_bytes(b"z")
    assert [change.kind for change in changes(saved, reference("a"))] == ["reference"]


def test_other_files_are_listed(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"x")

    def shards(names: Sequence[str]) -> RunInput:
        return RunInput("weights", "--hf-checkpoint m", [InputFile(tmp_path / name, name) for name in names])

    (change,) = changes(recorded(shards("ab")), shards("ba"))
    assert change.text == "--hf-checkpoint m: the files were a, b, are b, a"
    assert changes(recorded(shards("ab")), shards("abc"))


def test_changed_settings_are_reported_with_key_and_both_values() -> None:
    saved = recorded(settings_input(eps=1e-6, act="silu", ids=[1, 2]))
    assert changes(saved, settings_input(eps=1e-6, act="silu", ids=[1, 2])) == []
    (change,) = changes(saved, settings_input(eps=1e-5, act="silu", new=3))
    assert change.text == "--hf-checkpoint m: eps was 1e-06, is 1e-05; ids was [1, 2], is None; new was None, is 3"


def test_changed_text_is_reported_with_its_first_other_line() -> None:
    saved = recorded(settings_input(template="a\nb\nc"))
    (change,) = changes(saved, settings_input(template="a\nB\nc"))
    assert change.text.endswith("template, line 2, was 'b', is 'B'")
    (change,) = changes(saved, settings_input(template="a\nb"))
    assert change.text.endswith("template, line 3, was 'c', is None")


def test_inputs_that_only_one_side_has_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    assert changes(recorded(file_input(tmp_path / "a")), settings_input(eps=1)) == []


def test_a_file_that_is_deleted_before_it_is_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path / "a")):
        recorded(file_input(tmp_path / "a"))


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 40)
    fill = run_inputs._fill

    def changing_fill(opened: Any, buffer: memoryview) -> int:
        os.utime(path, ns=(0, 0))
        return fill(opened, buffer)

    monkeypatch.setattr(run_inputs, "_fill", changing_fill)
    with pytest.raises(DataError, match=f"{path} was modified"):
        recorded(file_input(path))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 9, "block_bytes": 16}', "[" * 3000])
def test_a_damaged_record_is_named(tmp_path: Path, content: str) -> None:
    assert read_inputs(tmp_path) is None
    (tmp_path / "inputs.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"inputs\.json"):
        read_inputs(tmp_path)


def test_settings_are_flattened_to_dotted_keys() -> None:
    assert list(flat_settings({"b": {"d": {}, "c": [1]}, "a": None})) == [("a", None), ("b.c", [1]), ("b.d", {})]
