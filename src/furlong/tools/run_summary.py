"""Summarizes runs: steps, rewards, evaluations and speed. Reads files only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from furlong.tracking.console import is_eval_mean
from furlong.tracking.run_files import EVENTS, METRICS, read_intact_rows

SHARE = 10  # the first and last 1/SHARE of the steps are a run's beginning and end
NAME_WIDTH = 24


@dataclass(frozen=True)
class RunSummary:
    """A run's numbers; None or empty if not measured.

    reward: its mean over the first and the last tenth of the steps. evaluations: for each set the first mean reward,
    the best one, and its step. length: tokens per response at the end. diagnoses: ids of warnings and errors.
    """

    name: str
    num_steps: int
    reward: tuple[float, float] | None
    evaluations: Mapping[str, tuple[float, float, int]]
    length: float | None
    tokens_per_s: float | None
    step_s: float | None
    diagnoses: tuple[str, ...]


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
    )


def table(runs: Sequence[RunSummary]) -> str:
    """Format runs as a table: a line of numbers each, then their evaluation sets and diagnoses."""
    lines = [f"{'run':{NAME_WIDTH}}  steps  {'reward':>16}  length    tok/s  s/step"]
    for run in runs:
        reward = "-" if run.reward is None else f"{run.reward[0]:.3f} to {run.reward[1]:.3f}"
        name = run.name if len(run.name) <= NAME_WIDTH else f"...{run.name[3 - NAME_WIDTH :]}"
        lines.append(
            f"{name:{NAME_WIDTH}}  {run.num_steps:5}  {reward:>16}  {_shown(run.length, '6.1f')}  "
            f"{_shown(run.tokens_per_s, '7,.0f')}  {_shown(run.step_s, '6.2f')}"
        )
        lines += [
            f"  eval {name}: {first:.3f} at first, best {best:.3f} at step {step}"
            for name, (first, best, step) in run.evaluations.items()
        ]
        lines += [f"  diagnoses: {', '.join(run.diagnoses)}"] if run.diagnoses else []
    return "\n".join(lines)


def as_json(run: RunSummary) -> dict[str, Any]:
    """JSON-able form."""
    return json.loads(json.dumps({"told" if name == "diagnoses" else name: value for name, value in vars(run).items()}))


def _shown(value: float | None, form: str) -> str:
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
