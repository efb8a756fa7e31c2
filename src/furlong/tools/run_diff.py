"""Compares runs: summaries of several, and the differences of two. Reads files only.

The differences (DET01) are those of flags, of the hashes of every stage (`--debug-determinism`), and of metrics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.text import abbreviate, sparkline
from furlong.tracking.console import is_eval_mean
from furlong.tracking.run_files import EVENTS, METRICS, JsonRow, read_flags, read_intact_rows, read_rows

DIGESTS = "determinism.jsonl"
# Times differ in every run, and so do diagnoses based on them; self-tests are only made at a start.
MEASURED = ("perf/", "diagnosis/", "selftest/")
PLACES = frozenset({"output_dir", "run_name", "save", "load", "dump_details", "wandb_group"})
DIGITS = 8  # per sample in a hash
ROW_KEYS = ("step", "stage", "values")

Key = tuple[int, str, int]
SHARE = 10  # the first and last 1/SHARE of the steps are a run's beginning and end
NAME_WIDTH = 24


@dataclass(frozen=True)
class Difference:
    """The first value that differs. `samples`: ids of the samples that differ in a column."""

    step: int
    stage: str
    name: str
    a: Any
    b: Any
    at: int | None = None
    samples: list[int] = field(default_factory=list[int])

    def text(self) -> str:
        """Describe it in one line."""
        where = f"step {self.step}, stage {self.stage}"
        if self.at is not None:
            where += f" of optimizer step {self.at}"
        text = f"{where}: {self.name} is {_shown(self.a)} in the first run, {_shown(self.b)} in the second"
        if self.samples:
            text += f"; in samples {abbreviate(self.samples, 5)}"
        return text


@dataclass(frozen=True)
class MetricDifference:
    """A metric at its first difference.

    `largest` is its largest relative difference in any row, None if a run lacks a value.
    """

    step: int
    name: str
    a: float | None
    b: float | None
    largest: float | None


@dataclass(frozen=True)
class RunComparison:
    """The differences between two runs."""

    flags: dict[str, tuple[Any, Any]]
    difference: Difference | None
    metrics: list[MetricDifference]
    steps: tuple[int, int]
    num_stages: int

    @property
    def is_same(self) -> bool:
        """Whether the runs are equal in all that both recorded."""
        return self.difference is None and not self.metrics and self.steps[0] == self.steps[1]

    def record(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self) | {"is_same": self.is_same}


def compare_runs(a: Path, b: Path, *, rtol: float = 0.0) -> RunComparison:
    """Compare two run folders. `rtol`: relative tolerance for metrics.

    Raises ConfigError if a folder is not a run.
    """
    rows_a, rows_b = (_metrics(folder) for folder in (a, b))
    difference, num_stages = _first_difference(a / DIGESTS, b / DIGESTS)
    return RunComparison(
        flags=different_flags(read_flags(a), read_flags(b)),
        difference=difference,
        metrics=_metric_differences(rows_a, rows_b, rtol=rtol),
        steps=(max(rows_a, default=0), max(rows_b, default=0)),
        num_stages=num_stages,
    )


def findings(comparison: RunComparison) -> list[Diagnosis]:
    """DET01: the runs differ."""
    if comparison.is_same:
        return []
    evidence, steps = comparison.record(), comparison.steps
    if comparison.difference is None and not comparison.metrics:
        finding = f"the first run has {steps[0]} steps, the second {steps[1]}; common steps are equal"
        cause = "One of them did not finish."
        return [diagnosis("DET01", finding, cause=cause, severity="warning", remedy="", evidence=evidence)]
    shown = [f"{name} {a} / {b}" for name, (a, b) in comparison.flags.items()]
    cause = f"Different flags: {abbreviate(shown, 6)}"
    remedies = ["use the same flags"]
    if not comparison.flags:
        cause = (
            "The flags are equal: a custom function is random or depends on time or a server, or the machine, its "
            "libraries, kernels or the order of events differ."
        )
        remedies = ["seed custom functions from sample.index", "--deterministic-mode fixes kernels and threads"]
        if comparison.difference is None or comparison.difference.stage in ("data", "rollout"):
            remedies.append("--async-buffer-size 0 without --partial-rollout leaves out what timing decides")
    if comparison.difference is not None:
        finding = comparison.difference.text()
    else:
        first = min(comparison.metrics, key=lambda m: m.step)
        finding = (
            f"step {first.step}: {first.name} is {first.a} in the first run, {first.b} in the second, and "
            f"{len(comparison.metrics) - 1} other metrics differ there or later"
        )
        if not comparison.num_stages:
            remedies.insert(0, f"run both with --debug-determinism, which records stage and tensor in {DIGESTS}")
    return [diagnosis("DET01", finding, cause=cause, remedy="; ".join(remedies), evidence=evidence)]


def _first_difference(a: Path, b: Path) -> tuple[Difference | None, int]:
    if not (a.exists() and b.exists()):
        return None, 0
    stages_b = {_key(row): row for row in read_rows(b, *ROW_KEYS)}
    num_stages = 0
    samples: list[int] = []
    for row in read_rows(a, *ROW_KEYS):
        other = stages_b.get(_key(row))
        if other is None:
            continue
        num_stages += 1
        if row["stage"] == "data":
            samples = row["values"]["sample_ids"]
        if (difference := _difference(row, other, samples)) is not None:
            return difference, num_stages
    return None, num_stages


def _difference(row: JsonRow, other: JsonRow, sample_ids: list[int]) -> Difference | None:
    mine: Mapping[str, Any] = row["values"]
    theirs: Mapping[str, Any] = other["values"]
    for name in dict.fromkeys([*mine, *theirs]):
        a, b = mine.get(name), theirs.get(name)
        identities = [value["hash"] if isinstance(value, dict) else value for value in (a, b)]
        if identities[0] != identities[1]:
            samples = _different_samples(a, b, sample_ids)
            x, y = (  # without the hashes of their samples
                {key: each for key, each in value.items() if key != "samples"} if isinstance(value, dict) else value
                for value in (a, b)
            )
            return Difference(row["step"], row["stage"], name, x, y, row.get("at"), samples)
    return None


def _different_samples(a: Any, b: Any, ids: list[int]) -> list[int]:
    if not (isinstance(a, dict) and isinstance(b, dict) and "samples" in a and len(a["samples"]) == len(b["samples"])):
        return []
    places = [slice(i * DIGITS, (i + 1) * DIGITS) for i in range(len(ids))]
    return [number for number, at in zip(ids, places, strict=True) if a["samples"][at] != b["samples"][at]]


def _metric_differences(a: Mapping[int, JsonRow], b: Mapping[int, JsonRow], *, rtol: float) -> list[MetricDifference]:
    differences: dict[str, MetricDifference] = {}
    for step in sorted(a.keys() & b.keys()):
        for name in dict.fromkeys([*a[step], *b[step]]):
            x, y = a[step].get(name), b[step].get(name)
            if name == "step" or name.startswith(MEASURED) or x == y:
                continue
            size = None if x is None or y is None else abs(x - y) / max(abs(x), abs(y))
            if size is not None and size <= rtol:
                continue
            first = differences.get(name)
            if first is None:
                differences[name] = MetricDifference(step, name, x, y, size)
            elif first.largest is not None and (size is None or size > first.largest):
                differences[name] = replace(first, largest=size)
    return sorted(differences.values(), key=lambda m: (m.step, m.largest is not None, -(m.largest or 0.0)))


def different_flags(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the flags that differ, except the runs' folders."""
    return {
        f"--{name.replace('_', '-')}": (a.get(name), b.get(name))
        for name in dict.fromkeys([*a, *b])
        if a.get(name) != b.get(name) and name not in PLACES
    }


def _metrics(folder: Path) -> dict[int, JsonRow]:
    path = folder / METRICS
    return {row["step"]: row for row in read_rows(path, "step")} if path.exists() else {}


def _key(row: JsonRow) -> Key:
    return row["step"], row["stage"], row.get("at", -1)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        norm = f" (norm {value['norm']})" if "norm" in value else ""
        return f"{value['hash']}{norm}"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class RunSummary:
    """A run's numbers; None or empty if not measured.

    reward: its mean over the first and the last tenth of the steps; curve: that of each step. evaluations: for each set
    the first mean reward, the best one, and its step. length: tokens per response at the end. diagnoses: ids of
    warnings and errors.
    """

    name: str
    num_steps: int
    reward: tuple[float, float] | None
    evaluations: Mapping[str, tuple[float, float, int]]
    length: float | None
    tokens_per_s: float | None
    step_s: float | None
    diagnoses: tuple[str, ...]
    curve: tuple[float, ...] = ()


def summarize(folder: Path) -> RunSummary:
    """Read a run's metrics and events."""
    rows, _ = read_intact_rows(folder / METRICS, "step")
    trained = [row for row in rows if row["step"] > 0]
    diagnoses = [
        str(event["id"])
        for event in read_intact_rows(folder / EVENTS, "event")[0]
        if event["event"] == "diagnosis" and event["severity"] != "info"
    ]
    rewards, lengths = _series(trained, "rollout/raw_reward"), _series(trained, "rollout/response_len/mean")
    speeds, times = _series(trained, "perf/tokens_per_gpu_per_sec"), _series(trained, "perf/step_time")
    few = max(1, len(trained) // SHARE)
    return RunSummary(
        name=str(folder),
        num_steps=trained[-1]["step"] if trained else 0,
        reward=(fmean(rewards[:few]), fmean(rewards[-few:])) if rewards else None,
        evaluations={name.removeprefix("eval/"): _evaluation(rows, name) for name in _evaluated(rows)},
        length=fmean(lengths[-few:]) if lengths else None,
        tokens_per_s=median(speeds) if speeds else None,
        step_s=median(times) if times else None,
        diagnoses=tuple(dict.fromkeys(diagnoses)),
        curve=tuple(rewards),
    )


def table(runs: Sequence[RunSummary], *, draws_curves: bool = True) -> str:
    """Format runs as a table: a line of numbers each, the curve of the reward, evaluation sets and diagnoses."""
    lines = [f"{'run':{NAME_WIDTH}}  steps  {'reward':>16}  length    tok/s  s/step"]
    for run in runs:
        reward = "-" if run.reward is None else f"{run.reward[0]:.3f} to {run.reward[1]:.3f}"
        name = run.name if len(run.name) <= NAME_WIDTH else f"...{run.name[3 - NAME_WIDTH :]}"
        lines.append(
            f"{name:{NAME_WIDTH}}  {run.num_steps:5}  {reward:>16}  {_column(run.length, '6.1f')}  "
            f"{_column(run.tokens_per_s, '7,.0f')}  {_column(run.step_s, '6.2f')}"
        )
        if draws_curves and len(run.curve) > 1:
            lines.append(f"  reward {sparkline(run.curve)} (lowest {min(run.curve):.3f}, highest {max(run.curve):.3f})")
        lines += [
            f"  eval {name}: {first:.3f} at first, best {best:.3f} at step {step}"
            for name, (first, best, step) in run.evaluations.items()
        ]
        lines += [f"  diagnoses: {', '.join(run.diagnoses)}"] if run.diagnoses else []
    return "\n".join(lines)


def as_json(run: RunSummary) -> dict[str, Any]:
    """JSON-able form."""
    fields = {"told" if name == "diagnoses" else name: value for name, value in vars(run).items() if name != "curve"}
    return json.loads(json.dumps(fields))


def _column(value: float | None, form: str) -> str:
    width = int(form.split(".")[0].rstrip(","))
    return f"{'-':>{width}}" if value is None else format(value, form)


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _evaluated(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({name for row in rows for name in row if is_eval_mean(name)})


def _evaluation(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float, int]:
    values = [(row[name], row["step"]) for row in rows if row.get(name) is not None]
    best, step = max(values, key=lambda pair: pair[0])
    return values[0][0], best, step
