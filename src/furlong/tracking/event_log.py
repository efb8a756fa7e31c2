"""`events.jsonl`: the events of a run with their times, for the doctor and for people."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import orjson

logger = logging.getLogger(__name__)


class EventLog:
    """Appends one JSON object per event: `time` (Unix seconds), `event`, and the given fields. Thread-safe.

    A failed write (full disk) does not end the run: it is counted in `failures`, and the first one is logged. An
    incomplete line, from a failed write or a crash, is terminated before the next event.

    >>> events = EventLog(Path("outputs/x/events.jsonl"))
    >>> events.write("checkpoint_saved", step=20, seconds=1.5)
    >>> events.close()
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("a+b", buffering=0)
        self._is_torn = self._file.seek(0, os.SEEK_END) > 0 and self._last_byte() != b"\n"
        self._lock = threading.Lock()
        self.failures = 0

    def write(self, event: str, **fields: Any) -> None:
        """Record an event now. Fields without a JSON form are written as text."""
        line = orjson.dumps(
            {"time": time.time(), "event": event, **fields}, default=str, option=orjson.OPT_NON_STR_KEYS
        )
        with self._lock:
            try:
                line = (b"\n" if self._is_torn else b"") + line + b"\n"
                self._is_torn = self._file.write(line) != len(line)
                if self._is_torn:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self.failures += 1
                if self.failures == 1:
                    logger.warning("cannot write event %s (%s); later failures are only counted", event, error)

    def _last_byte(self) -> bytes:
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
