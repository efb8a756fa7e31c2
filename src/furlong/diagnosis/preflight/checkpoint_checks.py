"""CKPT rows: the checkpoint to continue from, and the folder to save to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open

from furlong.config.sections.checkpoint import CheckpointFlags
from furlong.config.topology import Topology
from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.core.checkpoint_folder import (
    TRACKER,
    find_checkpoint,
    find_complete_folders,
    find_foreign_weights,
    find_resume_folder,
    folder_name,
    newest_step,
    step_from_folder,
)
from furlong.core.text import abbreviate
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.errors import CheckpointError
from furlong.training.megatron.parallel_layout import Layout, described

HELD = 8  # names of a folder's content that are shown


@dataclass(frozen=True)
class _Source:
    """A folder of checkpoints that a flag names."""

    flag: str
    step_flag: str
    folder: Path
    step: int | None
    save: Path | None = None

    @cached_property
    def steps(self) -> list[int]:
        """Its complete checkpoints, oldest first."""
        return [step_from_folder(folder) for folder in find_complete_folders(self.folder)]

    @property
    def evidence(self) -> dict[str, Any]:
        """What every finding says of it."""
        return {"folder": str(self.folder), "steps": self.steps}


def _sources(context: PreflightContext) -> list[_Source]:
    flags = context.config.checkpoint
    found: list[_Source] = []
    loaded = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=False)
    if loaded is not None:
        save = None if flags.save is None or flags.finetune else Path(flags.save)
        found.append(_Source("--load", "--ckpt-step", loaded, flags.ckpt_step, save))
    reference = None if flags.ref_load is None else Path(flags.ref_load)
    if reference is not None and find_foreign_weights(reference, step=flags.ref_ckpt_step) is None:
        found.append(_Source("--ref-load", "--ref-ckpt-step", reference, flags.ref_ckpt_step))
    return [source for source in found if source.folder.is_dir()]  # else it is said with the flags


def folders_to_load(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT01 and CKPT02: --load and --ref-load hold the checkpoint that is asked for."""
    for source in _sources(context):
        if (found := _no_checkpoint(source)) is not None:
            yield found
    flags = context.config.checkpoint
    if flags.load is not None and _is_run(Path(flags.load)):
        saved = json.loads((Path(flags.load) / "config.json").read_text())["config"]["checkpoint"]["save"]
        yield diagnosis(
            "CKPT01",
            f"--load {flags.load} is the folder of a run, not one of checkpoints",
            cause="A run's folder has its records; checkpoints are where its --save says.",
            remedy=f"--load {saved}" if saved else "leave it out: that run had no --save",
            evidence={"folder": flags.load, "save": saved},
        )
    loads = ("--load", flags.load, "--ckpt-step", flags.ckpt_step)
    for load, folder, flag, step in (loads, ("--ref-load", flags.ref_load, "--ref-ckpt-step", flags.ref_ckpt_step)):
        if folder is not None and step is not None and (Path(folder) / "config.json").exists():
            yield diagnosis(
                "CFG02",
                f"{flag} {step} has no effect: {load} {folder} is a Hugging Face folder",
                cause="",
                remedy="remove it, or give a folder that --save wrote",
            )


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run's --output-dir, whose config.json is no model's."""
    return (folder / "config.json").is_file() and (folder / "ledger.jsonl").is_file()


def _no_checkpoint(source: _Source) -> Diagnosis | None:
    """Why a folder has no checkpoint to continue from; None if it has one, or need not have one yet."""
    if source.step is not None and not (source.folder / folder_name(source.step)).is_dir():
        return _no_such_step(source, source.step)
    wanted = source.step
    try:
        if wanted is None:
            wanted = newest_step(source.folder)
        if wanted is not None:
            find_checkpoint(source.folder, step=wanted, save_dir=source.save, flag=source.flag)
            return None
    except CheckpointError as error:
        others = [step for step in source.steps if step != wanted]
        return diagnosis(
            "CKPT01",
            f"{source.flag}: {error}".partition("; use ")[0],
            cause="The save was interrupted, or files were removed or copied in part.",
            remedy=f"{source.step_flag} {others[-1]}" if others else f"give another folder with {source.flag}",
            evidence=source.evidence,
        )
    return _no_tracker(source)


def _no_such_step(source: _Source, named: int) -> Diagnosis:
    """The flag for the step names one that is not there."""
    nearest = min(source.steps, key=lambda step: abs(step - named), default=None)
    held = ", ".join(map(str, source.steps)) or "no complete one"
    way = f"give a folder that --save wrote with {source.flag}"
    return diagnosis(
        "CKPT02",
        f"{source.step_flag} {named}: {source.folder} has no {folder_name(named)}; it holds {held}",
        remedy=way if nearest is None else f"{source.step_flag} {nearest}",
        evidence=source.evidence | {"nearest": nearest},
    )


def _no_tracker(source: _Source) -> Diagnosis | None:
    """Nothing in the folder says which checkpoint is the newest; None if the run may be the first that saves there."""
    if source.save is not None and source.save.resolve() == source.folder.resolve():
        if len(source.steps) < 2:
            return None  # its first start, or one whose first save was killed before it was named
        return diagnosis(
            "CKPT01",
            f"{source.flag} {source.folder}: no {TRACKER} in that folder, but complete checkpoints of steps "
            f"{', '.join(map(str, source.steps))}: the run would start from the beginning and write over them",
            cause="The file was deleted, or not copied with the folders.",
            remedy=f"{source.step_flag} {source.steps[-1]} goes on from the newest; to start anew give another folder",
            evidence=source.evidence,
        )
    if source.folder.name in [folder.name for folder in find_complete_folders(source.folder.parent)]:
        return diagnosis(
            "CKPT01",
            f"{source.flag} {source.folder} is one checkpoint, not the folder that holds them",
            cause="The folder of all checkpoints is named, and the step beside it.",
            remedy=f"{source.flag} {source.folder.parent} {source.step_flag} {step_from_folder(source.folder)}",
            evidence=source.evidence,
        )
    names = sorted(path.name for path in source.folder.iterdir())
    held = abbreviate(names, HELD) or "nothing"
    ways = [f"{source.step_flag} {source.steps[-1]} is complete"] if source.steps else []
    ways.append(f"to resume use the folder given to --save; {source.step_flag} N picks a checkpoint")
    return diagnosis(
        "CKPT01",
        f"{source.flag} {source.folder}: no {TRACKER} in that folder (it holds: {held}).",
        remedy="; ".join(ways),
        evidence=source.evidence | {"holds": names[:HELD]},
    )


def _resumed(context: PreflightContext) -> Path | None:
    """The checkpoint that --load stands for, if there is one that can be read."""
    flags = context.config.checkpoint
    folder = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if folder is None or not folder.is_dir():
        return None
    save = None if flags.save is None else Path(flags.save)
    try:
        return find_checkpoint(folder, step=flags.ckpt_step, save_dir=save)
    except CheckpointError:  # said by folders_to_load
        return None


def folder_to_save(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT08: --save holds checkpoints that this run does not continue, and would write over."""
    flags = context.config.checkpoint
    if flags.save is None or context.config.data.num_rollout == 0:
        return
    save, resumed = Path(flags.save), _resumed(context)
    loaded = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if loaded is not None and loaded.resolve() == save.resolve():
        return  # its own, one of which a kill may have left without the tracker's word
    first = step_from_folder(resumed) if resumed is not None else context.config.data.start_rollout_id or 0
    later = [step for step in map(step_from_folder, find_complete_folders(save)) if step > first]
    if later:
        way = f"--load {save}{' without --finetune' * flags.finetune}"
        held = f"rollout {later[0]}" if len(later) == 1 else f"rollouts {later[0]} to {later[-1]}"
        yield diagnosis(
            "CKPT08",
            f"--save {save} holds checkpoints of {held}, and this run begins at {first}: it would write over them",
            remedy=f"{way} to go on, or another folder with --save",
            evidence={"folder": str(save), "steps": later, "first": first},
        )


def layout(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT05: a checkpoint of another layout or backend. Tensors are whole on disk, so all of them read it."""
    folder = _resumed(context)
    if folder is None:
        return
    saved, own = _backend_of(folder), _backend_of_run(context)
    before = len(list((folder / "trainer").glob("trainer_rng*.safetensors")))  # one of each rank
    now = max(1, Topology.of(context.config).num_ranks)
    if before in (0, now) and saved == own:
        return
    new = f"; ranks from {before} on begin with random states of their own" if 0 < before < now else ""
    yield diagnosis(
        "CKPT05",
        f"{folder} was saved by {before} training ranks with {saved}, this run has {now} with {own}: each reads its "
        f"part{new}",
        remedy="nothing is to be done",
        evidence={"folder": str(folder), "saved_by": before, "ranks": now, "saved_with": saved, "run": own},
    )


def _backend_of(folder: Path) -> str:
    """What saved a checkpoint, in words."""
    path = folder / "trainer" / "trainer.json"
    if not path.is_file():
        return described(None)
    meta = json.loads(path.read_text())
    return described(meta.get("layout"))


def _backend_of_run(context: PreflightContext) -> str:
    train = context.config.train
    if train.train_backend != "megatron":
        return described(None)
    layers = context.model.text_config.get("num_hidden_layers") if context.model is not None else None
    return described(asdict(Layout.of(train, context.config.megatron, layers)))


def resume_plan(context: PreflightContext) -> Iterator[Diagnosis]:
    """CKPT06: what a checkpoint brings back, and what it lacks; CFG01: what does not fit this run."""
    load, folder = context.config.checkpoint.load, _resumed(context)
    if folder is not None:
        yield _continued(context, folder)
        yield from _rollouts_that_do_not_fit(context, folder)
    elif load is not None and context.config.checkpoint.ckpt_step is None and _is_model(Path(load)):
        yield diagnosis(
            "CKPT06",
            f"--load {load} is a Hugging Face model: training starts from its weights at rollout 0",
            cause="It has no optimizer, random state or position in the data.",
            remedy="nothing is to be done if that is meant; a run goes on from the folder of --save",
            severity="info",
            evidence={"step": 0},
        )


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not _is_run(folder)


def _continued(context: PreflightContext, folder: Path) -> Diagnosis:
    """What a run that goes on from `folder` takes from it."""
    flags, total, step = context.config.checkpoint, context.config.data.num_rollout, step_from_folder(folder)
    restored, missing = _restored(folder, flags)
    evidence = {"step": step, "num_rollout": total, "restored": restored, "missing": missing}
    finding = f"--load {flags.load} continues at rollout {step}{f' of {total}' if total else ''}: {', '.join(restored)}"
    if total is not None and step >= total:
        return diagnosis(
            "CKPT06",
            f"{finding}; nothing is left to do",
            cause="The run was complete.",
            remedy=f"--num-rollout {step + total} goes on; another --load starts elsewhere",
            evidence=evidence,
        )
    if missing:
        what = " and ".join(missing)
        return diagnosis(
            "CKPT06",
            f"{finding}; not in the checkpoint: {what}",
            cause="It was saved with --no-save-optim." if "optimizer" in missing else None,
            remedy=f"{what} will start anew; nothing is to be done if that is meant",
            evidence=evidence,
        )
    remedy = "nothing is to be done; to start anew leave --load out"
    return diagnosis("CKPT06", finding, severity="info", remedy=remedy, evidence=evidence)


def _rollouts_that_do_not_fit(context: PreflightContext, folder: Path) -> Iterator[Diagnosis]:
    """CFG01: rollouts generated ahead, with other batch sizes, that optimizer steps of this run cannot train on."""
    size = context.config.train.global_batch_size
    held = [_num_completions(folder / name) for name in json.loads((folder / "state.json").read_text())["ahead"]]
    odd = [count for count in held if size and count % size]
    if odd:
        yield diagnosis(
            "CFG01",
            f"{folder} holds {len(held)} rollouts generated ahead; one has {odd[0]} samples, which do not fill "
            f"optimizer steps of --global-batch-size {size}",
            cause="They were made with another --rollout-batch-size or --n-samples-per-prompt.",
            remedy="go on with the sizes that they were made with, and --async-buffer-size 0: once they are trained "
            "on, a checkpoint holds none",
            evidence={"folder": str(folder), "samples": held, "global_batch_size": size},
        )


def _num_completions(path: Path) -> int:
    """Completions of a rollout that was saved; samples that one was fanned out into count as one."""
    with safe_open(path, "np") as file:
        return len(set(file.get_tensor("rollout_ids").tolist()))


def _restored(folder: Path, flags: CheckpointFlags) -> tuple[list[str], list[str]]:
    """What a checkpoint brings back, and what it should and does not have. What flags leave out is in neither."""
    state = json.loads((folder / "state.json").read_text())
    names = [path.name for path in (folder / "trainer").iterdir()]
    restored = ["weights", "position in the data", f"{len(state['ahead'])} rollouts generated ahead"]
    missing: list[str] = []
    for what, part, is_left_out in (
        ("optimizer", "optimizer", flags.no_load_optim),
        ("random state", "rng", flags.no_load_rng),
    ):
        if not is_left_out:
            (restored if any(part in name for name in names) else missing).append(what)
    return restored, missing
