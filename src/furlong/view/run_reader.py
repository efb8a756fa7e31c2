"""Reads the records of one run incrementally: steps as columns, events, and whether the run is in progress."""

from __future__ import annotations

import math
import os
import re
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from furlong.catalogue import CATALOGUE
from furlong.errors import ConfigError, DataError
from furlong.files.atomic import is_locked
from furlong.tracking.run_files import CONFIG, EVENTS, METRICS, RUN_LOG, JsonRow, read_sections

ENDS = {"end": "finished", "failed": "failed", "stopped": "stopped"}
LISTED = ("rollout/raw_reward", "train/nll")  # metrics in the list of runs
EVAL_MEAN = re.compile(r"eval/(?!step$)(?!.*-pass@)[^/]+(?<!-truncated_ratio)$")
DIGITS = 7  # significant digits of a value on the page


class TailedFile:
    """The valid rows of a JSONL file that grows. A file that was replaced or truncated is read again from its start."""

    def __init__(self, path: Path, is_valid: Callable[[JsonRow], bool]) -> None:
        self.path = path
        self._is_valid = is_valid
        self._inode, self._offset = -1, 0

    def new_rows(self) -> tuple[list[JsonRow], bool]:
        """Return the complete rows since the last call, and whether they replace all earlier ones.

        Raises DataError if the file cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_new = status.st_ino != self._inode or status.st_size < self._offset
                if is_new:
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            was_there, self._inode, self._offset = self._inode != -1, -1, 0
            return [], was_there
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be read: {error.strerror or error}; fix its permissions, or copy the run again"
            ) from error
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [row for line in complete.splitlines() if (row := self._row(line)) is not None], is_new

    def _row(self, line: bytes) -> JsonRow | None:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            return None
        return row if isinstance(row, dict) and self._is_valid(row) else None


class RunReader:
    """The records of a run in a folder. Thread-safe; `refresh` reads what was added since.

    Raises ConfigError if the folder has no readable `config.json` of a run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.resolve().name
        self.sections = read_sections(folder)
        self._lock = threading.Lock()
        self._metrics = TailedFile(folder / METRICS, lambda row: type(row.get("step")) is int)
        self._events = TailedFile(folder / EVENTS, lambda row: isinstance(row.get("event"), str))
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self.events: list[JsonRow] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the rows that were added since the last call."""
        with self._lock:
            rows, is_new = self._metrics.new_rows()
            if is_new:
                self._steps, self._columns = array("q"), {}
            self._add(rows)
            events, is_new = self._events.new_rows()
            self.events = events if is_new else self.events + events

    def _add(self, rows: Iterable[JsonRow]) -> None:
        for row in rows:
            num_before = len(self._steps)
            self._steps.append(row["step"])
            for name, value in row.items():
                if name == "step":
                    continue
                column = self._columns.get(name)
                if column is None:
                    column = self._columns[name] = array("d", [math.nan]) * num_before
                column.append(math.nan if value is None else value)
            for column in self._columns.values():
                if len(column) == num_before:
                    column.append(math.nan)

    @property
    def stamp(self) -> tuple[int, int]:
        """Number of steps and of events: another value means something new to show."""
        return len(self._steps), len(self.events)

    @property
    def flags(self) -> dict[str, Any]:
        """The flags by field."""
        return {name: value for flags in self.sections.values() for name, value in flags.items()}

    def state(self) -> str:
        """Return running, finished, failed, stopped, killed (no end and no process), or deleted (no folder)."""
        if not os.path.isdir(self.folder):
            return "deleted"
        for event in reversed(self.events):
            if event["event"] in ENDS:
                return ENDS[event["event"]]
            if event["event"] == "start":
                break
        return "running" if is_locked(self.folder / RUN_LOG) else "killed"

    def summary(self) -> dict[str, Any]:
        """Return what the head of the page shows."""
        flags = self.flags
        starts = [event.get("time") for event in self.events if event["event"] == "start"]
        with self._lock:
            return {
                "name": self.name,
                "folder": str(self.folder),
                "state": self.state(),
                "started": starts[-1] if starts else None,
                "model": _model_name(Path(str(flags.get("hf_checkpoint") or ""))),
                "algorithm": "sft" if flags.get("loss_type") == "sft_loss" else flags.get("advantage_estimator"),
                "samples_per_step": (flags.get("rollout_batch_size") or 0) * (flags.get("n_samples_per_prompt") or 1),
                "num_rollout": flags.get("num_rollout"),
                "last_step": self._steps[-1] if self._steps else 0,
                "last": {name: self._last(name) for name in self._columns if name in LISTED or EVAL_MEAN.match(name)},
                "metrics": sorted(self._columns),
            }

    def _last(self, name: str) -> float | None:
        values = (value for value in reversed(self._columns[name]) if math.isfinite(value))
        return _shown(next(values, math.nan))

    def metrics(self, names: Iterable[str] | None = None, *, after: int = -1, most: int | None = None) -> Any:
        """Return {"steps": [...], "columns": {name: [...]}} of steps above `after`; unmeasured values are None.

        names: the metrics, all by default. most: number of steps, of which equally spaced ones are returned.
        """
        with self._lock:
            chosen = [i for i, step in enumerate(self._steps) if step > after]
            if most is not None and len(chosen) > most:
                chosen = [chosen[round(i * (len(chosen) - 1) / (most - 1))] for i in range(most)]
            wanted = self._columns if names is None else [name for name in names if name in self._columns]
            columns = {name: [_shown(self._columns[name][i]) for i in chosen] for name in wanted}
            return {"steps": [self._steps[i] for i in chosen], "columns": columns}

    def findings(self) -> dict[str, Any]:
        """Return the diagnoses, each once with its steps and explanation, and the other events worth showing."""
        diagnoses: dict[str, dict[str, Any]] = {}
        others: list[JsonRow] = []
        for event in self.events:
            if event["event"] == "diagnosis":
                _add_diagnosis(diagnoses, event)
            elif event["event"] not in QUIET:
                others.append(event)
        return {"diagnoses": list(diagnoses.values()), "events": others[-200:]}


QUIET = frozenset(("step", "weight_update_started", "weight_update", "weights_compared", "ranks_timed"))


def _add_diagnosis(diagnoses: dict[str, dict[str, Any]], event: Mapping[str, Any]) -> None:
    known = diagnoses.get(event["id"])
    if known is None:
        row = CATALOGUE.get(event["id"])
        known = {name: event[name] for name in ("id", "severity", "finding", "cause", "remedy")}
        known |= {} if row is None else {"title": row.title, "symptom": row.symptom, "checked": row.checked}
        known |= {"count": 0, "steps": []}
        diagnoses[event["id"]] = known
    known["count"] += 1
    if event.get("step") is not None and len(known["steps"]) < 20:
        known["steps"].append(event["step"])


def _model_name(folder: Path) -> str:
    """Return the name of a model folder; of one in the Hub's cache, models--OWNER--NAME/snapshots/COMMIT, its id."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def _shown(value: float) -> float | None:
    """Return a value with `DIGITS` significant digits, None if it was not measured or is not finite."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def open_runs(folders: Iterable[Path]) -> list[RunReader]:
    """Open runs, and those below a folder that is not one, the newest first; equal names get the number of the run.

    Raises ConfigError with every folder that neither is a run nor contains one.
    """
    runs: list[RunReader] = []
    problems: list[str] = []
    for folder in folders:
        below = [] if (folder / CONFIG).is_file() else runs_below(folder)
        try:
            runs += map(RunReader, below or [folder])
        except ConfigError as error:
            problems += map(str, error.problems)
    if problems:
        raise ConfigError(*problems)
    names = [run.name for run in runs]
    for number, run in enumerate(runs, 1):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({number})"
    return runs


def runs_below(folder: Path) -> list[Path]:
    """Return the folders of runs directly below a folder, the newest first."""
    found = {path.parent: path.stat().st_mtime for path in folder.glob(f"*/{CONFIG}")}
    return sorted(found, key=lambda path: (-found[path], path))
