"""Stacks of trainer ranks on any machine: on a signal, a rank writes its stacks to its log.

The handler (faulthandler) is written in C, so a rank that waits inside a library answers too. It needs no extra
package and no root.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

SIGNAL = signal.SIGUSR1
ANSWER_S = 3.0  # for a process to write its stacks
LOOK_S = 0.05


def answer_with_stacks() -> None:
    """Have this process write the stacks of its threads to standard error whenever `SIGNAL` comes."""
    faulthandler.register(SIGNAL, file=2, all_threads=True)


def ask_for_stacks(process: int, log: str) -> str:
    """Return the stacks of a process of this machine, whose standard error is `log`, or in brackets why it has none.

    A process id below 1 is not known yet; `os.kill` would signal this process' group.
    """
    if process < 1:
        return "(it has not started yet)"
    path, before = Path(log), b""
    try:
        start = path.stat().st_size
        os.kill(process, SIGNAL)
    except (OSError, ProcessLookupError) as error:
        return f"(gone: {error})"
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(start)
            found = file.read()
            if found and found == before:
                return found.decode(errors="replace")
            before = found
    return f"(no answer within {ANSWER_S:g} s: the process is stopped, or blocked in the kernel)"
