"""Folders that processes of several machines write into: each has to see what the others write there."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from furlong.errors import ClusterError


@contextmanager
def marked(folders: Mapping[str, Path]) -> Generator[dict[str, Path]]:
    """Make these folders, and a file in each, which is there inside; both by the flag that names the folder.

    Raises ClusterError for one that cannot be written.
    """
    with ExitStack() as held:
        marks = dict[str, Path]()
        for flag, folder in folders.items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                mark = held.enter_context(tempfile.NamedTemporaryFile(prefix=".seen-", dir=folder.resolve()))
            except OSError as error:
                raise ClusterError(f"{flag}: cannot write into {folder}: {error}; give another folder") from error
            marks[flag] = Path(mark.name)
        yield marks


def not_shared(flag: str, folder: Path, who: str) -> ClusterError:
    """The error of a process that does not see the mark in a folder."""
    return ClusterError(
        f"{flag}: {who} does not see what the driver writes into {folder}, so no checkpoint would be whole; name a "
        "folder of a file system that all machines share, under the same path"
    )
