"""Live processes of supervised commands, environments and sandboxes."""

from __future__ import annotations

import os

import psutil

from furlong.core.supervised_process import MARK


def live_commands(pid: int | None = None) -> dict[str, list[str]]:
    """Return the command lines of live processes by mark: one for each command that this process, or `pid`, started."""
    found: dict[str, list[str]] = {}
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK, "")
            if mark.startswith(f"{pid or os.getpid()}-") and process.status() != psutil.STATUS_ZOMBIE:
                found.setdefault(mark, []).append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
