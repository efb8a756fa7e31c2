"""A data file that a run may read for days: damage in it, and any change meanwhile, are errors that name it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

import pyarrow as pa

from furlong.errors import DataError

# Errors of libraries that read damaged content.
DAMAGE = (
    pa.ArrowException,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    MemoryError,
    RecursionError,
)


class SourceFile:
    """A file with rows, as it was when the run opened it first. Raises DataError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = self._read_stamp()

    @property
    def num_bytes(self) -> int:
        """Its size when the run opened it first."""
        return self._stamp[0]

    def check_unchanged(self) -> None:
        """Raise DataError if the file was deleted, or its size or modification time differs from the first time."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        (before, _), (now, _) = self._stamp, stamp
        change = (
            "modified" if now == before else f"{'cut' if now < before else 'extended'} from {before} to {now} bytes"
        )
        raise DataError(
            f"{self.path} was {change} while the run read it, so its rows are no longer those that the run counted; "
            "restore the file and resume with --load, or start a new run"
        )

    @contextlib.contextmanager
    def reading(self, what: str = "") -> Generator[None]:
        """Turn an error of reading the file into a DataError; `what` is the place in it, such as "row group 3"."""
        try:
            yield
        except DataError:
            raise
        except DAMAGE as error:
            self.check_unchanged()
            reason = " ".join(str(error).split()) or "no further details"
            raise DataError(
                f"{self.path}{what and f', {what},'} cannot be read: {type(error).__name__}: {reason[:300]}; the file "
                "is damaged or incomplete: copy or write it again"
            ) from error

    def _read_stamp(self) -> tuple[int, int]:
        try:
            facts = os.stat(self.path)
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be opened: {error.strerror or error}; restore the file, or check --prompt-data"
            ) from error
        return facts.st_size, facts.st_mtime_ns
