"""Where a run's dumps of samples and training batches are, also in a folder that was moved or copied."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVALUATION = "eval_"
ROLLOUT_ID = "{rollout_id}"


@dataclass(frozen=True)
class SampleFile:
    """One dump: of the rollout that step `rollout_id` + 1 trains on, or of the evaluation after `rollout_id` steps."""

    path: Path
    rollout_id: int
    is_eval: bool

    @property
    def step(self) -> int:
        """The step, as in metrics.jsonl."""
        return self.rollout_id if self.is_eval else self.rollout_id + 1


def sample_files(folder: Path, flags: Mapping[str, Any]) -> list[SampleFile]:
    """Return the dumps of --save-debug-rollout-data, the newest first."""
    path = dump_path(folder, flags)
    if path is None:
        return []
    before, _, after = path.name.partition(ROLLOUT_ID)
    pattern = re.compile(rf"{re.escape(before)}({EVALUATION})?(\d+){re.escape(after)}")
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    files = [SampleFile(parent / match[0], int(match[2]), match[1] is not None) for match in matches]
    return sorted(files, key=lambda file: (-file.step, file.is_eval))


def dump_path(folder: Path, flags: Mapping[str, Any]) -> Path | None:
    """Return the path of the dumps, with `{rollout_id}`; None if the run saves none."""
    template = flags.get("save_debug_rollout_data")
    return _located(folder, flags, template) if template else None


def batch_file(folder: Path, flags: Mapping[str, Any], rollout_id: int) -> Path | None:
    """Return the training batch of a rollout (--save-debug-train-data), None if it was not saved."""
    template = flags.get("save_debug_train_data")
    if not template:
        return None
    name = _located(folder, flags, template)
    path = Path(str(name).replace(ROLLOUT_ID, str(rollout_id)).replace("{rank}", "0"))
    return path if path.is_file() else None


def _located(folder: Path, flags: Mapping[str, Any], template: str) -> Path:
    """Return the path of a template: below the run's folder if it was below --output-dir."""
    output_dir = str(flags.get("output_dir") or "")
    if output_dir and Path(template).is_relative_to(output_dir):
        return folder / Path(template).relative_to(output_dir)
    return Path(template)
