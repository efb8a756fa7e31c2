from __future__ import annotations

import os
from pathlib import Path

import pytest

from furlong.core import files
from furlong.core.files import atomic_file, atomic_folder, write_atomically


def test_a_file_is_unchanged_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "file"
    for old, new in ((None, "first"), ("first", "second")):
        with atomic_file(path) as draft:
            draft.write_text(new)
            assert (path.read_text() if path.exists() else None) == old
        assert path.read_text() == new
        assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_failed_write_leaves_only_the_old_file(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(type(error)), atomic_file(path) as draft:  # noqa: PT012  the block is what is tried
        draft.write_text("ne")
        raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_first_error_is_raised(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic_file(tmp_path / "no-such-folder" / "file"):
        _ = 1 / 0


def test_a_file_is_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    seen: list[object] = []
    replace = os.replace
    monkeypatch.setattr(files, "sync_to_disk", lambda path: seen.append((path, path.name in os.listdir(tmp_path))))
    monkeypatch.setattr(files.os, "replace", lambda *paths: (seen.append("named"), replace(*paths)))
    write_atomically(tmp_path / "file", "text")
    (draft, was_there), named, (folder, _) = seen
    assert (draft.parent, was_there, named, folder) == (tmp_path, True, "named", tmp_path)
    assert draft.name != "file"


def fill(folder, text):
    with atomic_folder(folder) as draft:
        for name in "ab":
            (draft / name).write_text(text)


def test_a_folder_replaces_the_old_one(tmp_path):
    fill(tmp_path / "folder", "old")
    (tmp_path / "folder" / "c").write_text("old")
    fill(tmp_path / "folder", "new")
    assert os.listdir(tmp_path) == ["folder"]
    assert {path.name: path.read_text() for path in (tmp_path / "folder").iterdir()} == {"a": "new", "b": "new"}


@pytest.mark.parametrize("crash_at", range(1, 8))
def test_a_folder_is_never_incomplete(tmp_path, monkeypatch, crash_at):
    fill(tmp_path / "folder", "old")
    calls = 0

    def crashing(function):
        def call(*args):
            nonlocal calls
            calls += 1
            if calls == crash_at:
                raise KeyboardInterrupt
            return function(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_to_disk", crashing(files.sync_to_disk))
        patch.setattr(files.Path, "rename", crashing(Path.rename))
        try:
            fill(tmp_path / "folder", "new")
        except KeyboardInterrupt:
            there = {path.read_text() for path in (tmp_path / "folder").glob("*")}
            assert there == ({"old"} if crash_at <= 4 else set() if crash_at == 5 else {"new"})
        else:
            assert crash_at == 7
    fill(tmp_path / "folder", "again")
    assert os.listdir(tmp_path) == ["folder"]
    assert {path.read_text() for path in (tmp_path / "folder").iterdir()} == {"again"}


def test_symbolic_links_are_followed(tmp_path):
    for name, write in (("file", write_atomically), ("folder", fill)):
        (tmp_path / "elsewhere" / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(Path("elsewhere", name))
        for text in ("first", "second", "third"):
            write(tmp_path / name, text)
            path = tmp_path / name
            assert path.is_symlink()
            assert (path if path.is_file() else path / "a").read_text() == text
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "file", "folder"]
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["file", "folder"]


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(NotADirectoryError):
        fill(tmp_path / "folder", "text")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("folder", "a file")]


@pytest.mark.parametrize("name", ["folder.partial", "folder.replaced"])
def test_a_leftover_temporary_file_is_replaced(tmp_path, name):
    (tmp_path / name).write_text("a file")
    for text in ("first", "second"):
        fill(tmp_path / "folder", text)
        assert (tmp_path / "folder" / "a").read_text() == text
        assert os.listdir(tmp_path) == ["folder"]


def test_a_failed_rename_restores_the_old_folder(tmp_path, monkeypatch):
    fill(tmp_path / "folder", "old")
    rename = Path.rename

    def refuses(path, target):
        if path.name.endswith(files.PARTIAL):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(files.Path, "rename", refuses)
    with pytest.raises(OSError, match="Input/output error"):
        fill(tmp_path / "folder", "new")
    assert os.listdir(tmp_path) == ["folder"]
    assert (tmp_path / "folder" / "a").read_text() == "old"


def test_files_in_subfolders_are_synced(tmp_path, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(files, "sync_to_disk", lambda path: seen.append(path.name))
    with atomic_folder(tmp_path / "folder") as draft:
        (draft / "inside").mkdir()
        (draft / "inside" / "file").write_text("text")
    assert {"inside", "file"} < set(seen)
