from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from furlong.files import atomic as files
from furlong.files.atomic import atomic_file, atomic_folder, write_atomically


def fill(folder, text):
    with atomic_folder(folder) as draft:
        for name in "ab":
            (draft / name).write_text(text)


def test_a_file_is_unchanged_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "file"
    for old, new in ((None, "first"), ("first", "second")):
        with atomic_file(path) as draft:
            draft.write_text(new)
            assert (path.read_text() if path.exists() else None) == old
        assert path.read_text() == new
        assert os.listdir(tmp_path) == ["file"]


def test_a_failed_write_leaves_only_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with pytest.raises(type(error)), atomic_file(path) as draft:  # noqa: PT012  the block is what is tried
            draft.write_text("ne")
            raise error
    with pytest.raises(FileNotFoundError), atomic_file(path):
        pass  # writes nothing
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_two_writers_of_one_file_do_not_share_a_draft(tmp_path):
    path = tmp_path / "file"
    with atomic_file(path) as slow:
        slow.write_text("slow")
        write_atomically(path, "quick")
        assert (path.read_text(), slow.read_text()) == ("quick", "slow")
    assert path.read_text() == "slow"


def test_a_file_is_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    seen: list[object] = []
    replace = os.replace
    monkeypatch.setattr(files, "sync_to_disk", lambda path: seen.append((path, path.exists())))
    monkeypatch.setattr(files.os, "replace", lambda *paths: (seen.append("named"), replace(*paths)))
    write_atomically(tmp_path / "file", "text")
    (draft, was_there), named, (folder, _) = seen
    assert (was_there, named, folder, draft.parent) == (True, "named", tmp_path, tmp_path)


def test_a_folder_replaces_the_old_one_once_its_files_are_synced(tmp_path, monkeypatch):
    fill(tmp_path / "folder", "old")
    (tmp_path / "folder" / "c").write_text("old")
    seen: list[str] = []
    monkeypatch.setattr(files, "sync_to_disk", lambda path: seen.append(path.name))
    with atomic_folder(tmp_path / "folder") as draft:
        (draft / "inside").mkdir()
        (draft / "inside" / "file").write_text("new")
    assert {"inside", "file"} < set(seen)
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == ["inside"]


def test_a_folder_is_never_incomplete(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def crashing(function, crash_at, calls):
        def call(*args):
            calls.append(args)
            if len(calls) == crash_at:
                raise Killed
            return function(*args)

        return call

    for crash_at in range(1, 7):
        folder = tmp_path / str(crash_at) / "folder"
        fill(folder, "old")
        with monkeypatch.context() as patch:
            calls: list[object] = []
            patch.setattr(files, "sync_to_disk", crashing(files.sync_to_disk, crash_at, calls))
            patch.setattr(files.Path, "rename", crashing(Path.rename, crash_at, calls))
            patch.setattr(files.shutil, "rmtree", lambda *_, **__: None)  # as after a kill
            with pytest.raises(Killed):
                fill(folder, "new")
        there = {path.read_text() for path in folder.glob("*")}
        assert there == ({"old"} if crash_at <= 4 else set() if crash_at == 5 else {"new"})
        fill(folder, "again")
        assert os.listdir(folder.parent) == ["folder"]
        assert {path.read_text() for path in folder.iterdir()} == {"again"}


def test_a_failed_rename_restores_the_old_folder(tmp_path, monkeypatch):
    fill(tmp_path / "folder", "old")
    rename = Path.rename

    def refuses(path, target):
        if path.name == f"folder{files.PARTIAL}":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(files.Path, "rename", refuses)
    with pytest.raises(OSError, match="Input/output error"):
        fill(tmp_path / "folder", "new")
    assert os.listdir(tmp_path) == ["folder"]
    assert (tmp_path / "folder" / "a").read_text() == "old"


def test_symbolic_links_are_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for name, write in (("file", write_atomically), ("folder", fill)):
        path = tmp_path / name
        path.symlink_to(Path("elsewhere", name))
        for text in ("first", "second"):
            write(path, text)
            assert path.is_symlink()
            assert (path if path.is_file() else path / "a").read_text() == text
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["file", "folder"]


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(NotADirectoryError):
        fill(tmp_path / "folder", "text")
    assert (tmp_path / "folder").read_text() == "a file"


def test_the_next_writer_of_a_folder_deletes_the_leftovers_of_a_killed_one(tmp_path):
    killed = """
import os, signal, sys
from pathlib import Path
from furlong.files.atomic import atomic_folder
with atomic_folder(Path(sys.argv[1])) as draft:
    (draft / "a").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "name [1]"
    assert subprocess.run([sys.executable, "-c", killed, str(path)], check=False).returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == [f"{path.name}{files.PARTIAL}"]
    fill(path, "text")
    assert os.listdir(tmp_path) == [path.name]
