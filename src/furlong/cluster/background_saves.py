"""Checkpoints that ranks write while they train on: each leaves a note in the folder when its files are on the disk.

A rank that trains answers no call, so the driver looks for the notes. What a write failed with is asked for, as a disk
that is full may have no room for a note either.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from furlong.cluster.rank_failure import Failure
from furlong.core.pending_files import PendingFiles
from furlong.errors import CheckpointError

logger = logging.getLogger(__name__)


class Writing:
    """Writes a rank's files in a thread of its own; what that failed with is `failure`."""

    def __init__(self, files: PendingFiles, folder: Path, rank: int) -> None:
        self.failure: Failure | None = None
        self._files, self._folder, self._rank = files, folder, rank
        threading.Thread(target=self._write, name="furlong-checkpoint", daemon=True).start()

    def _write(self) -> None:
        try:
            self._files.write()
            note(self._folder, self._rank).touch()
        except Exception as caught:
            logger.exception("the checkpoint was not written")
            error = CheckpointError(
                f"cannot write into {self._folder}: {caught}; make room there, or give another folder"
            )
            error.__cause__ = caught
            self.failure = Failure.of(error)


def note(folder: Path, rank: int) -> Path:
    """The file that says that the files of `rank` are written."""
    return folder / f"written_{rank}"
