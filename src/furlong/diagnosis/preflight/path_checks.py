"""DISK01 before a run: a folder where the run writes a file, or a file where it writes a folder."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from pathlib import Path

from furlong.catalogue import Diagnosis, diagnosis
from furlong.diagnosis.preflight.context import PreflightContext

ROLLOUT, RANK = "{rollout_id}", "{rank}"
RUN_FILES = ("config.json", "metrics.jsonl", "ledger.jsonl", "events.jsonl", "run.log")
SAVE_FILES = ("latest_checkpointed_iteration.txt",)


def occupied_paths(context: PreflightContext) -> Iterator[Diagnosis]:
    """DISK01: output paths that an entry of the other kind occupies."""
    config = context.config
    fixed = (("--output-dir", config.track.output_dir, RUN_FILES), ("--save", config.checkpoint.save, SAVE_FILES))
    for flag, folder, names in fixed:
        if folder is not None and (name := next((n for n in names if (Path(folder) / n).is_dir()), None)) is not None:
            yield _occupied(flag, folder, Path(folder) / name, wants_folder=False)
    templates = (
        ("--save-debug-rollout-data", config.debug.save_debug_rollout_data, False),
        ("--save-debug-train-data", config.debug.save_debug_train_data, False),
        ("--save-hf", config.checkpoint.save_hf, True),
    )
    for flag, template, wants_folder in templates:
        if template is not None:
            for path in _written(template, config.data.num_rollout):
                if path.is_dir() != wants_folder:
                    yield _occupied(flag, template, path, wants_folder=wants_folder)
                    break  # the first is enough


def _written(template: str, num_rollout: int | None) -> Iterator[Path]:
    """Yield the existing paths that a run writes to, by a template with {rollout_id} and {rank}."""
    pattern = re.escape(template).replace(re.escape(RANK), r"\d+")
    pattern = pattern.replace(re.escape(ROLLOUT), r"(?P<id>(?:eval_)?\d+)", 1).replace(re.escape(ROLLOUT), "(?P=id)")
    wildcards = glob.escape(template).replace(ROLLOUT, "*").replace(RANK, "*")
    for path in sorted(glob.glob(wildcards)):
        match = re.fullmatch(pattern, path)
        if match is not None and (num_rollout is None or int(match["id"].removeprefix("eval_")) <= num_rollout):
            yield Path(path)


def _occupied(flag: str, value: str, path: Path, *, wants_folder: bool) -> Diagnosis:
    kinds = ("a file", "a folder") if wants_folder else ("a folder", "a file")
    return diagnosis(
        "DISK01",
        f"{flag} {value}: {path} is {kinds[0]}; the run writes {kinds[1]} of that name",
        cause="",
        remedy=f"remove it, or use another path with {flag}",
        evidence={"path": str(path)},
    )
