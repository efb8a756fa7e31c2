"""CKPT rows: the checkpoint to resume from, the folder to save to, and the dumps to replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.config.facts import further_models
from furlong.config.topology import Topology
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.diagnosis.preflight.flag_checks import from_problem
from furlong.errors import CheckpointError, DataError, RolloutError
from furlong.files.checkpoint_folder import (
    find_checkpoint,
    find_complete_folders,
    find_foreign_weights,
    find_resume_folder,
    folder_name,
    read_object,
    read_state,
    recovery,
    start_problem,
    step_from_folder,
)
from furlong.files.sample_file import check_dump
from furlong.tracking.run_files import read_sections
from furlong.training.megatron.parallel_layout import Layout, described

SHOWN = 8  # names of a folder's content in a message


def folders_to_load(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT01 and CKPT02: --load or the folder of a frozen model lacks the requested checkpoint."""
    flags = context.config.checkpoint
    save = None if flags.save is None or flags.finetune else Path(flags.save)
    for flag, path, step_flag, step, save_dir in (
        ("--load", flags.load, "--ckpt-step", flags.ckpt_step, save),
        *((model.flag, model.load, model.step_flag, model.step, None) for model in further_models(context.config)),
    ):
        folder = Path(path or "")
        if path is None or not folder.is_dir():
            continue  # reported with the flags
        if _is_run(folder):
            saved = read_sections(folder).get("checkpoint", {}).get("save")
            yield diagnosis(
                "CKPT01",
                f"{flag} {folder} is the folder of a run, not of checkpoints",
                cause="A run's folder contains its records; checkpoints are in the folder of --save.",
                remedy=f"use {flag} {saved}" if saved else f"remove {flag}: that run had no --save",
                evidence={"folder": str(folder), "save": saved},
            )
        elif find_foreign_weights(folder, step=step) is None:
            yield from _no_checkpoint(flag, folder, step_flag, step, save_dir)


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "ledger.jsonl").is_file()


def _no_checkpoint(
    flag: str, folder: Path, step_flag: str, step: int | None, save_dir: Path | None
) -> Iterator[Diagnosis]:
    steps = [step_from_folder(complete) for complete in find_complete_folders(folder)]
    evidence: dict[str, Any] = {"folder": str(folder), "steps": steps}
    complete = ", ".join(map(str, steps)) or "no complete checkpoint"
    if step is not None and not (folder / folder_name(step)).is_dir():
        nearest = min(steps, key=lambda saved: abs(saved - step), default=None)
        yield diagnosis(
            "CKPT02",
            f"{step_flag} {step}: {folder} has no {folder_name(step)}; complete: {complete}",
            remedy=f"use a folder that --save wrote with {flag}" if nearest is None else f"use {step_flag} {nearest}",
            evidence=evidence | {"nearest": nearest},
        )
        return
    try:
        found = find_checkpoint(folder, step=step, save_dir=save_dir, flag=flag)
    except CheckpointError as error:
        finding, _, remedy = str(error).rpartition("; ")
        if flag != "--load" and not steps:
            finding = f"{flag} {folder} has neither a config.json nor a complete checkpoint"
            remedy = "give a Hugging Face folder, or a folder that --save wrote"
        if folder.name in [each.name for each in find_complete_folders(folder.parent)]:
            finding = f"{flag} {folder} is a single checkpoint, not the folder of all checkpoints"
            remedy = f"use {flag} {folder.parent}"
            if step_flag != flag:
                remedy += f" {step_flag} {step_from_folder(folder)}"
        if remedy == "use another --ckpt-step":
            others = [saved for saved in steps if saved != (max(steps) if step is None else step)]
            restored = "restore it from a copy, or start a new run"
            remedy = f"use {step_flag} {max(others)}" if others and step_flag != flag else restored
        cause = "" if steps else None  # a checkpoint is there, and the finding says what is wrong with it
        yield diagnosis("CKPT01", finding, cause=cause, remedy=remedy, evidence=evidence)
        return
    if found is not None and step is None and (why := recovery(folder)) is not None:
        yield diagnosis(
            "CKPT01",
            f"{flag} {folder}: {why}, which is loaded",
            cause="The file was deleted, damaged or not copied with the folders, or a save was killed before writing "
            "it.",
            remedy=f"no action needed if that is the right one; complete: {complete} (see {step_flag}); to start over, "
            "use another folder",
            severity="warning",
            evidence=evidence,
        )


def resumed(context: PreflightContext) -> Path | None:
    """Return the checkpoint that the run would resume from, if there is a readable one."""
    flags = context.config.checkpoint
    folder = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if folder is None or not folder.is_dir():
        return None
    save = None if flags.save is None else Path(flags.save)
    try:
        return find_checkpoint(folder, step=flags.ckpt_step, save_dir=save)
    except CheckpointError:  # reported by folders_to_load
        return None


def folder_to_save(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT08: --save contains checkpoints that this run does not resume from and would overwrite."""
    flags = context.config.checkpoint
    if flags.save is None or context.config.data.num_rollout == 0:
        return
    save, start = Path(flags.save), resumed(context)
    loaded = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if loaded is not None and loaded.resolve() == save.resolve():
        return  # its own; a kill may have left one that the tracker does not name
    first = step_from_folder(start) if start is not None else context.config.data.start_rollout_id or 0
    later = [step for step in map(step_from_folder, find_complete_folders(save)) if step > first]
    if later:
        saved = f"rollout {later[0]}" if len(later) == 1 else f"rollouts {later[0]} to {later[-1]}"
        yield diagnosis(
            "CKPT08",
            f"--save {save} contains checkpoints of {saved}; this run starts at {first} and would overwrite them",
            remedy=f"use --load {save}{' without --finetune' * flags.finetune} to resume, or another --save folder",
            evidence={"folder": str(save), "steps": later, "first": first},
        )


def layout(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT05: a checkpoint of another layout or backend. Any can read it: tensors on disk are not sharded."""
    folder = resumed(context)
    if folder is None:
        return
    has_layout = (folder / "trainer" / "trainer.json").is_file()
    saved = described(read_object(folder, "trainer/trainer.json").get("layout") if has_layout else None)
    train, current = context.config.train, described(None)
    if train.train_backend == "megatron":
        layers = None if context.model is None else context.model.text_config.get("num_hidden_layers")
        current = described(asdict(Layout.of(train, context.config.megatron, layers)))
    before = len(list((folder / "trainer").glob("trainer_rng*.safetensors")))  # one per rank
    now = max(1, Topology.of(context.config).num_ranks)
    if before in (0, now) and saved == current:
        return
    new = f"; ranks from {before} on start with new random states" if 0 < before < now else ""
    yield diagnosis(
        "CKPT05",
        f"{folder} was saved by {before} training ranks with {saved}; this run has {now} with {current}; each "
        f"rank reads its part{new}",
        remedy="no action needed",
        evidence={"folder": str(folder), "saved_by": before, "ranks": now, "saved_with": saved, "run": current},
    )


def resume_plan(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT06: what a checkpoint restores; CKPT01: another --start-rollout-id; CFG01: rollouts that do not fit."""
    load, folder = context.config.checkpoint.load, resumed(context)
    if folder is not None and (problem := start_problem(context.config.data.start_rollout_id, folder)):
        yield from_problem(problem, {"folder": str(folder)}, "CKPT01")
    if folder is not None:
        yield _resume_summary(context, folder)
    elif (
        load is not None
        and context.config.checkpoint.ckpt_step is None
        and (Path(load) / "config.json").is_file()
        and not _is_run(Path(load))
    ):
        yield diagnosis(
            "CKPT06",
            f"--load {load} is a Hugging Face model: training starts from its weights at rollout 0",
            cause="It has no optimizer, random state or position in the data.",
            remedy="no action needed if that is intended; to resume a run, use the folder of --save",
            severity="info",
            evidence={"step": 0},
        )


def _resume_summary(context: PreflightContext, folder: Path) -> Diagnosis:
    flags, total, step = context.config.checkpoint, context.config.data.num_rollout, step_from_folder(folder)
    files = " ".join(path.name for path in (folder / "trainer").iterdir())
    restored = ["weights", "position in the data", f"{len(read_state(folder)['ahead'])} rollouts generated ahead"]
    missing: list[str] = []
    for name, part, is_excluded in (
        ("optimizer", "optimizer", flags.no_load_optim),
        ("random state", "rng", flags.no_load_rng),
    ):
        if not is_excluded:
            (restored if part in files else missing).append(name)
    evidence = {"step": step, "num_rollout": total, "restored": restored, "missing": missing}
    finding = f"--load {flags.load} resumes at rollout {step}{f' of {total}' if total else ''}: {', '.join(restored)}"
    if total is not None and step >= total:
        return diagnosis(
            "CKPT06",
            f"{finding}; no rollouts are left",
            cause="The run is complete.",
            remedy=f"use --num-rollout {step + total} to continue it, or another --load",
            evidence=evidence,
        )
    if missing:
        names = " and ".join(missing)
        return diagnosis(
            "CKPT06",
            f"{finding}; not in the checkpoint: {names}",
            cause="It was saved with --no-save-optim." if "optimizer" in missing else None,
            remedy=f"{names} will be initialized; no action needed if that is intended",
            evidence=evidence,
        )
    remedy = "no action needed; to start over, remove --load"
    return diagnosis("CKPT06", finding, severity="info", remedy=remedy, evidence=evidence)


def rollout_dumps(context: PreflightContext) -> Iterator[Diagnosis]:
    """CFG05: dumps of --load-debug-rollout-data that are missing; DATA01: a first one that is not a dump."""
    data, template, folder = context.config.data, context.config.debug.load_debug_rollout_data, resumed(context)
    if template is None or "{rollout_id}" not in template:
        return
    first = data.start_rollout_id or 0 if folder is None else step_from_folder(folder)
    last = max(data.num_rollout or 0, first + 1)
    paths = {number: Path(template.replace("{rollout_id}", str(number))) for number in range(first, last)}
    if missing := [number for number, path in paths.items() if not path.is_file()]:
        parent = paths[missing[0]].parent
        content = sorted(each.name for each in parent.iterdir())[:4] if parent.is_dir() else "no such folder"
        yield diagnosis(
            "CFG05",
            f"--load-debug-rollout-data {template}: {len(missing)} of {len(paths)} rollouts have no dump; "
            f"{paths[missing[0]]} is not a file ({parent} contains: {content})",
            cause="--save-debug-rollout-data and --dump-details write one file per rollout.",
            remedy="use the same pattern as --save-debug-rollout-data, or set --start-rollout-id"
            if missing[0] == first
            else f"use --num-rollout {missing[0]}, or record the others",
            evidence={"missing": missing[:SHOWN], "num_missing": len(missing)},
        )
    elif paths[first].is_file():
        try:
            check_dump(paths[first], first)
        except (DataError, RolloutError) as error:
            yield from_problem(f"--load-debug-rollout-data: {error}", {"rollout_id": first}, "DATA01")


CHECKS = (folders_to_load, folder_to_save, layout, resume_plan, rollout_dumps)
