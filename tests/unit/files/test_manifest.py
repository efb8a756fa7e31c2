from __future__ import annotations

import os

import pytest

from furlong.errors import CheckpointError
from furlong.files.checkpoint_folder import MANIFEST, find_checkpoint, read_state
from furlong.files.manifest import (
    changed_files,
    file_checksum,
    files_checked,
    leave_checksum,
    missing_or_cut,
    read_manifest,
    write_manifest,
)

LARGE, SMALL = "trainer/weights", "trainer/meta.json"


def write(save, step):
    folder = save / f"iter_{step:07d}"
    (folder / "trainer").mkdir(parents=True)
    (folder / LARGE).write_bytes(bytes([step]) * 3_000_000)
    leave_checksum(folder / LARGE)
    (folder / SMALL).write_text("{}")
    (folder / "state.json").write_text("{}")
    write_manifest(folder, step)
    return folder


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_manifest_has_size_and_checksum_of_every_file_and_takes_those_that_were_left(tmp_path):
    folder = write(tmp_path, 3)
    files = read_manifest(folder)
    assert files == {n: ((folder / n).stat().st_size, file_checksum(folder / n)) for n in (LARGE, SMALL, "state.json")}
    assert {p.name for p in (folder / "trainer").iterdir()} == {"weights", "meta.json"}
    assert changed_files(folder) == missing_or_cut(folder) == []


def test_a_file_that_changed_is_named_when_it_is_loaded(tmp_path):
    folder = write(tmp_path, 6)
    for name in (LARGE, SMALL):
        flip(folder / name, -1)
        with files_checked(folder, ["state.json", "unlisted"]):
            pass
        with pytest.raises(CheckpointError, match=rf"iter_0000006/{name} was changed"), files_checked(folder, [name]):
            pass
    assert [changed.split()[0] for changed in changed_files(folder)] == [str(folder / SMALL), str(folder / LARGE)]


def test_a_changed_state_is_refused_with_the_newest_intact_checkpoint_before_it(tmp_path):
    write(tmp_path, 2)
    flip(write(tmp_path, 4) / LARGE, 0)
    folder = write(tmp_path, 6)
    flip(folder / "state.json", 0)
    with pytest.raises(CheckpointError, match=r"iter_0000006/state\.json was changed.*--ckpt-step 2$"):
        read_state(folder)


def test_damage_explains_an_exception_that_it_causes(tmp_path):
    folder = write(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), files_checked(folder, [LARGE]):
        raise ZeroDivisionError
    flip(folder / LARGE, 5)
    with pytest.raises(CheckpointError, match="weights"), files_checked(folder, [LARGE]):
        raise ZeroDivisionError


def test_missing_and_cut_files_are_named_with_both_sizes(tmp_path):
    folder = write(tmp_path, 1)
    os.truncate(folder / LARGE, 7)
    (folder / SMALL).unlink()
    with pytest.raises(CheckpointError, match=r"meta\.json is missing.*weights has 7 bytes, expected 3000000"):
        find_checkpoint(tmp_path, step=1, save_dir=None)


def test_a_damaged_manifest_is_named(tmp_path):
    folder = write(tmp_path, 1)
    for text in (
        "",
        "[]",
        "1",
        "{}",
        '{"format": 1}',
        '{"format": 1, "files": {"x": 1}}',
        '{"format": 3, "files": {}}',
    ):
        (folder / MANIFEST).write_text(text)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(folder)
