"""Score diagnoses on injected faults and on healthy settings: one `Case` each, and the table of `score_table`.

`score_doctor`, `score_runs` and `score_healthy` in tests/faults have the cases. `scripts/score_diagnoses.py` judges all
of them, and tests/faults/test_score.py the fast ones.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack
from unittest import mock

from diagnosed_runs import run
from faults.world import World
from furlong.catalogue import Diagnosis, diagnosis
from furlong.config.command_line import config_from_values
from furlong.diagnosis.monitors import MONITORS
from furlong.diagnosis.monitors.monitor import MonitorSuite, RunFacts
from furlong.diagnosis.postmortem.log_text import LogText
from furlong.diagnosis.postmortem.signatures import match_signatures
from furlong.quickstart.quickstart import model_folder
from runs import write_prompts

Flags = Mapping[str, Any]
Prepare = Callable[[World], Flags | None]  # returns more flags


@dataclass(frozen=True)
class Case:
    """A fault with the diagnosis that it should get, or a healthy setting.

    rows: the ids that name the fault, the usual one first; none for a healthy setting. remedy: words of which each is
    in the fix. without: words that would be a false fix. also: ids that the same fault rightly has, too. missed: why
    the diagnosis is known to be wrong today. is_slow: starts a process. follow: diagnose again with the fix applied,
    which is right only if no error is left.
    """

    name: str
    rows: tuple[str, ...]
    diagnose: Callable[[Path], Iterable[Diagnosis]]
    remedy: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    missed: str = ""
    is_slow: bool = False
    follow: Callable[[Path, Diagnosis], Iterable[Diagnosis]] | None = None

    def judge(self, folder: Path) -> Outcome:
        """Diagnose the case in an empty folder."""
        found = [each for each in self.diagnose(folder) if each.severity != "info" or each.id in self.rows]
        right = next((each for each in found if each.id in self.rows), None)
        others = tuple(each.id for each in found if each.id not in (*self.rows, *self.also))
        if right is None:
            return Outcome(self, others=others)
        missing = tuple(word for word in self.remedy if word not in right.remedy)
        false = tuple(word for word in self.without if word in right.cause + right.remedy)
        outcome = Outcome(self, found=right, missing=missing, false=false, others=others)
        if self.follow is None:
            return outcome
        left = tuple(each.id for each in self.follow(folder / "fixed", right) if each.severity == "error")
        return replace(outcome, left=left)


@dataclass(frozen=True)
class Outcome:
    """What a case got.

    missing, false: words of the fix; others: ids of second diagnoses, or of false alarms; left: ids of errors that are
    left with the fix applied.
    """

    case: Case
    found: Diagnosis | None = None
    missing: tuple[str, ...] = ()
    false: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def is_hit(self) -> bool:
        """Whether the fault was named."""
        return self.found is not None

    @property
    def is_right(self) -> bool:
        """Whether the fault was named with the right fix; of a healthy setting, whether nothing was."""
        if not self.case.rows:
            return not self.others
        return self.is_hit and not (self.missing or self.false or self.left)

    def why(self) -> str:
        """Describe what is wrong in one line; "" if nothing is."""
        parts = []
        if self.case.rows and self.found is None:
            parts.append("not found")
        if self.found is not None and self.missing:
            parts.append(f"the fix lacks {', '.join(self.missing)}")
        if self.found is not None and self.false:
            parts.append(f"false: {', '.join(self.false)}")
        if self.left:
            parts.append(f"with the fix applied, {', '.join(self.left)} is left")
        if self.others:
            parts.append(f"{'also' if self.case.rows else 'false alarm'} {', '.join(self.others)}")
        return "; ".join(parts)


# ---- kinds of cases -------------------------------------------------------------------------------------------------


class Expected(TypedDict, total=False):
    """Fields of a case; words are separated by `|`, ids by spaces."""

    remedy: str
    without: str
    also: str
    missed: str
    is_slow: bool


def case(name: str, rows: str, diagnose: Callable[[Path], Iterable[Diagnosis]], **expected: Unpack[Expected]) -> Case:
    """Make a case from texts."""
    return Case(
        name,
        tuple(rows.split()),
        diagnose,
        tuple(filter(None, expected.get("remedy", "").split("|"))),
        tuple(filter(None, expected.get("without", "").split("|"))),
        tuple(expected.get("also", "").split()),
        expected.get("missed", ""),
        expected.get("is_slow", False),
    )


def doctor(
    name: str,
    rows: str,
    flags: Flags | None = None,
    prepare: Prepare | None = None,
    *,
    model: Callable[[], Path] = model_folder,
    fixed: Flags | Prepare | None = None,
    patches: Mapping[str, Any] | None = None,
    **expected: Unpack[Expected],
) -> Case:
    """Make a case of a launch command, in a folder with a model and prompts that `prepare` may change.

    fixed: the flags of the fix, each of which its text must name, or a function that makes the change. patches: values
    of attributes of modules, where the program reads facts of the machine.
    """

    def look(folder: Path, fix: Flags | Prepare) -> list[Diagnosis]:
        shutil.copytree(model(), folder / "model")
        world = World(folder, folder / "model", write_prompts(folder / "prompts.jsonl", 24))
        more = dict(prepare(world) or {}) if prepare is not None else {}
        more |= dict(fix(world) or {}) if callable(fix) else fix
        with contextlib.ExitStack() as stack:
            for place, value in (patches or {}).items():
                stack.enter_context(mock.patch(place, value))
            return world.doctor(**{"rm_type": "math"} | dict(flags or {}) | more)

    def follow(folder: Path, right: Diagnosis) -> list[Diagnosis]:
        assert fixed is not None
        if not callable(fixed):
            unnamed = [flag for flag in fixed if f"--{flag.replace('_', '-')}" not in right.remedy]
            assert not unnamed, f"{name}: the fix does not name {unnamed}: {right.remedy}"
        return look(folder, fixed)

    made = case(name, rows, lambda folder: look(folder, {}), **expected)
    return made if fixed is None else replace(made, follow=follow)


def steps(
    name: str,
    rows: str,
    metrics: Sequence[Mapping[str, float]],
    flags: Flags | None = None,
    *,
    has_template: bool = True,
    sizes: tuple[int, int] = (151_936, 1_500_000_000),
    **expected: Unpack[Expected],
) -> Case:
    """Make a case of the metrics of a run's first steps, as its monitors get them.

    sizes: vocabulary and parameters of the model.
    """

    def diagnose(_: Path) -> list[Diagnosis]:
        suite = MonitorSuite(MONITORS, RunFacts(config_from_values(dict(flags or {})), has_template, *sizes))
        return [each for number, row in enumerate(metrics, 1) for each in suite.step(number, row)]

    return case(name, rows, diagnose, **expected)


def happened(
    name: str, rows: str, events: Sequence[Flags], flags: Flags | None = None, **expected: Unpack[Expected]
) -> Case:
    """Make a case of a run's events, as its monitors get them."""

    def diagnose(_: Path) -> list[Diagnosis]:
        suite = MonitorSuite(MONITORS, RunFacts(config_from_values(dict(flags or {}))))
        return [each for event in events for each in suite.event(event)]

    return case(name, rows, diagnose, **expected)


def ran(
    name: str,
    rows: str,
    flags: Flags | None = None,
    *,
    model: Callable[[], Path] = model_folder,
    **expected: Unpack[Expected],
) -> Case:
    """Make a case of a short run of the quickstart's problems, as it is trained."""

    def diagnose(folder: Path) -> list[Diagnosis]:
        chat = {} if model is model_folder else {"apply_chat_template": True}
        own = {
            name: str(value).format(folder) if "{}" in str(value) else value for name, value in (flags or {}).items()
        }
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            code, found = run(folder / "run", **chat | own | {"hf_checkpoint": model()})
        if code:
            raise AssertionError(f"{name}: the run ended with exit code {code}")
        return [diagnosis(id, event["finding"], severity=event["severity"]) for id, event in found.items()]

    return case(name, rows, diagnose, **{"is_slow": True} | expected)


def log(
    name: str, rows: str, text: str, flags: Flags | None = None, *, num_steps: int = 0, **expected: Unpack[Expected]
) -> Case:
    """Make a case of the end of the log of a run that has failed."""
    content = LogText("run.log", text, dict(flags or {}), {"steps": num_steps})
    return case(name, rows, lambda _: match_signatures(content), **expected)


def judge_all(cases: Iterable[Case], folder: Path) -> list[Outcome]:
    """Judge each case in a folder of its own, which is removed afterwards."""
    outcomes: list[Outcome] = []
    for number, each in enumerate(cases):
        own = folder / str(number)
        own.mkdir()
        outcomes.append(each.judge(own))
        shutil.rmtree(own)
    return outcomes


# ---- the table ------------------------------------------------------------------------------------------------------


def score_table(outcomes: Sequence[Outcome], tests: Mapping[str, int]) -> list[str]:
    """Return the lines of a Markdown table: a line per row, and the sums. `tests`: fault tests by row."""
    faults = [outcome for outcome in outcomes if outcome.case.rows]
    by_row = Counter(outcome.case.rows[0] for outcome in faults)
    lines = [
        "| row | tests that inject it | faults scored | named | with the right fix | fixes applied | "
        "false second diagnoses |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted({*by_row, *tests}):
        lines.append(_line(row, tests.get(row, 0), [each for each in faults if each.case.rows[0] == row]))
    return [*lines, _line("all", sum(tests.values()), faults)]


def _line(row: str, tests: int, faults: Sequence[Outcome]) -> str:
    hits, right = sum(each.is_hit for each in faults), sum(each.is_right for each in faults)
    if not faults:
        return f"| {row} | {tests} | 0 | | | | |"
    tried, others = (sum(map(bool, each)) for each in ((o.case.follow for o in faults), (o.others for o in faults)))
    return f"| {row} | {tests} | {len(faults)} | {hits} | {right} | {tried} | {others} |"


def healthy_line(outcomes: Sequence[Outcome]) -> str:
    """Return one line on healthy settings."""
    healthy = [outcome for outcome in outcomes if not outcome.case.rows]
    alarms = sum(not outcome.is_right for outcome in healthy)
    return f"{len(healthy)} healthy settings: {alarms} with a false alarm"


def wrong_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line for each case that is not entirely right."""
    return [f"{'/'.join(o.case.rows) or 'healthy'}: {o.case.name}: {o.why()}" for o in outcomes if o.why()]
