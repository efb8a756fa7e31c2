"""What a path is, if it is not a file. A module by itself, because `core.files` imports modules that use it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def irregular_kind(path: Path) -> str | None:
    """Return what a path is if it exists and is not a file to read, such as "a named pipe"; None for files.

    Opening some of these never returns, and reading others never ends. Raises OSError without permission.
    """
    if not os.path.lexists(path):
        return None
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            raise
        return f"a link to {os.readlink(path)}, which does not exist"
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def require_file(path: Path) -> None:
    """Raise OSError if a path exists and is not a file, with what it is."""
    if (kind := irregular_kind(path)) is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
