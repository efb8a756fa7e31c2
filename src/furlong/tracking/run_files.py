"""The JSON files of a run folder: append rows and events, read flags and rows, which may be truncated or missing."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from furlong.config.sections import by_field
from furlong.core.text import nearest_path, redact_credentials
from furlong.errors import ConfigError, DataError
from furlong.files.atomic import atomic_file

logger = logging.getLogger(__name__)

CONFIG, METRICS, EVENTS, RUN_LOG = "config.json", "metrics.jsonl", "events.jsonl", "run.log"
RUN_STARTS = "run folder"  # begins the first line that each start of a run logs

JsonRow = dict[str, Any]

TYPES = {"step": (int,), "event": (str,), "time": (int, float)}  # of keys that readers of a run's folder rely on


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
            row = _row(line, ("step",)) if line.endswith(b"\n") else None
            (kept if row is not None and row["step"] < step else moved).append(line)
        if not moved:
            return
        rolled_back = self._path.with_name(f"{self._path.stem}.rolled_back{self._path.suffix}")
        rows = b"".join(line if line.endswith(b"\n") else line + b"\n" for line in moved)
        earlier = rolled_back.read_bytes() if rolled_back.exists() else b""
        if not earlier.endswith(rows):  # already moved, before a crash
            with atomic_file(rolled_back) as draft:
                draft.write_bytes(earlier + rows)
        with atomic_file(self._path) as draft:
            draft.write_bytes(b"".join(kept))
        logger.info(
            "%s: resuming at step %d; moved %d later or damaged rows to %s",
            self._path, step, len(moved), rolled_back.name,
        )  # fmt: skip


class EventLog:
    """Appends one JSON object per event: `time` (Unix seconds), `event`, and the given fields. Thread-safe.

    A failed write (full disk) does not end the run: it is counted in `failures`, and the first one is logged. An
    incomplete line, from a failed write or a crash, is terminated before the next event.

    >>> events = EventLog(Path("outputs/x/events.jsonl"))
    >>> events.write("checkpoint_saved", step=20, seconds=1.5)
    >>> events.close()
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("a+b", buffering=0)
        self._is_torn = False
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            self._is_torn = self._file.read(1) != b"\n"
        self._lock = threading.Lock()
        self.failures = 0

    def write(self, event: str, **fields: Any) -> None:
        """Record an event now, without the credentials in URLs. Fields without a JSON form are written as text."""
        text = orjson.dumps(
            {"time": time.time(), "event": event, **fields}, default=str, option=orjson.OPT_NON_STR_KEYS
        )
        line = redact_credentials(text.decode()).encode() if b"://" in text or b"k-" in text else text
        with self._lock:
            try:
                line = (b"\n" if self._is_torn else b"") + line + b"\n"
                self._is_torn = self._file.write(line) != len(line)
                if self._is_torn:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self.failures += 1
                if self.failures == 1:
                    logger.warning("cannot write event %s (%s); later failures are only counted", event, error)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_sections(folder: Path, name: str = "") -> dict[str, dict[str, Any]]:
    """Return the flags of the run in a folder, by section and field. `name` is the folder as the user wrote it.

    Raises ConfigError if the folder has no readable config.json of a run.
    """
    path, shown = folder / CONFIG, name or str(folder)
    if not os.path.lexists(folder):
        raise ConfigError(f"{shown}: no such directory; {nearest_path(folder)}")
    if not os.path.lexists(path):
        raise ConfigError(
            f"{shown}: no {CONFIG} in that folder ({_listing(folder)}): it is not a run's, the run has just begun, or "
            "the folder was deleted during the run; use the run's --output-dir"
        )
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{shown}: {path} cannot be read ({error.strerror}); use the run's --output-dir") from error
    except ValueError as error:
        raise ConfigError(
            f"{shown}: {path} is corrupt ({error}); it is required: copy the run's folder again"
        ) from error
    sections = content.get("config") if isinstance(content, dict) else None
    if not (isinstance(sections, dict) and all(isinstance(flags, dict) for flags in sections.values())):
        raise ConfigError(f"{shown}: {path} was not written by a furlong run; use the run's --output-dir")
    return sections


def read_flags(folder: Path) -> dict[str, Any]:
    """Return the flags of the run in a folder, by field. Raises ConfigError like `read_sections`."""
    return by_field(read_sections(folder))


def read_rows(path: Path, *keys: str) -> Iterator[JsonRow]:
    """Yield the rows of a file, objects with `keys` of the right `TYPES`; an incomplete last line is skipped.

    Raises DataError for any other invalid line.
    """
    for number, line, row in _parsed(path, keys):
        if row is None:
            raise DataError(f"{path}, line {number} is damaged: {line[:60]!r}; restore the file from an intact copy")
        yield row


def read_intact_rows(path: Path, *keys: str) -> tuple[list[JsonRow], list[int]]:
    """Return the valid rows of a file that may be damaged or missing, and the numbers of the invalid lines.

    Raises DataError if it cannot be read.
    """
    parsed = list(_parsed(path, keys)) if os.path.lexists(path) else []
    return [row for _, _, row in parsed if row is not None], [number for number, _, row in parsed if row is None]


def read_steps(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the recorded steps of a run: (step, metrics), without non-finite values (null).

    Damaged lines are skipped: `doctor --run` reports them (CHECK01), and a resumed run moves them away.
    """
    rows, _ = read_intact_rows(folder / METRICS, "step")
    return [(row["step"], {k: v for k, v in row.items() if k != "step" and v is not None}) for row in rows]


def torn_lines(path: Path, numbers: Collection[int]) -> list[int]:
    """Return those of the invalid lines `numbers` that end in the middle of an object, as a kill leaves them."""
    return [number for number, line in _lines(path) if number in numbers and not line.endswith(b"}\n")]


def _parsed(path: Path, keys: tuple[str, ...]) -> Iterator[tuple[int, bytes, JsonRow | None]]:
    """Yield the number of each line, the line, and its row, None if it is invalid; skip an incomplete last line."""
    for number, line in _lines(path):
        row = _row(line, keys)
        if row is not None or line.endswith(b"\n"):
            yield number, line, row


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}; fix its permissions, or restore it from an intact copy"
        ) from error


def _row(line: bytes, keys: tuple[str, ...]) -> JsonRow | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(row, dict) or not row.keys() >= {*keys} or (row.get("event") == "step" and "step" not in row):
        return None
    return row if all(type(row[key]) in types for key, types in TYPES.items() if key in row) else None


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return "it is a file" if folder.exists() else "no such folder"
    return "it contains " + (", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing")
