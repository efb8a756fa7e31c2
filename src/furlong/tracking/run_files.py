"""Read the files of a run folder, flags and rows of JSON, which may be truncated or missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from furlong.config.sections import by_field
from furlong.errors import ConfigError, DataError

CONFIG, METRICS, EVENTS, RUN_LOG = "config.json", "metrics.jsonl", "events.jsonl", "run.log"

JsonRow = dict[str, Any]

TYPES: dict[str, type] = {"step": int, "event": str}  # types of the keys that rows are selected by


def read_sections(folder: Path, name: str = "") -> dict[str, dict[str, Any]]:
    """Return the flags of the run in a folder, by section and field. `name` is the folder as the user wrote it.

    Raises ConfigError if the folder has no readable config.json of a run.
    """
    path, shown = folder / CONFIG, name or str(folder)
    if not path.is_file():
        raise ConfigError(f"{shown}: no {CONFIG} in that folder ({_listing(folder)}); use the run's --output-dir")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
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
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            row = _row(line, keys)
            if row is not None:
                yield row
            elif line.endswith(b"\n"):
                raise DataError(
                    f"{path}, line {number} is damaged: {line[:60]!r}; restore the file from an intact copy"
                )


def read_intact_rows(path: Path, *keys: str) -> tuple[list[JsonRow], list[int]]:
    """Return the valid rows of a file that may be damaged or missing, and the numbers of the invalid lines."""
    rows, damaged = list[JsonRow](), list[int]()
    if not path.is_file():
        return rows, damaged
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            row = _row(line, keys)
            if row is not None:
                rows.append(row)
            elif line.endswith(b"\n"):
                damaged.append(number)
    return rows, damaged


def read_steps(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the recorded steps of a run: (step, metrics), without non-finite values (null).

    Damaged lines are skipped: `doctor --run` reports them (CHECK01), and a resumed run moves them away.
    """
    rows, _ = read_intact_rows(folder / METRICS, "step")
    return [(row["step"], {k: v for k, v in row.items() if k != "step" and v is not None}) for row in rows]


def _row(line: bytes, keys: tuple[str, ...]) -> JsonRow | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and all(_has_key(row, key) for key in keys) else None


def _has_key(row: JsonRow, key: str) -> bool:
    return key in row and (key not in TYPES or type(row[key]) is TYPES[key])


def _listing(folder: Path) -> str:
    """Describe the content of a folder, for an error."""
    if not folder.is_dir():
        return "it is a file" if folder.exists() else "no such folder"
    return "it contains " + (", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing")
