"""The folder of `--save`, which `loop.checkpoints` writes: the checkpoints in it, and whether one is complete."""

from __future__ import annotations

import json
from pathlib import Path

from furlong.core.files import PARTIAL
from furlong.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "state.json"  # where a run was: data, ledger, what was ahead
DIST_INDEX = ".metadata"  # of a folder that torch.distributed.checkpoint wrote, as Megatron-LM does
FORMAT = 1


def find_checkpoint(load_dir: Path, *, step: int | None, save_dir: Path | None, flag: str = "--load") -> Path | None:
    """The complete checkpoint of `step`, or of the newest one; None if there is none yet and `load_dir` is `save_dir`.

    Raises CheckpointError for one that is named but missing or incomplete, and for a folder of something else. `flag`
    is what named `load_dir`.
    """
    if step is None:
        step = newest_step(load_dir)
    if step is None:
        if save_dir is not None and load_dir.resolve() == save_dir.resolve():
            return None
        held = sorted(p.name for p in load_dir.iterdir())[:8] if load_dir.is_dir() else "nothing: no such folder"
        raise CheckpointError(
            f"{flag} {load_dir}: no {TRACKER} in that folder (it holds {held}). To start from a Hugging "
            "Face model use --hf-checkpoint; to resume use the folder that was given to --save"
        )
    folder = load_dir / folder_name(step)
    if not (folder / MANIFEST).exists():
        complete = [step_from_folder(p) for p in find_complete_folders(load_dir)]
        raise CheckpointError(
            f"{folder} is not a complete checkpoint; complete ones there: {complete}; pick one with --ckpt-step"
        )
    check_manifest(folder)
    return folder


def find_resume_folder(load: str | None, *, step: int | None, finetune: bool) -> Path | None:
    """The folder of checkpoints that --load continues; None without one, and where it gives weights only."""
    if load is None or finetune or find_foreign_weights(Path(load), step=step) is not None:
        return None
    return Path(load)


def find_initial_weights(load: str | None, *, step: int | None, finetune: bool) -> Path | None:
    """The folder whose weights a run starts with because --load says so; None where it continues, or says nothing.

    Raises CheckpointError if a checkpoint that is named is missing or incomplete.
    """
    if load is None:
        return None
    found = find_foreign_weights(Path(load), step=step)
    if found is not None or not finetune:
        return found
    own = find_checkpoint(Path(load), step=step, save_dir=None)
    assert own is not None  # it is refused otherwise
    return own / "trainer"


def find_foreign_weights(folder: Path, *, step: int | None) -> Path | None:
    """A Hugging Face model, or a checkpoint of Megatron-LM in `folder`; None where it is neither."""
    tracker = folder / TRACKER
    newest = tracker.read_text().strip() if step is None and tracker.is_file() else ""
    name = folder_name(step if step is not None else int(newest)) if step is not None or newest.isdecimal() else newest
    if (folder / "config.json").is_file() or (folder / DIST_INDEX).is_file():
        return folder
    return folder / name if name and (folder / name / DIST_INDEX).is_file() else None


def folder_name(step: int) -> str:
    """`iter_0000010` for step 10."""
    return f"iter_{step:07d}"


def step_from_folder(folder: Path) -> int:
    """Inverse of `folder_name`."""
    return int(folder.name.removeprefix("iter_"))


def newest_step(save_dir: Path) -> int | None:
    """The step that the tracker file names; None without one. Raises CheckpointError if it names no step."""
    tracker = save_dir / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    if not text.isdecimal():
        raise CheckpointError(f"{tracker} holds {text[:40]!r}, wanted the number of a checkpoint; use --ckpt-step")
    return int(text)


def saved_num_threads(load_dir: Path, *, step: int | None) -> int | None:
    """The threads of the process that saved what a run continues; None where there is nothing, or nothing known."""
    step = newest_step(load_dir) if step is None else step
    path = load_dir / folder_name(step or 0) / STATE
    if step is None or not path.is_file():
        return None
    return json.loads(path.read_text()).get("num_threads")


def find_complete_folders(save_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p.parent for p in save_dir.glob(f"iter_*/{MANIFEST}") if not p.parent.name.endswith(PARTIAL))


def check_manifest(folder: Path) -> None:
    """Raise CheckpointError for a manifest of another format, or a file that is missing or has another size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error}); use another --ckpt-step") from error
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{folder} has format {manifest['format']}, this version reads {FORMAT}; use the version that wrote it"
        )
    for name, size in manifest["files"].items():
        path = folder / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"{path} {state}, the manifest says {size}; use another --ckpt-step")
