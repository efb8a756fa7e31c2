"""The `--save` folder, which `loop.checkpoints` writes: find checkpoints and check that they are complete."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import xxhash

from furlong.core.file_kind import require_file
from furlong.core.json_values import TOO_DEEP
from furlong.core.text import shortened
from furlong.errors import CheckpointError
from furlong.files.atomic import PARTIAL, write_atomically
from furlong.files.checksums import SUFFIX, FileCheck, changed_file, take_checksums
from furlong.files.file_manifest import DamagedManifestError, FileRecord, manifest_text, read_records
from furlong.files.verified_tensors import ChangedBlockError, TensorFile

TRACKER = "latest_checkpointed_iteration.txt"
MAX_TRACKER_BYTES = 200  # a number or the name of a folder
MANIFEST = "manifest.json"
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
    newest = tracker_text(folder) if step is None else ""
    name = folder_name(step if step is not None else int(newest)) if step is not None or newest.isdecimal() else newest
    if (folder / "config.json").is_file() or (folder / DIST_INDEX).is_file():
        return folder
    return folder / name if name and (folder / name / DIST_INDEX).is_file() else None


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
    if (problem := _tracker_problem(save_dir)) is not None:
        raise CheckpointError(f"{problem}; use --ckpt-step")
    return None


def recovery(load_dir: Path) -> str | None:
    """Return why the newest checkpoint in `load_dir` is not the one of the tracker; None if it is, or without any."""
    complete = find_complete_folders(load_dir)
    tracker = load_dir / TRACKER
    problem = _tracker_problem(load_dir) if os.path.lexists(tracker) else f"{tracker} is missing"
    return f"{problem}; the newest complete checkpoint is {complete[-1]}" if complete and problem else None


def is_first_start(load_dir: Path, save_dir: Path | None) -> bool:
    """Whether `load_dir` is `save_dir` and has no `iter_*` folder yet, except for unfinished saves."""
    if save_dir is None or load_dir.resolve() != save_dir.resolve():
        return False
    return all(path.name.endswith(PARTIAL) for path in load_dir.glob("iter_*"))


def tracker_text(folder: Path) -> str:
    """Return the content of the tracker file in `folder`; "" without one.

    An unusable one counts as missing if there is a complete checkpoint, otherwise raises CheckpointError.
    """
    try:
        return _read_tracker(folder / TRACKER)
    except CheckpointError as error:
        if find_complete_folders(folder):
            return ""
        raise CheckpointError(f"{error}; use --ckpt-step") from error


def _tracker_problem(folder: Path) -> str | None:
    """Return why a tracker file does not contain a step; None if it does, or if it does not exist."""
    tracker = folder / TRACKER
    try:
        text = _read_tracker(tracker)
    except CheckpointError as error:
        return str(error)
    is_step = text.isdigit() or not os.path.lexists(tracker)
    return None if is_step else f"{tracker} contains {text[:40]!r}, expected a checkpoint number"


def _read_tracker(tracker: Path) -> str:
    """Return the content of a tracker file, "" without one. Raises CheckpointError if it is not a short text."""
    if not os.path.lexists(tracker):  # unlike `exists`, true for a link that leads nowhere
        return ""
    try:
        require_file(tracker)
        text = tracker.read_bytes()[:MAX_TRACKER_BYTES].decode("ascii").strip()
        if not text.isprintable():
            raise ValueError(f"it contains {text[:40]!r}")
        return text
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tracker} is damaged: {error}, expected a checkpoint number") from error


def read_state(folder: Path) -> dict[str, Any]:
    """Return the position of the run in a checkpoint. Raises CheckpointError if it is damaged."""
    return read_object(folder, STATE)


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a small file of a checkpoint, verified by `read_verified`.

    Raises CheckpointError if it cannot be read, was changed, or contains something else.
    """
    path = folder / name
    try:
        value: Any = json.loads(read_verified(folder, name))
    except ValueError as error:
        raise CheckpointError(f"cannot read {path}: {error}; use another --ckpt-step") from error
    except RecursionError:
        raise CheckpointError(f"cannot read {path}: {TOO_DEEP}; use another --ckpt-step") from None
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


def write_manifest(folder: Path, step: int) -> None:
    """Write the manifest of all files in `folder`, with their checksums. It is the last file of a checkpoint."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != SUFFIX and p != folder / MANIFEST)
    records = {str(p.relative_to(folder)): FileRecord(p.stat().st_size, *take_checksums(p)) for p in files}
    write_atomically(folder / MANIFEST, manifest_text(step, records))


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return the files of a checkpoint, by their path in it.

    Raises CheckpointError if the manifest is damaged or has a format that this version does not read.
    """
    try:
        return read_records(folder / MANIFEST)
    except DamagedManifestError as error:
        raise CheckpointError(f"{error}{_other(folder)}") from error


def check_manifest(folder: Path) -> None:
    """Check the format and that every file has its size. Raises CheckpointError."""
    records = read_manifest(folder)
    for name, record in records.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != record.num_bytes:
            state = "is missing" if actual is None else f"has {actual} bytes"
            raise CheckpointError(f"{path} {state}, expected {record.num_bytes} bytes{_other(folder)}")


def checksum_warning(folder: Path) -> str | None:
    """Return that a checkpoint has no checksums to compare; None if it has. Raises CheckpointError."""
    if all(record.checksum is not None for record in read_manifest(folder).values()):
        return None
    return f"{folder} was saved without checksums by an older version: changes of its content cannot be detected"


@contextmanager
def files_checked(
    folder: Path, names: Iterable[str] | None = None, *, part: int = 0, parts: int = 1
) -> Generator[None]:
    """Compare files of the checkpoint `folder` with their checksums while the body loads them.

    names: paths in the folder; by default those in `trainer/`, without files that `tensor_files` verifies. Of large
    files, every `parts`-th from number `part` is compared, so that ranks share the work. Does nothing without a
    manifest. Raises CheckpointError with all damaged files: before the body for small ones, after it for large ones,
    and instead of an exception that damage may cause.
    """
    records = _records(folder)
    others = [name for name, record in records.items() if name.startswith("trainer/") and record.blocks is None]
    selected = others if names is None else list(names)
    expected = [(folder / name, records[name].checksum) for name in selected if name in records]
    known = [(path, checksum) for path, checksum in expected if checksum is not None]
    check = FileCheck(known, part=part, parts=parts)
    _refuse(folder, check.damaged)
    try:
        yield
    except Exception as error:
        _refuse(folder, check.wait(), cause=error)
        raise
    finally:
        check.close()
    _refuse(folder, check.wait())


@contextmanager
def tensor_files(folder: Path, names: Iterable[str]) -> Generator[list[TensorFile]]:
    """Open safetensors files in a subfolder of a checkpoint, such as `trainer`; what is read of them is verified.

    Without a manifest, or with one of an older format, nothing is. Raises CheckpointError, also from the body, if a
    file cannot be read or was changed.
    """
    checkpoint = folder.parent
    records = _records(checkpoint)
    with ExitStack() as stack:
        try:
            files: list[TensorFile] = []
            for name in names:
                path, record = folder / name, records.get(f"{folder.name}/{name}")
                try:
                    files.append(stack.enter_context(TensorFile(path, record and record.blocks)))
                except ChangedBlockError:
                    raise
                except CheckpointError as error:
                    raise CheckpointError(f"cannot read {path}: {error}{_other(checkpoint)}") from error
            yield files
        except ChangedBlockError as error:
            raise CheckpointError(f"{error}{_other(checkpoint)}") from error


def read_verified(folder: Path, name: str) -> bytes:
    """Return the content of a small file of a checkpoint, which has its checksum in the manifest if there is one.

    Raises CheckpointError if it cannot be read or was changed.
    """
    path, record = folder / name, _records(folder).get(name)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; use another --ckpt-step") from error
    actual = xxhash.xxh3_128_hexdigest(content)
    if record is not None and record.checksum is not None and actual != record.checksum:
        _refuse(folder, [changed_file(path, actual, record.checksum)])
    return content


def _records(folder: Path) -> dict[str, FileRecord]:
    """Return the files in the manifest of a checkpoint; {} without a manifest."""
    return read_manifest(folder) if (folder / MANIFEST).is_file() else {}


def _refuse(folder: Path, damaged: list[str], cause: Exception | None = None) -> None:
    if damaged:
        raise CheckpointError("; ".join(damaged) + _other(folder)) from cause


def damaged_files(folder: Path) -> list[str]:
    """Return what is wrong with the files of a checkpoint whose manifest is intact; compares all content."""
    records = read_manifest(folder)
    expected = ((folder / name, record.checksum) for name, record in records.items() if record.checksum is not None)
    return FileCheck(expected).wait()


def _other(folder: Path) -> str:
    """Return advice to use the newest intact checkpoint before `folder`, as the end of a sentence."""
    if not folder.name.removeprefix("iter_").isdigit():
        return "; use another checkpoint"
    for other in reversed([each for each in find_complete_folders(folder.parent) if each.name < folder.name]):
        try:
            if not damaged_files(other):
                step = step_from_folder(other)
                return f"; the newest intact checkpoint before it is that of step {step}: use --ckpt-step {step}"
        except CheckpointError:
            continue
    return "; there is no intact checkpoint before it"
