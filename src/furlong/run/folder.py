"""The run directory: choice, ownership, locks, and changes of flags between starts."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TextIO

from furlong.catalogue import Problem
from furlong.config.command_line import Resolved, flags_as_written
from furlong.config.sections import CheckpointFlags
from furlong.data.ledger import check_mark
from furlong.errors import CheckpointError, ConfigError
from furlong.files.atomic import NO_LOCKS, is_locked, write_atomically
from furlong.files.checkpoint_folder import find_checkpoint, find_resume_folder, newest_step, read_state
from furlong.tools.run_diff import different_flags
from furlong.tracking.run_files import CONFIG, EVENTS, METRICS, RUN_LOG, read_flags, read_sections

logger = logging.getLogger("furlong")

LEDGER = "ledger.jsonl"
RUN_FILES = (CONFIG, METRICS, EVENTS, RUN_LOG, LEDGER)  # files that a resumed run continues
LOCK = ".lock"  # an empty, locked file in --save while a run may write there
IN_USE = "is in use by a run in progress; wait for it, end it, or choose another directory"


def run_folder(resolved: Resolved) -> Path:
    """Create the run directory: --output-dir, else that of the resumed run or the first free NAME, NAME-2, ...

    Raises ConfigError if it cannot be created. `folder_problems` checks whether it may be used.
    """
    folder = _folder_of(resolved)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output-dir {folder} cannot be created: {error.strerror}; choose another directory"
        ) from error
    return folder


def folder_problems(resolved: Resolved) -> list[Problem]:
    """Return why the run cannot use its directory or that of --save: another run is in it, or in progress there.

    A directory with recorded steps is reused only by the same run: one that resumes from a checkpoint which matches the
    ledger, or whose --load is the --save of the run in the directory.
    """
    try:
        return list(map(Problem, _folder_problems(resolved)))
    except ConfigError as error:  # a damaged config.json
        return [Problem(str(error))]
    except OSError as error:
        return [Problem(f"{error.filename} cannot be read: {error.strerror}; choose another directory")]


def _folder_problems(resolved: Resolved) -> Iterator[str]:
    flags = resolved.config.checkpoint
    folder = _folder_of(resolved)
    for path in (folder / name for name in RUN_FILES if (folder / name).exists()):
        if not path.is_file() or not os.access(path, os.W_OK):
            what = "is not writable by this user" if path.is_file() else "is not a file"
            yield f"--output-dir {folder}: {path.name} {what}; choose another directory, such as {free_folder(folder)}"
            return
    if (folder / CONFIG).exists():
        try:
            read_sections(folder, f"--output-dir {folder}")
        except ConfigError as error:  # damaged, or that of a model
            yield f"{str(error).rpartition('; ')[0]}; choose another --output-dir, such as {free_folder(folder)}"
            return
    if is_locked(folder / RUN_LOG):
        yield f"--output-dir {folder} {IN_USE}"
    elif (folder / METRICS).exists() and not (_has_checkpoint(flags) or _is_of(folder, flags)):
        yield f"--output-dir {folder} already contains a run{_other_run_fix(folder)}"
    elif (why := _other_ledger(folder / LEDGER, flags)) is not None:
        yield f"--output-dir {folder}: {why}, or choose another directory, such as {free_folder(folder)}"
    if flags.save is not None and is_locked(Path(flags.save) / LOCK):
        yield f"--save {flags.save} {IN_USE}"


def _folder_of(resolved: Resolved) -> Path:
    requested = Path(str(resolved.config.track.output_dir))
    if not resolved.sources["output_dir"].startswith("derived"):
        return requested
    taken = list(itertools.takewhile(lambda path: (path / CONFIG).exists(), _numbered(requested)))
    free = next(itertools.islice(_numbered(requested), len(taken), None))
    return next((path for path in taken if _is_of(path, resolved.config.checkpoint)), free)


def log_changed_flags(folder: Path, resolved: Resolved) -> None:
    """Log the flags that differ from those of the last start in this directory."""
    if not (folder / CONFIG).exists():
        return
    changed = different_flags(read_flags(folder), flags_as_written(resolved.config))
    if changed:
        changes = "; ".join(f"{flag} was {before}, is {now}" for flag, (before, now) in changed.items())
        logger.info("flags changed since the last run in this directory: %s", changes)


def write_config(folder: Path, resolved: Resolved) -> None:
    """Write `config.json` atomically. Raises ConfigError if the disk is full or not writable."""
    try:
        write_atomically(folder / CONFIG, resolved.to_json())
    except OSError as error:
        raise ConfigError(
            f"--output-dir {folder} cannot be written: {error.strerror}; free disk space, or choose another directory"
        ) from error


def lock_file(folder: Path, handle: int, flag: str = "--output-dir") -> None:
    """Lock an open file of `folder` until the process ends. Raises ConfigError if another process holds the lock.

    Only warns on file systems that do not support locks, such as some network mounts.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{flag} {folder} {IN_USE}") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning(
            "%s %s: the file system does not support locks (%s), so another run could write there at the same time",
            flag,
            folder,
            error.strerror,
        )


def _locked(path: Path) -> TextIO:
    """Open and lock the lock file of --save; retry if another run has removed it in between."""
    while True:
        lock = path.open("a")
        try:
            lock_file(path.parent, lock.fileno(), "--save")
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()


@contextlib.contextmanager
def lock_save_folder(save: str | None) -> Generator[None]:
    """Lock the --save directory for the duration of the context. Raises ConfigError if another run holds the lock."""
    if save is None:
        yield
        return
    path = Path(save) / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
    except OSError as error:
        raise ConfigError(f"--save {save} cannot be written: {error.strerror}; choose another directory") from error
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _numbered(folder: Path) -> Iterator[Path]:
    return (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in itertools.count(1))


def _recorded_save(folder: Path) -> str | None:
    saved = read_sections(folder).get("checkpoint", {}).get("save")
    return saved if isinstance(saved, str) else None


def _other_run_fix(folder: Path) -> str:
    saved = _recorded_save(folder) if (folder / CONFIG).exists() else None
    if saved is None:
        return f" without checkpoints; choose another directory, such as {free_folder(folder)}"
    return f"; resume it with --load {saved}, or choose another directory, such as {free_folder(folder)}"


def free_folder(folder: Path) -> Path:
    """Return the first of NAME, NAME-2, ... that does not exist."""
    return next(path for path in _numbered(folder) if not path.exists())


def _has_checkpoint(flags: CheckpointFlags) -> bool:
    try:
        folder = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
        return folder is not None and (flags.ckpt_step is not None or newest_step(folder) is not None)
    except CheckpointError:  # an unusable one, reported by the preflight
        return True


def _other_ledger(path: Path, flags: CheckpointFlags) -> str | None:
    if not path.is_file() or not _has_checkpoint(flags):
        return None
    try:
        folder = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
        assert folder is not None
        checkpoint = find_checkpoint(folder, step=flags.ckpt_step, save_dir=None)
    except CheckpointError:  # reported by the preflight
        return None
    assert checkpoint is not None
    try:
        check_mark(path, read_state(checkpoint)["ledger"])
    except CheckpointError as error:
        return str(error)
    return None


def _is_of(folder: Path, flags: CheckpointFlags) -> bool:
    if flags.load is None or not (folder / CONFIG).exists():
        return False
    saved = _recorded_save(folder)
    return saved is not None and Path(saved).resolve() == Path(flags.load).resolve()
