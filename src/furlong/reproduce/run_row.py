"""Runs the commands of a row for several seeds, and reads their accuracy, curves and times."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from furlong.errors import ConfigError, DataError, RolloutError
from furlong.files.atomic import write_atomically
from furlong.files.sample_file import load_samples
from furlong.reproduce.published import accuracy_interval
from furlong.reproduce.rows import (
    ResultRow,
    Settings,
    missing_needs,
    num_steps,
    prepare_commands,
    seed_commands,
    shown_command,
    write_data,
)
from furlong.tracking.curves import Panel, svg_of
from furlong.tracking.run_files import read_steps

RESULT, FIGURES, CURVE = "result.json", "figures.json", "curve.svg"
REWARD, HELD_OUT, MISMATCH = "rollout/raw_reward", "eval/held_out", "train/train_rollout_logprob_abs_diff"
DIGITS = 4  # of numbers in curves
LOG_LINES = 12  # shown when a command fails
STOP_S = 20.0  # that a command has between SIGTERM and SIGKILL

Announce = Callable[[str], None]
Json = dict[str, Any]


def run_row(row: ResultRow, settings: Settings, announce: Announce) -> Json:
    """Run a row over its seeds, write `result.json` and `curve.svg` into the folder, and return the result.

    A seed whose commands have already ended in this folder is not run again. A command that fails, or that still runs
    at the row's time limit, makes a result with the status `failed` and the reason. Raises ConfigError if something
    that the row needs is missing.
    """
    if missing := missing_needs(row, settings):
        raise ConfigError(f"row {row.name} needs {' and '.join(missing)}")
    settings.out.mkdir(parents=True, exist_ok=True)
    result = _head(row, settings)
    deadline = None if settings.row_limit is None else time.monotonic() + settings.row_limit
    try:
        _prepare(row, settings, deadline, announce)
        seeds, failures = _run_seeds(row, settings, deadline, announce)
        result |= summarize_seeds(seeds) if seeds else {}
        if failures:
            raise failures[0]
    except RolloutError as error:
        result |= {"status": "failed", "reason": str(error)}
    write_atomically(settings.out / RESULT, json.dumps(result, indent=1) + "\n")
    if "curves" in result:
        write_atomically(settings.out / CURVE, svg_of(seed_panels(result)))
    return result


def summarize_seeds(seeds: Sequence[Mapping[str, Any]]) -> Json:
    """Return the accuracies with intervals, times and curves of these seeds; `flat` if the intervals overlap."""
    before, after = (accuracy_interval([seed[name] for seed in seeds]) for name in ("before", "after"))
    is_flat = after.low <= before.high and before.low <= after.high
    return {
        "status": "flat" if is_flat else "lower" if after.value < before.value else "higher",
        "date": seeds[-1]["date"],
        "machine": seeds[0]["machine"],
        "num_problems": len(seeds[0]["after"]),
        "seeds": [seed["seed"] for seed in seeds],
        "before": asdict(before),
        "after": asdict(after),
        "after_by_seed": [round(sum(seed["after"]) / len(seed["after"]), DIGITS) for seed in seeds],
        "wall_s": [seed["wall_s"] for seed in seeds],
        "step_s": [seed["step_s"] for seed in seeds],
        "tokens": [seed["tokens"] for seed in seeds],
        "curves": {
            metric: {str(seed["seed"]): seed["curves"][metric] for seed in seeds if metric in seed["curves"]}
            for metric in (HELD_OUT, REWARD, MISMATCH)
        },
    }


def seed_panels(result: Mapping[str, Any]) -> list[Panel]:
    """Return a panel per metric with a curve per seed."""
    return [
        Panel(
            metric,
            {f"seed {seed}": [(int(step), float(value)) for step, value in points] for seed, points in curves.items()},
        )
        for metric, curves in result["curves"].items()
        if curves
    ]


def machine_record() -> Json:
    """Describe the machine and the versions that numbers were measured with."""
    from furlong.version import __version__

    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "furlong": __version__,
    }


def _head(row: ResultRow, settings: Settings) -> Json:
    seed = settings.seeds[0]
    commands = [*prepare_commands(row, settings), *seed_commands(row, settings, seed).values()]
    return {
        "row": row.name,
        **_conditions(),
        "steps": num_steps(row, settings),
        "commands": [shown_command(words) for words in commands],
    }


def _conditions() -> Json:
    return {"date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine_record()}


def _prepare(row: ResultRow, settings: Settings, deadline: float | None, announce: Announce) -> None:
    """Run the commands that come before all seeds, unless they have ended here before."""
    commands = prepare_commands(row, settings)
    done = settings.out / "prepared" / FIGURES
    if not commands or _is_done(done, commands, settings):
        return
    write_data(row, settings, 0)
    for i, words in enumerate(commands, 1):
        announce(shown_command(words))
        _run(words, settings.out / "prepared" / f"{i}.log", deadline)
    write_atomically(done, json.dumps({"commands": commands}) + "\n")


def _run_seeds(
    row: ResultRow, settings: Settings, deadline: float | None, announce: Announce
) -> tuple[list[Json], list[RolloutError]]:
    """Run the seeds, `settings.parallel` at a time, until one fails; returns the figures of seeds, and the failures."""
    failures: list[RolloutError] = []

    def attempt(seed: int) -> Json | None:
        if failures:
            return None
        try:
            return _run_seed(row, settings, seed, deadline, announce)
        except RolloutError as error:
            failures.append(error)
            return None

    with ThreadPoolExecutor(settings.parallel) as pool:
        ended = list(pool.map(attempt, settings.seeds))
    return [figures for figures in ended if figures is not None], failures


def _run_seed(row: ResultRow, settings: Settings, seed: int, deadline: float | None, announce: Announce) -> Json:
    folder = settings.out / f"seed-{seed}"
    commands = seed_commands(row, settings, seed)
    if _is_done(folder / FIGURES, list(commands.values()), settings):
        announce(f"seed {seed}: already in {folder}")
        return json.loads((folder / FIGURES).read_text(encoding="utf-8"))
    if folder.exists():
        raise ConfigError(f"{folder} contains a run that did not end; delete it, or choose another --out")
    write_data(row, settings, seed)
    conditions = _conditions()
    wall_s: dict[str, float] = {}
    for name, words in commands.items():
        announce(shown_command(words))
        wall_s[name] = _run(words, folder / f"{name}.log", deadline)
    figures = _figures(row, folder, tuple(commands), seed, round(wall_s["run"], 1))
    write_atomically(
        folder / FIGURES, json.dumps({"commands": list(commands.values()), **conditions, **figures}) + "\n"
    )
    before, after = (sum(figures[name]) / len(figures[name]) for name in ("before", "after"))
    announce(f"seed {seed}: accuracy {before:.1%} before, {after:.1%} after, in {wall_s['run']:.0f} s")
    return conditions | figures


def _is_done(done: Path, commands: list[list[str]], settings: Settings) -> bool:
    """Whether these commands have ended in this folder. Raises ConfigError if others have."""
    if not done.exists():
        return False
    if json.loads(done.read_text(encoding="utf-8"))["commands"] == commands:
        return True
    raise ConfigError(f"{settings.out} contains runs with other flags ({done}); choose another --out")


def _run(words: Sequence[str], log: Path, deadline: float | None) -> float:
    """Run a command and return its seconds. Raises RolloutError if it fails, or is stopped at the deadline."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("wb") as output, subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            code = process.wait(None if deadline is None else max(deadline - started, 0.0))
        except subprocess.TimeoutExpired:
            _stop(process)
            seconds = time.monotonic() - started
            raise RolloutError(f"stopped at the time limit after {seconds:.0f} s, see {log}") from None
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
        raise RolloutError("\n".join([f"exit code {code}, see {log}:", *last]))
    return time.monotonic() - started


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _figures(row: ResultRow, folder: Path, names: Sequence[str], seed: int, wall_s: float) -> Json:
    """Read what the runs of a seed recorded. The first run evaluates before training, the last one after it."""
    rows = read_steps(folder / "run")
    curves: dict[str, list[list[float]]] = {
        metric: [[step, _rounded(values[metric])] for step, values in rows if metric in values]
        for metric in (REWARD, MISMATCH)
    }
    evaluations = [right for name in dict.fromkeys((names[0], names[-1])) for right in _evaluations(row, folder / name)]
    before, after = evaluations[0], evaluations[-1]
    steps = [step for step, values in rows if HELD_OUT in values] if names[0] == "run" else [0, rows[-1][0]]
    curves[HELD_OUT] = [
        [step, _rounded(sum(right) / len(right))] for step, right in zip(steps, evaluations, strict=True)
    ]
    return {
        "seed": seed,
        "before": before,
        "after": after,
        "wall_s": wall_s,
        "step_s": round(sum(values.get("perf/step_time", 0.0) for _, values in rows), 1),
        "tokens": round(sum(_tokens(values) for _, values in rows)),
        "curves": {metric: points for metric, points in curves.items() if points},
    }


def _tokens(values: Mapping[str, float]) -> float:
    return values.get("rollout/response_lengths", 0.0) * values.get("train/global_batch_size", 0.0)


def _evaluations(row: ResultRow, run: Path) -> list[list[int]]:
    """Return for each evaluation, and each held-out problem, whether it was answered correctly."""
    dumps = sorted((run / "rollouts").glob("eval_*.safetensors"), key=lambda path: int(path.stem.partition("_")[2]))
    if not dumps:
        raise DataError(f"{run} has no evaluation; read the log beside it")
    key = row.task.accuracy_key
    rewards = [[group.samples[0].reward for group in load_samples(dump).groups] for dump in dumps]
    return [
        [int((reward[key] if key and isinstance(reward, Mapping) else reward) == 1.0) for reward in evaluation]
        for evaluation in rewards
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
