"""The `--save` folder, which `loop.checkpoints` writes: find checkpoints and check that they are complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import xxhash

from furlong.core.text import shortened
from furlong.errors import CheckpointError, ConfigError
from furlong.files.atomic import PARTIAL
from furlong.files.manifest import MANIFEST, changed_files, missing_or_cut, read_manifest

TRACKER = "latest_checkpointed_iteration.txt"
MAX_TRACKER_BYTES = 80  # a number or the name of a folder
STATE = "state.json"  # position of the run: data, ledger, rollouts in flight
DIST_INDEX = ".metadata"  # in folders written by torch.distributed.checkpoint, such as Megatron-LM's
STATE_FORMAT = 1


def find_checkpoint(load_dir: Path, *, step: int | None, save_dir: Path | None, flag: str = "--load") -> Path | None:
    """Return the complete checkpoint of `step`, or the newest one; None if `load_dir` is `save_dir` and has none yet.

    Without a usable tracker, the newest is that of the highest step; `recovery` describes that. `flag` is the flag that
    set `load_dir`. Raises CheckpointError if the checkpoint is missing or incomplete, or if the folder contains
    something else.
    """
    named_by = ""
    if step is None:
        step = newest_step(load_dir)
        named_by = f", which {load_dir / TRACKER} names," if tracker_text(load_dir) == str(step) else ""
    if step is None:
        if is_first_start(load_dir, save_dir):
            return None
        content = sorted(p.name for p in load_dir.iterdir())[:8] if load_dir.is_dir() else "no such folder"
        raise CheckpointError(
            f"{flag} {load_dir}: no {TRACKER} and no complete checkpoint in that folder ({content}). To start from "
            "a Hugging Face model use --hf-checkpoint; to resume use the --save folder of the run"
        )
    folder = load_dir / folder_name(step)
    if (problem := torch_format_problem(folder)) is not None:
        raise CheckpointError(f"{flag} {problem}")
    if not (folder / MANIFEST).exists():
        complete = [step_from_folder(p) for p in find_complete_folders(load_dir)]
        raise CheckpointError(
            f"{folder}{named_by} is not a complete checkpoint: it has no {MANIFEST}; complete steps: {complete}; "
            "select one with --ckpt-step"
        )
    if problems := missing_or_cut(folder):
        raise CheckpointError(f"{'; '.join(problems)}{_other(folder)}")
    return folder


def find_resume_folder(load: str | None, *, step: int | None, finetune: bool) -> Path | None:
    """Return the checkpoint folder that --load resumes from; None without --load, or if it only provides weights."""
    if load is None or finetune or find_foreign_weights(Path(load), step=step) is not None:
        return None
    return Path(load)


def find_initial_weights(load: str | None, *, step: int | None, finetune: bool) -> Path | None:
    """Return the folder of the initial weights if --load provides only weights (not a full resume), else None.

    Raises CheckpointError if a named checkpoint is missing or incomplete.
    """
    if load is None:
        return None
    foreign = find_foreign_weights(Path(load), step=step)
    if foreign is not None or not finetune:
        return foreign
    checkpoint = find_checkpoint(Path(load), step=step, save_dir=None)
    assert checkpoint is not None  # without save_dir a missing checkpoint raises
    return checkpoint / "trainer"


def find_foreign_weights(folder: Path, *, step: int | None) -> Path | None:
    """Return the folder of a Hugging Face model or a Megatron-LM checkpoint at `folder`, or None."""
    newest = tracker_text(folder) if step is None else ""
    name = folder_name(step if step is not None else int(newest)) if step is not None or newest.isdecimal() else newest
    if (folder / "config.json").is_file() or (folder / DIST_INDEX).is_file():
        return folder
    return folder / name if name and (folder / name / DIST_INDEX).is_file() else None


def check_has_steps(flag: str, folder: str, step_flag: str, step: int | None) -> None:
    """Raise ConfigError if a step of a Hugging Face model is asked for (`step_flag`, with `flag`)."""
    if step is not None and (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{step_flag} {step} has no effect: {flag} {folder} is a Hugging Face model; remove it")


def dist_with_fsdp(flag: str, folder: Path, hf_checkpoint: Path | str) -> str:
    """Return the problem of a Megatron-LM checkpoint (torch_dist) in a run with --train-backend fsdp."""
    return (
        f"{flag} {folder} is a Megatron-LM checkpoint, which --train-backend fsdp cannot load; convert it to a "
        f"Hugging Face folder (furlong convert megatron-to-hf {folder} DIR --hf-checkpoint {hf_checkpoint}), or use "
        "--train-backend megatron"
    )


def torch_format_problem(folder: Path) -> str | None:
    """Return why a checkpoint in Megatron-LM's older format, `torch`, is not loaded; None for other folders."""
    pickled = next(iter(sorted(folder.glob("mp_rank_*/*.pt"))), None)
    if pickled is None:
        return None
    return (
        f"{folder} is a Megatron-LM checkpoint in the format torch ({pickled.relative_to(folder)}): pickles of one "
        "parallel layout, which are not loaded; convert it with Megatron-LM's --ckpt-convert-format torch_dist "
        "--ckpt-convert-save DIR, and use DIR"
    )


def folder_name(step: int) -> str:
    """Return `iter_0000010` for step 10."""
    return f"iter_{step:07d}"


def step_from_folder(folder: Path) -> int:
    """Inverse of `folder_name`."""
    return int(folder.name.removeprefix("iter_"))


def newest_step(save_dir: Path) -> int | None:
    """Return the step in the tracker file, without a usable one that of the newest complete checkpoint, else None.

    Raises CheckpointError if the file is unusable and there is no complete checkpoint.
    """
    text = tracker_text(save_dir)
    if text.isdigit():
        return int(text)
    named = save_dir / text
    if named.parent == save_dir and (problem := torch_format_problem(named)) is not None:
        raise CheckpointError(problem)
    if complete := find_complete_folders(save_dir):
        return step_from_folder(complete[-1])
    if text:
        raise CheckpointError(f"{_unusable(save_dir, text)}; use --ckpt-step")
    return None


def recovery(load_dir: Path) -> str | None:
    """Return why the newest checkpoint in `load_dir` is not the one of the tracker; None if it is, or without any."""
    complete, text = find_complete_folders(load_dir), tracker_text(load_dir)
    if not complete or text.isdigit():
        return None
    problem = _unusable(load_dir, text) if text else f"{load_dir / TRACKER} is missing or empty"
    return f"{problem}; the newest complete checkpoint is {complete[-1]}"


def _unusable(folder: Path, text: str) -> str:
    return f"{folder / TRACKER} contains {text[:40]!r}, expected a checkpoint number"


def is_first_start(load_dir: Path, save_dir: Path | None) -> bool:
    """Whether `load_dir` is `save_dir` and has no `iter_*` folder yet, except for unfinished saves."""
    if save_dir is None or load_dir.resolve() != save_dir.resolve():
        return False
    return all(path.name.endswith(PARTIAL) for path in load_dir.glob("iter_*"))


def tracker_text(folder: Path) -> str:
    """Return the content of the tracker file in `folder`, usable or not; "" without one."""
    try:
        return (folder / TRACKER).read_bytes()[:MAX_TRACKER_BYTES].decode("ascii", "replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / TRACKER}: {error.strerror or error}; use --ckpt-step") from error


def read_state(folder: Path) -> dict[str, Any]:
    """Return the position of the run in a checkpoint. Raises CheckpointError if it is damaged."""
    return read_object(folder, STATE)


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a small file of a checkpoint, compared with the manifest if there is one.

    Raises CheckpointError if it cannot be read, was changed, or contains something else.
    """
    path = folder / name
    try:
        content = path.read_bytes()
        listed = read_manifest(folder).get(name) if (folder / MANIFEST).is_file() else None
        if listed is not None and listed[1] != xxhash.xxh3_128_hexdigest(content):
            raise CheckpointError(f"{path} was changed after it was saved{_other(folder)}")
        value: Any = json.loads(content)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; use another --ckpt-step") from error
    except ValueError as error:
        raise CheckpointError(f"cannot read {path}: {error}; use another --ckpt-step") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} contains {shortened(value)}, expected an object; use another --ckpt-step")
    return cast("dict[str, Any]", value)


def start_problem(start: int | None, folder: Path) -> str | None:
    """Return why a run that resumes from `folder` cannot start at --start-rollout-id; None if it can."""
    step = step_from_folder(folder)
    if start is None or start == step:
        return None
    return f"--start-rollout-id {start} contradicts {folder}, which continues at {step}; remove it"


def saved_num_threads(load_dir: Path, *, step: int | None) -> int | None:
    """Return the thread count of the process that saved the checkpoint; None if there is none or it is unknown."""
    step = newest_step(load_dir) if step is None else step
    folder = load_dir / folder_name(step or 0)
    if step is None or not (folder / STATE).is_file():
        return None
    return read_state(folder).get("num_threads")


def find_complete_folders(save_dir: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    steps = (path.parent.name.removeprefix("iter_") for path in save_dir.glob(f"iter_*/{MANIFEST}"))
    numbers = sorted(int(step) for step in steps if step.isdecimal() and folder_name(int(step)) == f"iter_{step}")
    return [save_dir / folder_name(number) for number in numbers]


def _other(folder: Path) -> str:
    if not folder.name.removeprefix("iter_").isdigit():
        return "; use another checkpoint"
    for other in reversed([each for each in find_complete_folders(folder.parent) if each.name < folder.name]):
        try:
            if not changed_files(other):
                step = step_from_folder(other)
                return f"; the newest intact checkpoint before it is that of step {step}: use --ckpt-step {step}"
        except CheckpointError:
            continue
    return "; copy the file again, or start a new run: there is no intact checkpoint before it"
