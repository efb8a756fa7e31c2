"""The folder of a run: which one it is, whose it is, and how its flags differ from before."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TextIO

from furlong.config.command_line import Resolved, flags_as_written
from furlong.config.problem import Problem
from furlong.config.sections import CheckpointFlags
from furlong.core.checkpoint_folder import STATE, TRACKER, find_checkpoint, find_resume_folder
from furlong.core.files import NO_LOCKS, is_locked, write_atomically
from furlong.data.ledger import check_mark
from furlong.errors import CheckpointError, ConfigError
from furlong.tools.run_diff import different_flags
from furlong.tracking.run_files import CONFIG, EVENTS, METRICS, RUN_LOG, read_flags, read_sections

logger = logging.getLogger("furlong")

LEDGER = "ledger.jsonl"
WRITTEN = (CONFIG, METRICS, EVENTS, RUN_LOG, LEDGER, "order.jsonl")  # files of a run's folder that it goes on with
LOCK = ".lock"  # in the folder of --save while a run may write there: empty, and locked
GOES_ON = "belongs to a run that is going on; wait for it, end it, or name another folder"


def run_folder(resolved: Resolved) -> Path:
    """Make the run's folder. Where the user has not named one, it is the run's own or the first free one.

    Raises ConfigError if it cannot be made. `folder_problems` says whose it may be.
    """
    folder = _folder_of(resolved)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output-dir {folder} cannot be made: {error.strerror}; name another folder") from error
    return folder


def folder_problems(resolved: Resolved) -> list[Problem]:
    """Why the run cannot have its folder, or that of --save: another one is in it, or goes on there.

    A folder in which steps are recorded is only used again by the run that it is of: one that finds a checkpoint to
    continue, whose mark fits its ledger, or that names with --load the --save of the folder's run.
    """
    try:
        return list(map(Problem, _folder_problems(resolved)))
    except ConfigError as error:  # of a config.json that was damaged
        return [Problem(str(error))]
    except OSError as error:
        return [Problem(f"{error.filename} cannot be looked at: {error.strerror}; name another folder")]


def _folder_problems(resolved: Resolved) -> Iterator[str]:
    flags = resolved.config.checkpoint
    folder = _folder_of(resolved)
    for path in (folder / name for name in WRITTEN if (folder / name).exists()):
        if not path.is_file() or not os.access(path, os.W_OK):
            what = "cannot be written by this user" if path.is_file() else "is no file"
            yield f"--output-dir {folder}: {path.name} there {what}; name another folder, such as {_free(folder)}"
            return
    if is_locked(folder / RUN_LOG):
        yield f"--output-dir {folder} {GOES_ON}"
    elif (folder / METRICS).exists() and not (_has_checkpoint(flags) or _is_of(folder, flags)):
        yield f"--output-dir {folder} already holds a run{_way_on(folder)}"
    elif (why := _other_ledger(folder / LEDGER, flags)) is not None:
        yield f"--output-dir {folder}: {why}, or name another folder, such as {_free(folder)}"
    if flags.save is not None and is_locked(Path(flags.save) / LOCK):
        yield f"--save {flags.save} {GOES_ON}"


def _folder_of(resolved: Resolved) -> Path:
    """The folder that was named; else the run's own, or the first free one of NAME, NAME-2, ..."""
    wanted = Path(str(resolved.config.track.output_dir))
    if not resolved.sources["output_dir"].startswith("derived"):
        return wanted
    taken = list(itertools.takewhile(lambda path: (path / CONFIG).exists(), _numbered(wanted)))
    free = next(itertools.islice(_numbered(wanted), len(taken), None))
    return next((path for path in taken if _is_of(path, resolved.config.checkpoint)), free)


def say_changed_flags(folder: Path, resolved: Resolved) -> None:
    """Log the flags in which a run that goes on differs from what its folder says of it until now."""
    if not (folder / CONFIG).exists():
        return
    changed = different_flags(read_flags(folder), flags_as_written(resolved.config))
    if changed:
        said = "; ".join(f"{flag} was {before}, is {now}" for flag, (before, now) in changed.items())
        logger.info("flags that are not as they were in this folder: %s", said)


def write_config(folder: Path, resolved: Resolved) -> None:
    """Write `config.json`, in one move. Raises ConfigError if the folder's disk does not take it."""
    try:
        write_atomically(folder / CONFIG, resolved.to_json())
    except OSError as error:
        raise ConfigError(
            f"--output-dir {folder} cannot be written: {error.strerror}; make room there, or name another folder"
        ) from error


def take(folder: Path, handle: int, flag: str = "--output-dir") -> None:
    """Lock an open file of a folder for the life of this process. Raises ConfigError if another one has it.

    Some network file systems are mounted without locks: there it is said that nothing keeps others away.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{flag} {folder} {GOES_ON}") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning(
            "%s %s: its file system has no locks (%s), so nothing keeps another run from writing there too",
            flag,
            folder,
            error.strerror,
        )


def _locked(path: Path) -> TextIO:
    """Open a file of --save and lock it; anew where the run that had it has removed it meanwhile."""
    while True:
        lock = path.open("a")
        try:
            take(path.parent, lock.fileno(), "--save")
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()


@contextlib.contextmanager
def saved_by_one(save: str | None) -> Generator[None]:
    """Let no other run write checkpoints into `save` meanwhile. Raises ConfigError if one does."""
    if save is None:
        yield
        return
    path = Path(save) / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
    except OSError as error:
        raise ConfigError(f"--save {save} cannot be written: {error.strerror}; name another folder") from error
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _numbered(folder: Path) -> Iterator[Path]:
    """NAME, NAME-2, NAME-3, ..."""
    return (folder if n == 1 else folder.with_name(f"{folder.name}-{n}") for n in itertools.count(1))


def _way_on(folder: Path) -> str:
    """What to do where the run in a named folder is not the one that starts."""
    saved = read_sections(folder)["checkpoint"]["save"] if (folder / CONFIG).exists() else None
    if saved is None:
        return f", and no checkpoints of it to go on from; name another folder, such as {_free(folder)}"
    return f"; resume it with --load {saved}, or name another folder, such as {_free(folder)}"


def _free(folder: Path) -> Path:
    """The first of NAME, NAME-2, ... that is not there."""
    return next(path for path in _numbered(folder) if not path.exists())


def _has_checkpoint(flags: CheckpointFlags) -> bool:
    """Whether --load finds something to continue."""
    folder = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    return folder is not None and (flags.ckpt_step is not None or (folder / TRACKER).exists())


def _other_ledger(path: Path, flags: CheckpointFlags) -> str | None:
    """Why a ledger is not the one that the run's checkpoint continues; None if it is, or if none is continued."""
    if not path.is_file() or not _has_checkpoint(flags):
        return None
    folder = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    assert folder is not None
    try:
        found = find_checkpoint(folder, step=flags.ckpt_step, save_dir=None)
    except CheckpointError:  # said by the preflight
        return None
    assert found is not None
    try:
        check_mark(path, json.loads((found / STATE).read_text())["ledger"])
    except CheckpointError as error:
        return str(error)
    return None


def _is_of(folder: Path, flags: CheckpointFlags) -> bool:
    """Whether the run in `folder` saves to where this one loads from."""
    if flags.load is None or not (folder / CONFIG).exists():
        return False
    saved = read_sections(folder)["checkpoint"]["save"]
    return saved is not None and Path(saved).resolve() == Path(flags.load).resolve()
