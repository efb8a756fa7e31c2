"""Atomic and deferred writes of files and folders, and file locks."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.files.manifest import leave_checksum

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = ".partial"  # suffix of a file or folder that is incomplete, or is being deleted
REPLACED = f".replaced{PARTIAL}"  # suffix of the old folder while the new one takes its place
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # from network file systems mounted without locks


@contextmanager
def atomic_file(path: Path) -> Generator[Path]:
    """Yield a temporary path, and rename what the body wrote there to `path` once it is synced to disk.

    A symbolic link is followed: its target is replaced. If the body or the rename fails, `path` is unchanged. Of
    several writers of one `path`, the last rename wins.

        with atomic_file(folder / "config.json") as draft:
            draft.write_text(text)
    """
    path = path.resolve()
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        yield draft
        sync_to_disk(draft)
        os.replace(draft, path)
        sync_to_disk(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a small text file with `atomic_file`."""
    with atomic_file(path) as draft:
        draft.write_text(text)


@contextmanager
def atomic_folder(path: Path) -> Generator[Path]:
    """Yield an empty folder, and rename it to `path` once its files are synced to disk. One writer at a time.

    The old content of `path` is deleted; a symbolic link is followed. If the body or the rename fails, `path` is
    unchanged. After a kill, `path` is the old folder, the new one, or (between two renames) absent, but never
    incomplete; the next writer deletes what was left. Raises NotADirectoryError if `path` is a file.
    """
    path = path.resolve()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "cannot replace a file with a folder", str(path))
    draft, replaced = path.with_name(path.name + PARTIAL), path.with_name(path.name + REPLACED)
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    try:
        yield draft
        sync_files(draft)
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            path.rename(replaced)
        try:
            draft.rename(path)
        except OSError:
            with suppress(OSError):  # keep the first error
                replaced.rename(path)
            raise
        sync_to_disk(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


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


def save_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None, *, for_manifest: bool = True
) -> None:
    """Write a safetensors file, and leave its checksum for the manifest. Raises OSError or SafetensorError."""
    from safetensors.torch import save_file  # imports torch

    save_file(tensors, path, metadata)
    if for_manifest:
        leave_checksum(path)
