"""CKPT and QNT rows: the model folder, and the checkpoint to continue from."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from furlong.config.topology import Topology
from furlong.core.checkpoint_folder import (
    TRACKER,
    complete_folders,
    continued,
    find_checkpoint,
    folder_name,
    foreign_weights,
    newest_step,
    step_of,
)
from furlong.core.diagnosis import Diagnosis
from furlong.core.first_few import first_few
from furlong.doctor.catalogue import diagnosis
from furlong.doctor.checkpoint import check_model, completeness, quantization
from furlong.doctor.preflight.context import Context
from furlong.doctor.template import read_tokenizer
from furlong.errors import CheckpointError, ConfigError
from furlong.models.folder import COMPLETE, check_folder, read_json
from furlong.trainers.megatron.layout import Layout, described

MOVED = 0.05  # of a tokenizer's tokens; one with some tokens added is the same
HELD = 8  # names of a folder's content that are shown


def model_folder(context: Context) -> Iterator[Diagnosis]:
    """CKPT07: --hf-checkpoint has config.json of a known family, weights, and a tokenizer that can be read."""
    folder = context.model_dir
    if folder is None:
        return  # said with the flags
    try:
        check_folder(folder, weights=True, tokenizer=True)
    except ConfigError as error:
        finding, _, way = str(error).partition(". ")
        remedy = "give a complete Hugging Face model folder with --hf-checkpoint" if way == COMPLETE else way
        yield diagnosis("CKPT07", finding, remedy=remedy, evidence={"folder": str(folder)})
        return
    try:
        config = read_json(folder / "config.json")
        if context.tokenizer is None:
            read_tokenizer(folder)  # raises what is wrong with it
    except ConfigError as error:
        finding = str(error)
        remedy = "give a complete Hugging Face model folder with --hf-checkpoint"
        yield diagnosis("CKPT07", finding, remedy=remedy, evidence={"folder": str(folder)})
        return
    family = config.get("model_type")
    if family is None or (isinstance(family, str) and not _is_known_family(family)):
        what = "has no model_type" if family is None else f"says model_type {family!r}, which is not known"
        yield diagnosis(
            "CKPT07",
            f"{folder / 'config.json'} {what} to the installed transformers",
            cause="The model is newer than the library, or needs code of its own, which is not run.",
            remedy="pip install -U transformers, or give a model of a family that it knows",
            evidence={"folder": str(folder), "model_type": family},
        )


def _is_known_family(name: str) -> bool:
    """Whether transformers lists a model type; True if the list cannot be found. transformers is not imported."""
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return True
    folder = Path(package.origin).parent / "models" / "auto"
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*mapping*.py")]
    texts += [path.read_text(encoding="utf-8") for path in folder.glob("configuration_auto.py")]
    return not texts or any(f'"{name}"' in text for text in texts)


def weights(context: Context) -> Iterator[Diagnosis]:
    """CKPT04, QNT01 and QNT02: the model's shards, layers and quantization."""
    folder = context.model_dir
    if context.model is not None:
        yield from completeness(context.model)
        yield from quantization(context.model)
    elif folder is not None and (folder / "config.json").is_file():
        yield from check_model(folder)


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
        return [step_of(folder) for folder in complete_folders(self.folder)]

    @property
    def evidence(self) -> dict[str, Any]:
        """What every finding says of it."""
        return {"folder": str(self.folder), "steps": self.steps}


def _sources(context: Context) -> list[_Source]:
    flags = context.config.checkpoint
    found: list[_Source] = []
    loaded = continued(flags.load, step=flags.ckpt_step, finetune=False)
    if loaded is not None:
        save = None if flags.save is None or flags.finetune else Path(flags.save)
        found.append(_Source("--load", "--ckpt-step", loaded, flags.ckpt_step, save))
    reference = None if flags.ref_load is None else Path(flags.ref_load)
    if reference is not None and foreign_weights(reference, step=flags.ref_ckpt_step) is None:
        found.append(_Source("--ref-load", "--ref-ckpt-step", reference, flags.ref_ckpt_step))
    return [source for source in found if source.folder.is_dir()]  # else it is said with the flags


def folders_to_load(context: Context) -> Iterator[Diagnosis]:
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
    if source.folder.name in [folder.name for folder in complete_folders(source.folder.parent)]:
        return diagnosis(
            "CKPT01",
            f"{source.flag} {source.folder} is one checkpoint, not the folder that holds them",
            cause="The folder of all checkpoints is named, and the step beside it.",
            remedy=f"{source.flag} {source.folder.parent} {source.step_flag} {step_of(source.folder)}",
            evidence=source.evidence,
        )
    names = sorted(path.name for path in source.folder.iterdir())
    held = first_few(names, HELD) or "nothing"
    ways = [f"{source.step_flag} {source.steps[-1]} is complete"] if source.steps else []
    ways.append(f"to resume use the folder given to --save; {source.step_flag} N picks a checkpoint")
    return diagnosis(
        "CKPT01",
        f"{source.flag} {source.folder}: no {TRACKER} in that folder (it holds: {held}).",
        remedy="; ".join(ways),
        evidence=source.evidence | {"holds": names[:HELD]},
    )


def reference_tokens(context: Context) -> Iterator[Diagnosis]:
    """NUM01: a reference model whose tokens are not the policy's, so that its log-probs are those of other texts."""
    reference, tokenizer = context.config.checkpoint.ref_load, context.tokenizer
    if reference is None or tokenizer is None or not (Path(reference) / "config.json").is_file():
        return
    folder, cause = Path(reference), "Its log-probs would be those of other texts, or of no token at all."
    remedy = "give a reference with the tokenizer of --hf-checkpoint, or leave --ref-load out"
    config = read_json(folder / "config.json")
    size = (config.get("text_config") or config).get("vocab_size")
    if isinstance(size, int) and size < len(tokenizer):
        finding = f"--ref-load {folder} has {size} tokens, --hf-checkpoint {context.model_dir} {len(tokenizer)}"
        yield diagnosis("NUM01", finding, cause=cause, remedy=remedy, evidence={"vocab_size": size})
        return
    if not (folder / "tokenizer.json").is_file():
        return
    own, other = tokenizer.get_vocab(), read_tokenizer(folder).get_vocab()
    moved = [token for token, number in own.items() if other.get(token) != number]
    if len(moved) > MOVED * len(own):
        yield diagnosis(
            "NUM01",
            f"--ref-load {folder}: {len(moved)} of the {len(own)} tokens of --hf-checkpoint {context.model_dir} have "
            f"another number there or none ({moved[0]!r} is one)",
            cause=cause,
            remedy=remedy,
            evidence={"moved": len(moved), "tokens": len(own)},
        )


def _resumed(context: Context) -> Path | None:
    """The checkpoint that --load stands for, if there is one that can be read."""
    flags = context.config.checkpoint
    folder = continued(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if folder is None or not folder.is_dir():
        return None
    save = None if flags.save is None else Path(flags.save)
    try:
        return find_checkpoint(folder, step=flags.ckpt_step, save_dir=save)
    except CheckpointError:  # said by folders_to_load
        return None


def folder_to_save(context: Context) -> Iterator[Diagnosis]:
    """CKPT08: --save holds checkpoints that this run does not continue, and would write over."""
    flags = context.config.checkpoint
    if flags.save is None or context.config.data.num_rollout == 0:
        return
    save, resumed = Path(flags.save), _resumed(context)
    loaded = continued(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if loaded is not None and loaded.resolve() == save.resolve():
        return  # its own, one of which a kill may have left without the tracker's word
    first = step_of(resumed) if resumed is not None else context.config.data.start_rollout_id or 0
    later = [step for step in map(step_of, complete_folders(save)) if step > first]
    if later:
        way = f"--load {save}{' without --finetune' * flags.finetune}"
        held = f"rollout {later[0]}" if len(later) == 1 else f"rollouts {later[0]} to {later[-1]}"
        yield diagnosis(
            "CKPT08",
            f"--save {save} holds checkpoints of {held}, and this run begins at {first}: it would write over them",
            remedy=f"{way} to go on, or another folder with --save",
            evidence={"folder": str(save), "steps": later, "first": first},
        )


def layout(context: Context) -> Iterator[Diagnosis]:
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


def _backend_of_run(context: Context) -> str:
    train = context.config.train
    if train.train_backend != "megatron":
        return described(None)
    layers = context.model.text_config.get("num_hidden_layers") if context.model is not None else None
    return described(asdict(Layout.of(train, context.config.megatron, layers)))


def resume_plan(context: Context) -> Iterator[Diagnosis]:
    """CKPT06: what a checkpoint brings back, and what it lacks."""
    flags = context.config.checkpoint
    folder = _resumed(context)
    is_model = flags.load is not None and flags.ckpt_step is None and (Path(flags.load) / "config.json").is_file()
    is_model = is_model and not _is_run(Path(str(flags.load)))
    if folder is None and is_model:
        yield diagnosis(
            "CKPT06",
            f"--load {flags.load} is a Hugging Face model: training starts from its weights at rollout 0",
            cause="It has no optimizer, random state or position in the data.",
            remedy="nothing is to be done if that is meant; a run goes on from the folder of --save",
            severity="info",
            evidence={"step": 0},
        )
    if folder is not None:
        step = step_of(folder)
        state = json.loads((folder / "state.json").read_text())
        names = {path.name for path in (folder / "trainer").iterdir()}
        restored = ["weights", "position in the data", f"{len(state['ahead'])} rollouts generated ahead"]
        missing: list[str] = []
        for what, is_there in (
            ("optimizer", any("optimizer" in name for name in names) or flags.no_load_optim),
            ("random state", any("rng" in name for name in names) or flags.no_load_rng),
        ):
            (restored if is_there else missing).append(what)
        left = [*["optimizer"] * flags.no_load_optim, *["random state"] * flags.no_load_rng]
        restored = [what for what in restored if what not in left]
        total = context.config.data.num_rollout
        evidence = {"step": step, "num_rollout": total, "restored": restored, "missing": missing}
        finding = (
            f"--load {flags.load} continues at rollout {step}{f' of {total}' if total else ''}: {', '.join(restored)}"
        )
        if total is not None and step >= total:
            finding += "; nothing is left to do"
            remedy = f"--num-rollout {step + total} goes on; another --load starts elsewhere"
            yield diagnosis("CKPT06", finding, cause="The run was complete.", remedy=remedy, evidence=evidence)
        elif missing:
            what = " and ".join(missing)
            yield diagnosis(
                "CKPT06",
                f"{finding}; not in the checkpoint: {what}",
                cause="It was saved with --no-save-optim." if "optimizer" in missing else None,
                remedy=f"{what} will start anew; nothing is to be done if that is meant",
                evidence=evidence,
            )
        else:
            remedy = "nothing is to be done; to start anew leave --load out"
            yield diagnosis("CKPT06", finding, severity="info", remedy=remedy, evidence=evidence)
