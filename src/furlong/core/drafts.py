"""Files and folders that are written beside their place and moved there whole: no reader finds a part of one."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Generator
from pathlib import Path

PARTIAL = ".partial"  # ends the name of what is not complete, or on its way out
REPLACED = ".replaced"  # ends the name of a folder from when it gives up its place until it is deleted


@contextlib.contextmanager
def file_draft(path: Path) -> Generator[Path]:
    """A file to write, beside `path`, which takes its place once it is on the disk; of a link, that of what it names.

    Where it cannot be written `path` stays as it was, and the draft goes; a process that is killed leaves it.

        with file_draft(folder / "config.json") as draft:
            draft.write_text(text)
    """
    path = path.resolve()
    draft = path.with_name(path.name + PARTIAL)
    try:
        yield draft
        sync_to_disk(draft)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):  # of a disk that takes nothing: what is raised is what was wrong first
            draft.unlink()
        raise
    sync_to_disk(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file by a draft."""
    with file_draft(path) as draft:
        draft.write_text(text)


@contextlib.contextmanager
def folder_draft(path: Path) -> Generator[Path]:
    """An empty folder to fill, beside `path`, which takes its place once it is on the disk; what was there is deleted.

    Of a link it takes the place of what that names. Where it cannot be filled, or moved there, `path` stays as it was,
    and the draft goes. A kill leaves the old folder, the new one, or for the moment between two renames neither: never
    a part. Raises NotADirectoryError for a file, which stays.
    """
    path = path.resolve()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is where a folder is to be", str(path))
    draft, replaced = path.with_name(path.name + PARTIAL), path.with_name(path.name + REPLACED)
    _delete(draft)
    draft.mkdir(parents=True)
    try:
        yield draft
        sync_files(draft)
        _delete(replaced)
        if path.exists():
            path.rename(replaced)
        try:
            draft.rename(path)
        except OSError:
            with contextlib.suppress(OSError):  # what is raised is what was wrong first
                replaced.rename(path)
            raise
        sync_to_disk(path.parent)
        _delete(replaced)
    finally:
        _delete(draft)


def _delete(path: Path) -> None:
    """Delete a file or a folder, if it is there; what cannot be deleted is in the way of what comes next."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def sync_files(folder: Path) -> None:
    """Force a folder and all that is in it to the disk."""
    for path in (*sorted(folder.rglob("*")), folder):
        sync_to_disk(path)


def sync_to_disk(path: Path) -> None:
    """Force a file's or folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
