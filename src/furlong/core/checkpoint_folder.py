"""The `--save` folder, which `loop.checkpoints` writes: find checkpoints and check that they are complete."""

from __future__ import annotations

import json
from pathlib import Path

from furlong.core.files import PARTIAL
from furlong.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "state.json"  # position of the run: data, ledger, rollouts in flight
DIST_INDEX = ".metadata"  # in folders written by torch.distributed.checkpoint, such as Megatron-LM's
FORMAT = 1


def find_checkpoint(load_dir: Path, *, step: int | None, save_dir: Path | None, flag: str = "--load") -> Path | None:
    """Return the complete checkpoint of `step`, or the newest one; None if `load_dir` is `save_dir` and has none yet.

    `flag` is the flag that set `load_dir`. Raises CheckpointError if the checkpoint is missing or incomplete, or if the
    folder contains something else.
    """
    if step is None:
        step = newest_step(load_dir)
    if step is None:
        if save_dir is not None and load_dir.resolve() == save_dir.resolve():
            return None
        content = sorted(p.name for p in load_dir.iterdir())[:8] if load_dir.is_dir() else "no such folder"
        raise CheckpointError(
            f"{flag} {load_dir}: no {TRACKER} in that folder ({content}). To start from a Hugging "
            "Face model use --hf-checkpoint; to resume use the --save folder of the run"
        )
    folder = load_dir / folder_name(step)
    if not (folder / MANIFEST).exists():
        complete = [step_from_folder(p) for p in find_complete_folders(load_dir)]
        raise CheckpointError(
            f"{folder} is not a complete checkpoint; complete steps: {complete}; select one with --ckpt-step"
        )
    check_manifest(folder)
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
    tracker = folder / TRACKER
    newest = tracker.read_text().strip() if step is None and tracker.is_file() else ""
    name = folder_name(step if step is not None else int(newest)) if step is not None or newest.isdecimal() else newest
    if (folder / "config.json").is_file() or (folder / DIST_INDEX).is_file():
        return folder
    return folder / name if name and (folder / name / DIST_INDEX).is_file() else None


def folder_name(step: int) -> str:
    """Return `iter_0000010` for step 10."""
    return f"iter_{step:07d}"


def step_from_folder(folder: Path) -> int:
    """Inverse of `folder_name`."""
    return int(folder.name.removeprefix("iter_"))


def newest_step(save_dir: Path) -> int | None:
    """Return the step in the tracker file; None without one. Raises CheckpointError if its content is not a step."""
    tracker = save_dir / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise CheckpointError(f"{tracker} contains {text[:40]!r}, expected a checkpoint number; use --ckpt-step")
    return int(text)


def saved_num_threads(load_dir: Path, *, step: int | None) -> int | None:
    """Return the thread count of the process that saved the checkpoint; None if there is none or it is unknown."""
    step = newest_step(load_dir) if step is None else step
    path = load_dir / folder_name(step or 0) / STATE
    if step is None or not path.is_file():
        return None
    return json.loads(path.read_text()).get("num_threads")


def find_complete_folders(save_dir: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(p.parent for p in save_dir.glob(f"iter_*/{MANIFEST}") if not p.parent.name.endswith(PARTIAL))


def check_manifest(folder: Path) -> None:
    """Check the format and that every file has its size. Raises CheckpointError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is corrupt ({error}); use another --ckpt-step") from error
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{folder} has format {manifest['format']}, expected {FORMAT}; use the furlong version that wrote it"
        )
    for name, size in manifest["files"].items():
        path = folder / name
        actual = path.stat().st_size if path.exists() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} bytes"
            raise CheckpointError(f"{path} {state}, expected {size} bytes; use another --ckpt-step")
