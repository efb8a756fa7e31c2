"""xxh3-128 checksums of files, against content that changes after it was written.

A checkpoint's manifest holds the checksum of every file, and those of the blocks of tensor files. A rank that writes a
large file computes its checksums at once, while the content is in the page cache, and leaves them in a file next to it
(`leave_checksums`); the manifest takes them from there (`take_checksums`), so that no process reads all files of all
ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import xxhash

CHUNK_BYTES = 1 << 20
SMALL_BYTES = 1 << 20  # files up to this size are checked before anything is loaded
MAX_THREADS = 8
SUFFIX = ".xxh3"


def file_checksum(path: Path) -> str:
    """Return the xxh3-128 checksum of a file, as 32 hexadecimal digits. Raises OSError."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def leave_checksums(path: Path, places: Sequence[int]) -> None:
    """Write the checksums of `path` into a file next to it: of the file, and of each block.

    places: where blocks begin, in order, and the end of the last one. Raises OSError.
    """
    whole, blocks = xxhash.xxh3_128(), list[str]()
    with path.open("rb") as file:
        for start, end in pairwise(places):
            content = file.read(end - start)
            whole.update(content)
            blocks.append(xxhash.xxh3_128_hexdigest(content))
    path.with_name(path.name + SUFFIX).write_text(f"{whole.hexdigest()} {''.join(blocks)}")


def take_checksums(path: Path) -> tuple[str, str | None]:
    """Return what `leave_checksums` wrote, those of blocks joined, and delete that file.

    Without one, compute the checksum of the file; there is none of blocks then.
    """
    left = path.with_name(path.name + SUFFIX)
    if not left.is_file():
        return file_checksum(path), None
    whole, _, blocks = left.read_text().partition(" ")
    left.unlink()
    return whole, blocks


def changed_file(path: Path, actual: str, expected: str, where: str = "") -> str:
    """Return the message that a file, or a part of it, does not have its checksum."""
    return f"{path} was changed after it was saved{where}: its checksum is {actual}, expected {expected}"


class FileCheck:
    """Compares files with their checksums: small files at once, large ones in threads.

    Of the large files only every `parts`-th is compared, from number `part`, so that ranks share them.
    """

    def __init__(self, expected: Iterable[tuple[Path, str]], *, part: int = 0, parts: int = 1) -> None:
        self._damaged: list[str] = []
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="checksum")
        large: list[tuple[Path, str]] = []
        for path, checksum in expected:
            if path.is_file() and path.stat().st_size > SMALL_BYTES:
                large.append((path, checksum))
            else:
                self._compare(path, checksum)
        self._running = [self._threads.submit(self._compare, *each) for each in large[part::parts]]

    def _compare(self, path: Path, expected: str) -> None:
        try:
            actual = file_checksum(path)
        except OSError as error:
            self._damaged.append(f"{path} cannot be read: {error.strerror or error}")
            return
        if actual != expected:
            self._damaged.append(changed_file(path, actual, expected))

    @property
    def damaged(self) -> list[str]:
        """Return what is wrong with the files compared so far."""
        return sorted(self._damaged)

    def wait(self) -> list[str]:
        """Wait for all files and return what is wrong with them."""
        for each in self._running:
            each.result()
        self.close()
        return self.damaged

    def close(self) -> None:
        """Skip the files that no thread has begun."""
        self._threads.shutdown(cancel_futures=True)
