"""The files of a run's folder: its flags, and rows of JSON. A kill may have cut them off, a copy left some out."""

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

TYPES: dict[str, type] = {"step": int, "event": str}  # of the keys by which rows are found; every writer gives them so


def read_sections(folder: Path, name: str = "") -> dict[str, dict[str, Any]]:
    """The flags of the run in a folder, by section and field. `name` is how the user gave the folder.

    Raises ConfigError if there is none.
    """
    path, shown = folder / CONFIG, name or str(folder)
    if not path.is_file():
        raise ConfigError(
            f"{shown}: no {CONFIG} in that folder (it holds {_held(folder)}); give the run's --output-dir"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{shown}: {path} cannot be read ({error.strerror}); give the run's --output-dir") from error
    except ValueError as error:
        raise ConfigError(
            f"{shown}: {path} is damaged ({error}); without it nothing is known of the run: copy its folder again"
        ) from error
    sections = content.get("config") if isinstance(content, dict) else None
    if not (isinstance(sections, dict) and all(isinstance(flags, dict) for flags in sections.values())):
        raise ConfigError(f"{shown}: {path} is not that of a run of furlong; give the run's --output-dir")
    return sections


def read_flags(folder: Path) -> dict[str, Any]:
    """The flags of the run in a folder, by field. Raises ConfigError if there is none."""
    return by_field(read_sections(folder))


def read_rows(path: Path, *keys: str) -> Iterator[JsonRow]:
    """The rows of a file, each an object with `keys`, of their `TYPES`; an end that a crash cut off is none.

    Raises DataError for another line that is no such row.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            row = _row(line, keys)
            if row is not None:
                yield row
            elif line.endswith(b"\n"):
                raise DataError(
                    f"{path}, line {number} is damaged: {line[:60]!r}; take the file from where it is whole"
                )


def read_intact_rows(path: Path, *keys: str) -> tuple[list[JsonRow], list[int]]:
    """What can be read of a file that may be damaged or missing, and which lines cannot; as in `read_rows`."""
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
    """The steps that a run recorded: (step, metrics), without the values that were not finite (null).

    Lines that are damaged are passed over: `doctor --run` names them (CHECK01), and a run that goes on moves them away.
    """
    rows, _ = read_intact_rows(folder / METRICS, "step")
    return [(row["step"], {k: v for k, v in row.items() if k != "step" and v is not None}) for row in rows]


def _row(line: bytes, keys: tuple[str, ...]) -> JsonRow | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and all(_is_given(row, key) for key in keys) else None


def _is_given(row: JsonRow, key: str) -> bool:
    return key in row and (key not in TYPES or type(row[key]) is TYPES[key])


def _held(folder: Path) -> str:
    """What is in a folder that is not the expected one."""
    if not folder.is_dir():
        return "nothing: it is a file" if folder.exists() else "nothing: no such folder"
    return ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
