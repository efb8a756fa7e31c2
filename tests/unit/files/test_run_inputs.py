"""The record of what a run stands on, and what is said about a difference."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from furlong.errors import CheckpointError, DataError
from furlong.files.run_inputs import Change, RunInput, RunInputs, read_inputs


def with_reader(inputs: tuple[RunInput, ...], use: Any) -> Any:
    async def used() -> Any:
        return await use(reader)

    reader = RunInputs(inputs)
    reader.start()
    try:
        return asyncio.run(used())
    finally:
        reader.close()


def recorded(*inputs: RunInput) -> Any:
    """Return the record as a checkpoint contains it."""
    return json.loads(json.dumps(with_reader(inputs, lambda reader: reader.record())))


def changes(saved: Any, *inputs: RunInput) -> list[Change]:
    return with_reader(inputs, lambda reader: reader.changes(saved, [each.kind for each in inputs]))


def file_input(*paths: Path) -> RunInput:
    return RunInput("data", f"--prompt-data {paths[0]}", paths)


def settings_input(**values: Any) -> RunInput:
    return RunInput("config", "--hf-checkpoint m", settings=lambda: values)


def test_files_differ_exactly_if_their_bytes_or_their_order_do(tmp_path: Path) -> None:
    a, b, moved = (tmp_path / name for name in ("a", "b", "moved"))
    a.write_bytes(b"x" * 40)
    b.write_bytes(b"y")
    saved = recorded(file_input(a, b))
    assert changes(saved, file_input(a, b)) == []
    assert changes(saved, file_input(b, a))
    assert changes(saved, file_input(a))
    a.rename(moved)
    assert changes(saved, file_input(moved, b)) == []
    moved.write_bytes(b"x" * 20 + b"z" + b"x" * 19)
    (change,) = changes(saved, file_input(moved, b))
    assert str(change) == f"data: the content of --prompt-data {moved} (was --prompt-data {a}) differs"


def test_settings_differ_if_a_value_does() -> None:
    saved = recorded(settings_input(eps=1e-6, act="silu", ids=[1, 2]))
    assert changes(saved, settings_input(act="silu", eps=1e-6, ids=[1, 2])) == []
    (change,) = changes(saved, settings_input(eps=1e-5, act="silu", ids=[1, 2]))
    assert str(change) == "config: the content of --hf-checkpoint m differs"


def test_an_input_that_follows_its_path_is_compared_at_that_path_only(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").write_bytes(b"y")

    def reference(name: str) -> RunInput:
        return RunInput("reference", f"--ref-load {name}", [tmp_path / name], follows_path=True)

    saved = recorded(reference("a"))
    assert changes(saved, reference("b")) == []
    (tmp_path / "a").write_bytes(b"z")
    assert [change.kind for change in changes(saved, reference("a"))] == ["reference"]


def test_inputs_that_only_one_side_has_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    assert changes(recorded(file_input(tmp_path / "a")), settings_input(eps=1)) == []


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path / "a")):
        recorded(file_input(tmp_path / "a"))


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    assert read_inputs(tmp_path) is None
    for content in ("", "[]", '{"data": 1}', '{"data": {"source": "x"}}'):
        (tmp_path / "inputs.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"inputs\.json"):
            read_inputs(tmp_path)
