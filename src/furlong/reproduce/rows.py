"""The rows of the results page: which commands each runs, and what it needs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import yaml

from furlong.core.text import did_you_mean
from furlong.errors import ConfigError
from furlong.quickstart import addition
from furlong.quickstart.quickstart import model_folder

PACKAGE = Path(str(resources.files("furlong.reproduce")))
REPOSITORY = Path(str(resources.files("furlong"))).parents[1]
NEEDS = {
    "model": "a model (--model DIR|NAME)",
    "trl": "a Python with furlong and TRL 1.16 (--trl-python PATH)",
    "repository": "the repository (furlong installed from a clone with pip install -e)",
    "reasoning_gym": "reasoning-gym (pip install 'furlong-rl[reasoning-gym]')",
}


@dataclass(frozen=True)
class RowTask:
    """A task that rows train on: model, held-out set, budget and the flags that all its rows share.

    problems: sums to write per seed. accuracy_key: key of rewards that says whether an answer is right. prepare, needs:
    of all its rows.
    """

    title: str
    model: str
    held_out: str
    steps: int
    flags: str
    problems: int = 0
    accuracy_key: str | None = None
    prepare: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class RowGroup:
    """Rows with one figure. text: what the rows show.

    baseline: the row that rivals are compared with, and that the figure also shows if it is of another group.
    """

    title: str
    baseline: str | None = None
    shows_mismatch: bool = False
    text: str = ""


@dataclass(frozen=True)
class ResultRow:
    """One row. prepare: commands that run once, before all seeds. rival: command that trains instead of furlong."""

    name: str
    group: str
    task: RowTask
    method: str
    flags: str
    prepare: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    rival: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Settings:
    """What a user chooses. steps: overrides the task's. model, trl_python: what rows need; None if not given.

    parallel: seeds that run at the same time. row_limit: seconds after which a row's commands are stopped.
    """

    seeds: tuple[int, ...]
    out: Path
    steps: int | None = None
    parallel: int = 1
    row_limit: float | None = None
    model: str | None = None
    trl_python: Path | None = None


@cache
def read_rows() -> tuple[dict[str, RowGroup], dict[str, ResultRow]]:
    """Return groups and rows, by name."""
    content: Any = yaml.safe_load((PACKAGE / "rows.yaml").read_text(encoding="utf-8"))
    tasks: dict[str, RowTask] = {}
    for name, fields in content["tasks"].items():
        lists: dict[str, Any] = {key: tuple(fields.pop(key, ())) for key in ("prepare", "needs")}
        tasks[name] = RowTask(**lists, **fields)
    rows: dict[str, ResultRow] = {}
    for name, fields in content["rows"].items():
        task = tasks[fields.pop("task")]
        lists = {key: (*getattr(task, key), *fields.pop(key, ())) for key in ("prepare", "needs")}
        rows[name] = ResultRow(name=name, task=task, **lists, **fields)
    return {name: RowGroup(**fields) for name, fields in content["groups"].items()}, rows


def find_row(name: str) -> ResultRow:
    """Return the row of this name. Raises ConfigError with similar names."""
    rows = read_rows()[1]
    if name not in rows:
        _, hint = did_you_mean(name, rows)
        raise ConfigError(f"there is no row {name}; {hint or '`furlong reproduce` lists them'}")
    return rows[name]


def missing_needs(row: ResultRow, settings: Settings) -> list[str]:
    """Return what the row needs and is not there, in words."""
    present = {
        "model": settings.model is not None,
        "trl": settings.trl_python is not None,
        "repository": (REPOSITORY / "examples").is_dir(),
        "reasoning_gym": find_spec("reasoning_gym") is not None,
    }
    return [NEEDS[need] for need in row.needs if not present[need]]


def merge_flags(*texts: str) -> list[str]:
    """Return the words of several flag strings, in which a later flag replaces an earlier one.

    >>> merge_flags("--lr 1e-4 --use-tis", "--seed 1 --lr 3e-4")
    ['--lr', '3e-4', '--use-tis', '--seed', '1']
    """
    groups: dict[str, list[str]] = {}
    for text in texts:
        flag = ""
        for i, word in enumerate(shlex.split(text)):
            if word.startswith("--"):
                flag = word
                groups[flag] = []
            elif i == 0:
                raise ValueError(f"{text!r} does not begin with a flag")
            else:
                groups[flag].append(word)
    return [word for flag, values in groups.items() for word in (flag, *values)]


def prepare_commands(row: ResultRow, settings: Settings) -> list[list[str]]:
    """Return the commands that run once for all seeds."""
    values = _values(row, settings, 0, settings.out / "prepared")
    return [_filled(command, values) for command in row.prepare]


def seed_commands(row: ResultRow, settings: Settings, seed: int) -> dict[str, list[str]]:
    """Return the commands of one seed, by the name of their folder: `run`, or for a rival also `before` and `after`."""
    folder = settings.out / f"seed-{seed}"

    def train(name: str, flags: str) -> list[str]:
        return _filled("furlong train", {}) + [
            Template(word).substitute(_values(row, settings, seed, folder / name))
            for word in merge_flags(row.task.flags, row.flags, flags)
        ]

    if row.rival is None:
        return {"run": train("run", "")}
    evaluation = "--num-rollout 0 --eval-interval 1"
    return {
        "before": train("before", evaluation),
        "run": _filled(row.rival, _values(row, settings, seed, folder / "run")),
        "after": train("after", f"--hf-checkpoint {folder / 'run' / 'model'} {evaluation}"),
    }


def write_data(row: ResultRow, settings: Settings, seed: int) -> None:
    """Write the problems of a seed (0: of the commands that prepare), and the held-out ones, if the task has sums."""
    if row.task.problems:
        folder = _data_folder(settings, seed)
        folder.mkdir(parents=True, exist_ok=True)
        addition.write_prompts(folder / "problems.jsonl", addition.problems(row.task.problems, seed=seed))
        addition.write_prompts(folder / "held_out.jsonl", addition.held_out_problems())


def num_steps(row: ResultRow, settings: Settings) -> int:
    """Return the number of training steps."""
    return row.task.steps if settings.steps is None else settings.steps


def shown_command(words: Sequence[str]) -> str:
    """Return a command as a shell would take it, with `furlong` for this Python's module."""
    ours = [sys.executable, "-m", "furlong"]
    return shlex.join(["furlong", *words[len(ours) :]] if list(words[: len(ours)]) == ours else list(words))


def _data_folder(settings: Settings, seed: int) -> Path:
    return settings.out / f"seed-{seed}" / "data" if seed else settings.out / "prepared"


def _values(row: ResultRow, settings: Settings, seed: int, out: Path) -> dict[str, str]:
    steps = num_steps(row, settings)
    model = settings.model if settings.model is not None else model_folder()
    values = {
        "model": model,
        "out": out,
        "prepared": settings.out / "prepared",
        "data": _data_folder(settings, seed),
        "seed": seed,
        "steps": steps,
        "quarter": max(steps // 4, 1),
        "examples": REPOSITORY / "examples",
        "benchmarks": REPOSITORY / "benchmarks",
        "trl_python": settings.trl_python,
    }
    return {name: str(value) for name, value in values.items()}


def _filled(command: str, values: Mapping[str, str]) -> list[str]:
    """Split a command, fill in the values, and run `furlong` and `python` with this Python."""
    words = [Template(word).substitute(values) for word in shlex.split(command)]
    this = {"furlong": [sys.executable, "-m", "furlong"], "python": [sys.executable]}
    return [*this.get(words[0], words[:1]), *words[1:]]
