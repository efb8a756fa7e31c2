"""Files that are written beside their place and moved there whole: whoever reads finds the old content or the new."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

PARTIAL = ".partial"  # ends the name of what is not complete, or on its way out


@contextlib.contextmanager
def file_draft(path: Path) -> Generator[Path]:
    """A file to write, beside `path`, which takes its place once it is on the disk.

    Where it cannot be written `path` stays as it was, and the draft goes; a process that is killed leaves it.

        with file_draft(folder / "config.json") as draft:
            draft.write_text(text)
    """
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


def sync_to_disk(path: Path) -> None:
    """Force a file's or folder's content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
