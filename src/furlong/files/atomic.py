"""Atomic and deferred writes of files and folders, and file locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.files.checksums import leave_checksums
from furlong.files.verified_tensors import stored_places

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = ".partial"  # suffix of a file or folder that is incomplete, or is being deleted
REPLACED = ".replaced"  # suffix under which earlier versions kept the old folder during its replacement
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # from network file systems mounted without locks
LOCK = ".lock"  # in a workspace: locked while its writer runs


@contextlib.contextmanager
def atomic_file(path: Path) -> Generator[Path]:
    """Yield a temporary path, and rename what the body wrote there to `path` once it is synced to disk.

    A symbolic link is followed: its target is replaced. If the body or the rename fails, `path` is unchanged. Several
    writers of one `path` do not disturb each other: the last rename wins. The temporary path is in a folder of this
    writer next to `path`, which is deleted at the end; the next writer of `path` deletes those of killed processes.

        with atomic_file(folder / "config.json") as draft:
            draft.write_text(text)
    """
    path = path.resolve()
    with _workspace(path) as workspace:
        draft = workspace / path.name
        yield draft
        sync_to_disk(draft)
        os.replace(draft, path)
        sync_to_disk(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file with `atomic_file`."""
    with atomic_file(path) as draft:
        draft.write_text(text)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Generator[Path]:
    """Yield an empty folder, and rename it to `path` once its files are synced to disk.

    The old content of `path` is deleted; a symbolic link is followed. If the body or the rename fails, `path` is
    unchanged. After a kill, `path` is the old folder, the new one, or (between two renames) absent, but never
    incomplete. Several writers and leftovers are handled as in `atomic_file`. Raises NotADirectoryError if `path` is a
    file.
    """
    path = path.resolve()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "cannot replace a file with a folder", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _workspace(path) as workspace:
        draft, replaced = workspace / path.name, workspace / f"{path.name}{REPLACED}"
        draft.mkdir()
        yield draft
        sync_files(draft)
        if path.exists():
            path.rename(replaced)
        try:
            draft.rename(path)
        except OSError:
            with contextlib.suppress(OSError):  # keep the first error
                replaced.rename(path)
            raise
        sync_to_disk(path.parent)
    _delete_leftovers(path)  # the old folder, if a kill had left it as the only one


@contextlib.contextmanager
def _workspace(path: Path) -> Generator[Path]:
    """Yield a new folder `NAME.xxxxxxxx.partial` next to `path`, which only this writer uses; delete it at the end.

    Deletes the folders of killed writers first. A lock on a file in it, which ends with the process, shows that its
    writer runs; where locks do not work, leftovers remain.
    """
    _delete_leftovers(path)
    folder, lock = _create_workspace(path)
    try:
        yield folder
    finally:
        _delete_workspace(folder, path)
        os.close(lock)


def _create_workspace(path: Path) -> tuple[Path, int]:
    """Create and lock a workspace. Another writer may delete it before it is locked; then it is created again."""
    while True:
        folder = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        folder.mkdir()
        try:
            lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(lock)
                raise
        if (folder / LOCK).exists():
            return folder, lock
        os.close(lock)


def _delete_leftovers(path: Path) -> None:
    """Delete workspaces of `path` whose writer has ended, and temporary files of earlier versions."""
    _delete(path.with_name(path.name + PARTIAL))
    if path.exists():
        _delete(path.with_name(path.name + REPLACED))
    for folder in path.parent.glob(f"{glob.escape(path.name)}.????????{PARTIAL}"):
        with contextlib.suppress(OSError):  # in use, deleted by another writer, or not ours to delete
            if not (folder / LOCK).exists():
                folder.rmdir()  # killed before it was locked, or its writer is about to lock it
                continue
            with (folder / LOCK).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete_workspace(folder, path)


def _delete_workspace(folder: Path, path: Path) -> None:
    """Delete a workspace, unless it contains the only copy of the old `path`."""
    if path.exists() or not (folder / f"{path.name}{REPLACED}").exists():
        _delete(folder)


def _delete(path: Path) -> None:
    """Delete a file or folder if it exists. An entry that cannot be deleted makes the next operation on it fail."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def sync_files(folder: Path) -> None:
    """Flush a folder and everything in it to disk."""
    for path in (*sorted(folder.rglob("*")), folder):
        sync_to_disk(path)


def sync_to_disk(path: Path) -> None:
    """Flush the content of a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock on the file; False if it does not exist or cannot be locked."""
    if not path.is_file():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    return False


class PendingFiles:
    """A queue of file writes, whose content is kept in host memory until then. One thread adds, then one writes."""

    def __init__(self) -> None:
        self._writes = deque[Callable[[], object]]()

    def add_tensors(self, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        """Queue a safetensors file. The tensors are not copied: pass copies made by `host_copy`."""
        self._writes.append(partial(save_tensors, path, dict(tensors), metadata))

    def add_text(self, path: Path, text: str) -> None:
        """Queue a text file."""
        self._writes.append(partial(path.write_text, text))

    def add(self, write: Callable[[], object]) -> None:
        """Queue a function that writes files; it returns once they are written, or raises."""
        self._writes.append(write)

    def write(self) -> None:
        """Write all files, and release each one once it is written. Raises OSError or SafetensorError."""
        while self._writes:
            self._writes.popleft()()


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file and leave its checksums for the manifest. Raises OSError or SafetensorError."""
    from safetensors.torch import save_file  # imports torch

    save_file(tensors, path, metadata)
    leave_checksums(path, stored_places(path))
