"""The folder of a run: which one it is, whose it is, and how its flags differ from before."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TextIO

from furlong.config.flags import Resolved
from furlong.config.sections import CheckpointFlags
from furlong.core.checkpoint_folder import TRACKER, continued
from furlong.doctor.diff import different_flags
from furlong.doctor.recorded import flags_of, sections_of
from furlong.errors import ConfigError

logger = logging.getLogger("furlong")

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
LOCK = ".lock"  # in the folder of --save while a run may write there: empty, and locked


def run_folder(resolved: Resolved) -> Path:
    """Make the run's folder. One in which steps are recorded is only used again by the run that it is of.

    That is a run that finds a checkpoint to continue (whose mark fits one ledger only), or that names with --load the
    --save of the folder's run. Where the folder was not named by the user, the run's own or the first free one of
    NAME, NAME-2, ... is taken. Raises ConfigError where it was named, and is another run's.
    """
    flags = resolved.config.checkpoint
    wanted = Path(str(resolved.config.track.output_dir))
    folder = wanted
    if resolved.sources["output_dir"].startswith("derived"):
        taken = list(itertools.takewhile(lambda path: (path / "config.json").exists(), _numbered(wanted)))
        free = next(itertools.islice(_numbered(wanted), len(taken), None))
        folder = next((path for path in taken if _is_of(path, flags)), free)
    elif (wanted / "metrics.jsonl").exists() and not (_has_checkpoint(flags) or _is_of(wanted, flags)):
        raise ConfigError(f"--output-dir {wanted} already holds a run{_way_on(wanted)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output-dir {folder} cannot be made: {error.strerror}; name another folder") from error
    return folder


def say_changed_flags(folder: Path, resolved: Resolved) -> None:
    """Log the flags in which a run that goes on differs from what its folder says of it until now."""
    if not (folder / "config.json").exists():
        return
    sections = json.loads(resolved.to_json())["config"].values()
    changed = different_flags(flags_of(folder), {name: value for flags in sections for name, value in flags.items()})
    if changed:
        said = "; ".join(f"{flag} was {before}, is {now}" for flag, (before, now) in changed.items())
        logger.info("flags that are not as they were in this folder: %s", said)


def write_config(folder: Path, resolved: Resolved) -> None:
    """Write `config.json`. Raises ConfigError if the folder's disk does not take it."""
    try:
        (folder / "config.json").write_text(resolved.to_json())
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
        raise ConfigError(
            f"{flag} {folder} belongs to a run that is going on; wait for it, end it, or name another folder"
        ) from None
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
    free = next(path for path in _numbered(folder) if not path.exists())
    saved = sections_of(folder)["checkpoint"]["save"] if (folder / "config.json").exists() else None
    if saved is None:
        return f", and no checkpoints of it to go on from; name another folder, such as {free}"
    return f"; resume it with --load {saved}, or name another folder, such as {free}"


def _has_checkpoint(flags: CheckpointFlags) -> bool:
    """Whether --load finds something to continue."""
    folder = continued(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    return folder is not None and (flags.ckpt_step is not None or (folder / TRACKER).exists())


def _is_of(folder: Path, flags: CheckpointFlags) -> bool:
    """Whether the run in `folder` saves to where this one loads from."""
    if flags.load is None or not (folder / "config.json").exists():
        return False
    saved = sections_of(folder)["checkpoint"]["save"]
    return saved is not None and Path(saved).resolve() == Path(flags.load).resolve()
