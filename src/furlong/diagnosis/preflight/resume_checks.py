"""CKPT01, CFG05 and DATA01 rows: what a run continues or replays: its checkpoint's data, dumps, runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.config.environment_specs import parse_environments
from furlong.config.sections import Config
from furlong.core.sample import Group
from furlong.data.mixture import mixture_settings
from furlong.data.prompt import PromptFormat
from furlong.data.prompt_path import PromptDataPath
from furlong.data.source import check_same_settings, prompt_settings
from furlong.diagnosis.preflight.checkpoint_checks import resumed
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.diagnosis.preflight.flag_checks import from_problem
from furlong.errors import CheckpointError, DataError, RolloutError
from furlong.files.checkpoint_folder import read_state, step_from_folder
from furlong.tracking.rollout_dump import check_dump, load_samples

SHOWN = 3
COUNTED = ("num_prompts",)  # settings that are known only once the whole file was read


def _data_settings(config: Config) -> dict[str, Any]:
    """Return the settings of the prompt files: by environment, if there are several."""
    specs = parse_environments(config.session.environment)
    own_files = {spec.name: spec.prompt_data or str(config.data.prompt_data) for spec in specs}
    parts = {
        name: prompt_settings(
            PromptDataPath.parse(path), PromptFormat.of(config), skip_bad_rows=config.fault.skip_bad_rows
        )
        for name, path in (own_files or {"": str(config.data.prompt_data)}).items()
    }
    if len(parts) == 1:
        return next(iter(parts.values())) | {"streaming": config.data.streaming_data}
    streaming = {"streaming": dict.fromkeys(parts, config.data.streaming_data)}
    return mixture_settings({spec.name: spec.weight for spec in specs}, parts) | streaming


def checkpoint_data(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT01: a checkpoint whose data position is of other data, or of another order."""
    folder, data = resumed(context), context.config.data
    if folder is None or not context.reads_prompts or context.rows is None:
        return
    saved = read_state(folder).get("source", {}).get("settings")
    if not isinstance(saved, dict):
        return
    now = _data_settings(context.config) | {"shuffle": data.rollout_shuffle, "rollout_seed": data.rollout_seed}
    shared = {key: value for key, value in saved.items() if key in now and key not in COUNTED}
    try:
        check_same_settings(
            shared,
            {key: now[key] for key in shared},
            data_changed="data" in context.config.checkpoint.allow_changed_inputs,
        )
    except CheckpointError as error:
        finding, _, remedy = str(error).rpartition("; ")
        yield diagnosis(
            "CKPT01",
            f"--load {context.config.checkpoint.load}, {folder.name}: {finding}",
            cause="",
            remedy=remedy,
            evidence={"folder": str(folder)},
        )


def rollout_dumps(context: PreflightContext) -> Iterator[Diagnosis]:
    """CFG05: dumps of --load-debug-rollout-data that are missing; DATA01: those that are not dumps."""
    config = context.config
    template, folder = config.debug.load_debug_rollout_data, resumed(context)
    if template is None or "{rollout_id}" not in template:
        return
    first = config.data.start_rollout_id or 0 if folder is None else step_from_folder(folder)
    last = max(config.data.num_rollout or 0, first + 1)
    paths = {number: Path(template.replace("{rollout_id}", str(number))) for number in range(first, last)}
    missing = [number for number, path in paths.items() if not path.is_file()]
    if missing:
        parent = paths[missing[0]].parent
        content = sorted(each.name for each in parent.iterdir())[:4] if parent.is_dir() else "no such folder"
        is_folder = paths[missing[0]].is_dir()
        state = "is a folder, not a file" if is_folder else f"does not exist ({parent} contains: {content})"
        num_missing = f"{len(missing)} of {len(paths)} rollouts have no dump; " if len(paths) > 1 else ""
        yield diagnosis(
            "CFG05",
            f"--load-debug-rollout-data {template}: {num_missing}{paths[missing[0]]} {state}",
            cause="--save-debug-rollout-data and --dump-details write one file per rollout.",
            remedy="use the same pattern as --save-debug-rollout-data, or set --start-rollout-id"
            if missing[0] == first
            else f"use --num-rollout {missing[0]}, or record the others",
            evidence={"missing": missing[:SHOWN], "num_missing": len(missing)},
        )
    for number, path in paths.items():
        if number not in missing:
            try:
                if number != first:
                    check_dump(path, number)
                    continue
                yield from _unfilled_steps(context, load_samples(path, number).groups)
            except (DataError, RolloutError) as error:
                yield from_problem(f"--load-debug-rollout-data: {error}", {"rollout_id": number}, "DATA01")
                return


def _unfilled_steps(context: PreflightContext, groups: list[Group]) -> Iterator[Diagnosis]:
    """CFG01: a dump, or the share of it that is replayed, does not fill optimizer steps."""
    from furlong.rollout.replay import subsampled  # they import torch
    from furlong.rollout.train_batch import count_rollouts
    from furlong.training.packing import leftover_problem

    config = context.config
    kept = count_rollouts(subsampled(groups, config.debug.load_debug_rollout_data_subsample))
    size = config.train.global_batch_size
    if size and (problem := leftover_problem(kept, size)):
        yield from_problem(problem, {"rollouts": kept, "global_batch_size": size}, "CFG01")


CHECKS = (checkpoint_data, rollout_dumps)
