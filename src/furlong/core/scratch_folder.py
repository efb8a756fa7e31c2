"""Temporary folders that are deleted even if the process that made them is killed.

They are inside one folder of the process. This file, run as a script without furlong or site-packages, waits for the
end of that process, which closes a pipe, and deletes the folder: `python -I -S scratch_folder.py FOLDER`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

logger = logging.getLogger(__name__)

PREFIX = "furlong-scratch-"
_DELETED_WITHIN_S = 10.0  # processes that use the folder may end a little later


class _Scratch:
    """The folder of this process. It exists, with its reaper, while there are folders in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._root, self._pid, self._num_folders = "", 0, 0
        self._reaper: subprocess.Popen[bytes] | None = None

    def make(self, prefix: str) -> str:
        with self._lock:
            if self._pid != os.getpid():  # a forked child has the parent's folder and pipe
                self._root, self._pid, self._num_folders, self._reaper = "", os.getpid(), 0, None
            if not self._root:
                self._open()
            folder = tempfile.mkdtemp(prefix=prefix, dir=self._root)
            self._num_folders += 1
            return folder

    def remove(self, folder: str) -> None:
        try:
            delete_tree(folder)
        except OSError as error:
            logger.warning("the temporary folder %s cannot be deleted: %s; delete it by hand", folder, error)
            return
        with self._lock:
            if self._pid != os.getpid() or os.path.dirname(folder) != self._root:
                return
            self._num_folders -= 1
            if self._num_folders == 0:
                self._close()

    @property
    def reaper_pid(self) -> int | None:
        return self._reaper.pid if self._reaper is not None and self._pid == os.getpid() else None

    def close_in_child(self) -> None:
        """Close the pipe in a forked process, so that the end of this one ends it."""
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()

    def _open(self) -> None:
        root = tempfile.mkdtemp(prefix=PREFIX)
        try:
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, root],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            os.rmdir(root)
            raise
        self._root = root

    def _close(self) -> None:
        reaper, root, self._reaper, self._root = self._reaper, self._root, None, ""
        delete_tree(root)
        if reaper is not None and reaper.stdin is not None:
            reaper.stdin.close()
            reaper.wait()


_scratch = _Scratch()
os.register_at_fork(after_in_child=_scratch.close_in_child)


def make_scratch_folder(prefix: str) -> str:
    """Return a new temporary folder, which is deleted when this process ends, however it ends.

    Raises OSError if the folder, or the process that deletes it, cannot be made.
    """
    return _scratch.make(prefix)


def remove_scratch_folder(folder: str) -> None:
    """Delete a folder of `make_scratch_folder`; logs a warning if that fails. May block for some milliseconds."""
    _scratch.remove(folder)


def scratch_reaper() -> int | None:
    """Return the id of the process that deletes the folders of this one; None without folders."""
    return _scratch.reaper_pid


def delete_tree(root: str) -> None:
    """Delete a directory if it exists, with folders that have no permissions."""

    def reopen(function: Any, path: str, error: Any) -> None:
        if issubclass(error[0], FileNotFoundError):
            return
        os.chmod(os.path.dirname(path), stat.S_IRWXU)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, stat.S_IRWXU)
            shutil.rmtree(path)
        elif function is not os.scandir:
            function(path)

    if os.path.lexists(root):
        shutil.rmtree(root, onerror=reopen)


def _reap(root: str) -> None:
    """Delete `root` after the end of stdin."""
    sys.stdin.buffer.read()
    deadline = time.monotonic() + _DELETED_WITHIN_S
    while os.path.lexists(root) and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # a process still writes there
            delete_tree(root)
        time.sleep(0.02)


if __name__ == "__main__":
    _reap(sys.argv[1])
