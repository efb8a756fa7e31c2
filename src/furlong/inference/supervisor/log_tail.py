"""The end of a process's log, and the first exception in it.

The process that serves HTTP often only reports that another one is gone; the reason is further up, as the first
exception of the log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

TAIL_BYTES = 1 << 18
MAX_CHAINED = 4  # exceptions of one traceback that are quoted
MAX_LINE_LEN = 1000  # characters of a quoted line
SUCCESSFUL = re.compile(r'"[A-Z]+ /\S* HTTP/[\d.]+" 2\d\d|"GET /health HTTP/[\d.]+" 503')  # and early health checks
STARTED_AGAIN = "--- furlong starts this again; what is above is of an earlier process\n"
LOG_GAP = "(lines omitted; the log ends with:)"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FATAL = re.compile(r"Fatal Python error: |terminate called ")


def last_text(path: Path) -> str:
    """The end of a log, from the start of its last process; "" if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace").rpartition(STARTED_AGAIN)[2]
    except FileNotFoundError:
        return ""


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log, without colors and successful requests; [] if there is no log."""
    return _lines(path)[-lines:]


def end_of_log(path: Path, lines: int) -> list[str]:
    """The last lines of the last process, preceded by its first exception if that is further up."""
    all_lines = _lines(path)
    last = all_lines[-lines:]
    first = first_exception(all_lines)
    if not first or first[-1] in last:
        return last
    return [*first, LOG_GAP, *last]


def first_exception(lines: Sequence[str]) -> list[str]:
    """The first exception of a log: the line that announces it, its innermost call, and the messages of its chain.

    [] if there is none. The chain are the exceptions raised while it was handled.
    """
    start = next((i for i, line in enumerate(lines) if _TRACEBACK in line or _FATAL.search(line)), None)
    if start is None:
        return []
    quoted = [lines[start][:MAX_LINE_LEN]]
    calls: list[str] = []
    is_open = _TRACEBACK in lines[start]
    for line in lines[start + 1 :]:
        if is_open and line.startswith(" "):
            calls = [line] if line.startswith("  File ") else calls
        elif is_open and line:
            quoted += [*calls, line[:MAX_LINE_LEN]]
            is_open, calls = False, []
        elif line.startswith(_TRACEBACK) and len(quoted) < 2 * MAX_CHAINED:
            is_open = True
        elif line and not line.startswith(_CHAINED):
            break
    return quoted


def _lines(path: Path) -> list[str]:
    return [line for line in _COLOR.sub("", last_text(path)).splitlines() if not SUCCESSFUL.search(line)]
