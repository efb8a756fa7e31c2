"""What the log of a process says at its end, and of why it came to that.

The process that serves HTTP often only reports that another one is gone; why that went stands further up, as the first
exception of the log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

TAIL_BYTES = 1 << 18
MOST_CHAINED = 4  # exceptions of one traceback that are quoted
MOST_LETTERS = 1000  # of a quoted line
WENT_WELL = re.compile(r'"[A-Z]+ /\S* HTTP/[\d.]+" 2\d\d|"GET /health HTTP/[\d.]+" 503')  # requests, and early looks
STARTED_AGAIN = "--- furlong starts this again; what is above is of an earlier process\n"
GOES_ON = "(the log goes on, and ends with:)"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_OF_NO_TRACEBACK = re.compile(r"Fatal Python error: |terminate called ")


def last_text(path: Path) -> str:
    """The end of a log, as far as its last process wrote it; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return _since_start(file.read().decode(errors="replace"))
    except FileNotFoundError:
        return ""


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log, without colours and requests that went well; [] if there is none."""
    return _lines(path)[-lines:]


def end_of_log(path: Path, lines: int) -> list[str]:
    """The same of what the last process wrote; before them its first exception, if it is further up."""
    found = _lines(path)
    last = found[-lines:]
    first = first_exception(found)
    if not first or first[-1] in last:
        return last
    return [*first, GOES_ON, *last]


def first_exception(lines: Sequence[str]) -> list[str]:
    """The first exception of a log: the line that tells of it, its innermost call, and what it and its followers say.

    [] if there is none. Followers are the exceptions that were raised while it was handled.
    """
    start = next((i for i, line in enumerate(lines) if _TRACEBACK in line or _OF_NO_TRACEBACK.search(line)), None)
    if start is None:
        return []
    found = [lines[start][:MOST_LETTERS]]
    calls: list[str] = []
    is_open = _TRACEBACK in lines[start]
    for line in lines[start + 1 :]:
        if is_open and line.startswith(" "):
            calls = [line] if line.startswith("  File ") else calls
        elif is_open and line:
            found += [*calls, line[:MOST_LETTERS]]
            is_open, calls = False, []
        elif line.startswith(_TRACEBACK) and len(found) < 2 * MOST_CHAINED:
            is_open = True
        elif line and not line.startswith(_CHAINED):
            break
    return found


def _lines(path: Path) -> list[str]:
    return [line for line in _COLOUR.sub("", last_text(path)).splitlines() if not WENT_WELL.search(line)]


def _since_start(log: str) -> str:
    """The part of a log that its last process wrote."""
    return log.rpartition(STARTED_AGAIN)[2]
