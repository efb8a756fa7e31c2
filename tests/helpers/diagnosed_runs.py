"""Short runs of the quickstart model, which are healthy unless a fault is injected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from furlong.cli import main_train
from furlong.quickstart.addition import problems, write_prompts
from furlong.quickstart.quickstart import model_folder
from runs import flags

Event = dict[str, Any]


def arithmetic(folder: Path, *more: Any, **changes: Any) -> list[str]:
    """Return the flags of a healthy run; for `changes` see `runs.flags`."""
    data = folder.parent / "problems.jsonl"
    if not data.exists():
        data.parent.mkdir(parents=True, exist_ok=True)
        write_prompts(data, problems(64, seed=3))
    own = {
        "input_key": "prompt", "rm_type": "math", "num_rollout": 3, "rollout_batch_size": 8, "n_samples_per_prompt": 4,
        "lr": 1e-4,
    }  # fmt: skip
    return flags(model_folder(), data, folder, *more, **own | changes)


def events(folder: Path, name: str | None = None) -> list[Event]:
    """Return the events of a run, optionally only those with the given name."""
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if name in (None, event["event"])]


def told(folder: Path) -> dict[str, Event]:
    """Return the first event of each diagnosis of a run, by id."""
    return {event["id"]: event for event in reversed(events(folder, "diagnosis"))}


def run(folder: Path, *more: Any, **changes: Any) -> tuple[int, dict[str, Event]]:
    """Run like `train.py`, and return the exit code and the diagnoses."""
    code = main_train(arithmetic(folder, *more, **changes))
    return code, told(folder)
