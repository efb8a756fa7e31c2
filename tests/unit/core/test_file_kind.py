"""Folders, named pipes, devices and broken links where a file belongs: each reader names it, and none waits for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from furlong.core.file_kind import irregular_kind
from furlong.core.model_config import read_json
from furlong.data.prompt_path import PromptDataPath
from furlong.errors import CheckpointError, ConfigError, DataError
from furlong.files.checkpoint_folder import MANIFEST, TRACKER, find_checkpoint
from furlong.files.safetensors_header import read_header
from furlong.models.hf_folder import check_folder
from furlong.tracking.run_files import read_intact_rows, read_sections
from furlong.view.run_reader import TailedFile

KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (os.mkfifo, "a named pipe"),
    "folder": (Path.mkdir, "a folder"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "broken link": (lambda path: path.symlink_to("missing"), "a link to missing, which does not exist"),
    "loop": (lambda path: path.symlink_to(path.name), "a link to .*, which does not exist"),
}
READERS: dict[str, tuple[str, type[Exception], Callable[[Path], object]]] = {
    "configuration": ("config.json", ConfigError, read_json),
    "model folder": ("tokenizer.json", ConfigError, lambda path: check_folder(path.parent)),
    "chat template": ("chat_template.jinja", ConfigError, lambda path: check_folder(path.parent)),
    "shard": ("model-00001.safetensors", ConfigError, lambda path: check_folder(path.parent)),
    "header": ("a.safetensors", CheckpointError, read_header),
    "events": ("events.jsonl", DataError, lambda path: read_intact_rows(path, "event")),
    "run": ("config.json", ConfigError, lambda path: read_sections(path.parent)),
    "page": ("metrics.jsonl", DataError, lambda path: TailedFile(path, bool).new_rows()),
    "tracker": (TRACKER, CheckpointError, lambda path: find_checkpoint(path.parent, step=None, save_dir=None)),
    "manifest": (MANIFEST, CheckpointError, lambda path: find_checkpoint(path.parents[1], step=1, save_dir=None)),
}


def test_files_and_missing_files_are_regular(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    assert [irregular_kind(tmp_path / name) for name in ("file", "link", "missing")] == [None] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_names_what_is_not_a_file(tmp_path: Path, reader: str, kind: str) -> None:
    name, error, read = READERS[reader]
    make, words = KINDS[kind]
    path = tmp_path / "iter_0000001" / name
    path.parent.mkdir()
    make(path)
    if (reader, kind) in {("manifest", "broken link"), ("manifest", "loop")}:
        words = f"it has no {MANIFEST}"
    with pytest.raises(error, match=words) as caught:
        read(path)
    assert name in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "folder"])
def test_prompts_that_are_not_a_file_are_named(tmp_path: Path, kind: str) -> None:
    make, words = KINDS[kind]
    make(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=rf"a\.jsonl is {words}"):
        _ = PromptDataPath(tmp_path / "a.jsonl").kind
