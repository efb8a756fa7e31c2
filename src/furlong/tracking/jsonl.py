"""Files with one JSON object per step that resumed runs continue without repeated steps, and `metrics.jsonl`."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from furlong.core.files import atomic_file

logger = logging.getLogger(__name__)


class StepFile:
    """Appends JSON objects, with the key `step` first, and flushes each: a crash loses no finished row.

    A resumed run, or another run in the same folder, repeats steps: on the first append, rows of that step and later
    ones are moved to `NAME.rolled_back.jsonl`, so that each step occurs once. Both files are replaced atomically, the
    rolled-back one first: a crash in between neither loses nor repeats a row.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._good_bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def rolled_back_path(self) -> Path:
        """The file of rows that a resumed run repeats."""
        return self._path.with_name(f"{self._path.stem}.rolled_back{self._path.suffix}")

    def append(self, step: int, row: Mapping[str, Any]) -> None:
        """Append one row. Raises OSError if it cannot be written; the file then still ends with a complete row."""
        if self._file is None:
            self._roll_back(step)
            self._file = self._path.open("ab", buffering=0)
            self._good_bytes = self._file.seek(0, os.SEEK_END)
        line = orjson.dumps({"step": step, **row}) + b"\n"
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError:
            os.ftruncate(self._file.fileno(), self._good_bytes)
            raise
        self._good_bytes += len(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _roll_back(self, step: int) -> None:
        """Move rows at or after `step`, and incomplete rows of a crash, to the rolled-back file."""
        if not self._path.exists():
            return
        kept: list[bytes] = []
        moved: list[bytes] = []
        for line in self._path.read_bytes().splitlines(keepends=True):
            (kept if _is_before(line, step) else moved).append(line)
        if not moved:
            return
        rows = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in moved)
        earlier = self.rolled_back_path.read_bytes() if self.rolled_back_path.exists() else b""
        if not earlier.endswith(rows):  # already moved, before a crash
            with atomic_file(self.rolled_back_path) as draft:
                draft.write_bytes(earlier + rows)
        with atomic_file(self._path) as draft:
            draft.write_bytes(b"".join(kept))
        logger.info(
            "%s: resuming at step %d; moved %d later or damaged rows to %s",
            self._path,
            step,
            len(moved),
            self.rolled_back_path.name,
        )


def _is_before(line: bytes, step: int) -> bool:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int) and row["step"] < step


class JsonlTracker:
    """Appends one object per step (see `StepFile`). Non-finite values are null, because JSON has no NaN."""

    def __init__(self, path: Path) -> None:
        self._file = StepFile(path)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row. Raises OSError if it cannot be written."""
        self._file.append(
            step, {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()
