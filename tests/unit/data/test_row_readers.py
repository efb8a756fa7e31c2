from __future__ import annotations

from pathlib import Path

import pytest

from data_zoo import numbered_rows, write_jsonl
from furlong.data.prompt_path import PromptDataPath
from furlong.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("text", "path", "start", "stop"),
    [
        ("a.jsonl", "a.jsonl", None, None),
        ("a.jsonl@[1:2]", "a.jsonl", 1, 2),
        ("a@b.jsonl@[:-3]", "a@b.jsonl", None, -3),
        ("a.jsonl@[-5:]", "a.jsonl", -5, None),
        ("a.jsonl@[:]", "a.jsonl", None, None),
    ],
)
def test_a_slice_suffix_is_split_from_the_path(text: str, path: str, start: int | None, stop: int | None) -> None:
    assert PromptDataPath.parse(text) == PromptDataPath(Path(path), start, stop)


def test_an_invalid_slice_is_rejected() -> None:
    for text in ["a.jsonl@[1:2:3]", "a.jsonl@[x:]", "a.jsonl@[1:2", "a.jsonl@[5]", "a.jsonl@[-:2]"]:
        with pytest.raises(ConfigError, match="is not a slice"):
            PromptDataPath.parse(text)


def test_missing_and_unknown_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: no such file"):
        _ = PromptDataPath(tmp_path / "nowhere.jsonl").kind
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(DataError, match="write it to a file"):
        _ = PromptDataPath(Path("/dev/null")).kind
    with pytest.raises(DataError, match=r"'\.csv'"):
        _ = PromptDataPath(tmp_path / "a.csv").kind
    with pytest.raises(DataError, match="not written by datasets"):
        _ = PromptDataPath(tmp_path).kind


def test_a_folder_of_splits_is_rejected_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"splits \['train', 'test'\]; .*/train"):
        _ = PromptDataPath(tmp_path).kind


def test_fingerprint_covers_content_and_slice_but_not_the_path(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", numbered_rows(5))
    b = write_jsonl(tmp_path / "b.jsonl", numbered_rows(5))
    c = write_jsonl(tmp_path / "c.jsonl", [*numbered_rows(4), {"input": "xxxx5", "label": "4", "metadata": {"n": [4]}}])
    assert PromptDataPath(a).fingerprint() == PromptDataPath(b).fingerprint()
    assert PromptDataPath(a).fingerprint()["size"] == PromptDataPath(c).fingerprint()["size"]
    assert PromptDataPath(a).fingerprint() != PromptDataPath(c).fingerprint()
    assert PromptDataPath(a).fingerprint() != PromptDataPath(a, stop=3).fingerprint()
