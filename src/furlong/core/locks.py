"""Locks on files of a folder that belongs to one run: held until the process ends, however it does."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of network file systems that are mounted without


def is_locked(path: Path) -> bool:
    """Whether a process holds the file. False where there is none, and where the file system has no locks."""
    if not path.is_file():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    return False
