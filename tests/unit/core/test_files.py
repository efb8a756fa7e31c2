from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from furlong.files import atomic as files
from furlong.files.atomic import atomic_file, atomic_folder, write_atomically


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
    (tmp_path / "folder").mkdir()
    with pytest.raises(ZeroDivisionError), atomic_file(tmp_path / "folder" / "file"):  # noqa: PT012  as above
        shutil.rmtree(tmp_path / "folder")
        _ = 1 / 0


def test_a_body_that_writes_nothing_is_an_error(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_two_writers_of_one_file_do_not_share_a_draft(tmp_path):
    path = tmp_path / "file"
    with atomic_file(path) as slow:
        slow.write_text("slow, first half")
        with atomic_file(path) as quick:
            assert quick != slow
            quick.write_text("quick")
        assert path.read_text() == "quick"
        assert slow.read_text() == "slow, first half"
        slow.write_text("slow")
    assert path.read_text() == "slow"
    assert os.listdir(tmp_path) == ["file"]


def test_two_writers_of_one_folder_do_not_mix_their_files(tmp_path):
    with atomic_folder(tmp_path / "folder") as slow:
        (slow / "slow").write_text("1")
        fill(tmp_path / "folder", "quick")
        assert sorted(os.listdir(tmp_path / "folder")) == ["a", "b"]
        assert os.listdir(slow) == ["slow"]
    assert os.listdir(tmp_path / "folder") == ["slow"]
    assert os.listdir(tmp_path) == ["folder"]


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from furlong.files import atomic as files
with getattr(files, sys.argv[1])(Path(sys.argv[2])) as draft:
    (draft / "a" if draft.is_dir() else draft).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["atomic_file", "atomic_folder"])
def test_the_next_writer_deletes_the_leftovers_of_a_killed_one(tmp_path, writer):
    path = tmp_path / "name [1]"
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", KILLED_WRITER, writer, str(path)], check=False)
        assert killed.returncode == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()  # the second writer deleted that of the first
    assert leftover.name.endswith(files.PARTIAL)
    (tmp_path / f"other{leftover.name.removeprefix(path.name)}").mkdir()  # of another file
    write_atomically(path, "text") if writer == "atomic_file" else fill(path, "text")
    assert sorted(entry.name for entry in tmp_path.iterdir())[0] == path.name
    assert len(list(tmp_path.iterdir())) == 2


def test_a_workspace_that_is_not_locked_yet_may_be_taken_away(tmp_path, monkeypatch):
    taken: list[Path] = []
    mkdir = Path.mkdir

    def lost(folder, *args, **options):
        mkdir(folder, *args, **options)
        if not taken:
            taken.append(folder)
            files._delete_leftovers(tmp_path / "file")  # another writer, at that moment

    monkeypatch.setattr(files.Path, "mkdir", lost)
    write_atomically(tmp_path / "file", "text")
    assert taken
    assert (tmp_path / "file").read_text() == "text"
    assert os.listdir(tmp_path) == ["file"]


def test_without_locks_no_workspace_of_others_is_deleted(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuses)
    with atomic_file(tmp_path / "file") as slow:
        slow.write_text("slow")
        write_atomically(tmp_path / "file", "quick")
        assert slow.read_text() == "slow"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_is_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    seen: list[object] = []
    replace = os.replace
    monkeypatch.setattr(files, "sync_to_disk", lambda path: seen.append((path, path.exists())))
    monkeypatch.setattr(files.os, "replace", lambda *paths: (seen.append("named"), replace(*paths)))
    write_atomically(tmp_path / "file", "text")
    (draft, was_there), named, (folder, _) = seen
    assert (was_there, named, folder) == (True, "named", tmp_path)
    assert draft.parent.parent == tmp_path


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
        if path.parent.name.endswith(files.PARTIAL) and not path.name.endswith(files.REPLACED):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(files.Path, "rename", refuses)
    with pytest.raises(OSError, match="Input/output error"):
        fill(tmp_path / "folder", "new")
    assert os.listdir(tmp_path) == ["folder"]
    assert (tmp_path / "folder" / "a").read_text() == "old"


def test_the_only_copy_of_the_old_folder_is_kept(tmp_path, monkeypatch):
    fill(tmp_path / "folder", "old")
    rename = Path.rename

    def breaks(path, target):
        if path.name != "folder" or path.parent != tmp_path:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(files.Path, "rename", breaks)
        with pytest.raises(OSError, match="Input/output error"):
            fill(tmp_path / "folder", "new")
    (workspace,) = tmp_path.iterdir()
    assert (workspace / "folder.replaced" / "a").read_text() == "old"
    fill(tmp_path / "folder", "again")
    assert os.listdir(tmp_path) == ["folder"]


def test_files_in_subfolders_are_synced(tmp_path, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(files, "sync_to_disk", lambda path: seen.append(path.name))
    with atomic_folder(tmp_path / "folder") as draft:
        (draft / "inside").mkdir()
        (draft / "inside" / "file").write_text("text")
    assert {"inside", "file"} < set(seen)
