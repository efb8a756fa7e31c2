"""Live processes of supervised commands, environments and sandboxes that this test process has started."""

from __future__ import annotations

import os

import psutil

from furlong.sandboxes.supervised_process import MARK

OWNER = "COMMANDS_OF_TESTS"  # environment variable: this test process, as others run beside it
os.environ[OWNER] = str(os.getpid())


def live_commands() -> dict[str, list[str]]:
    """Return the command lines of live processes by mark: one for each command that was started."""
    found: dict[str, list[str]] = {}
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            is_own = MARK in variables and variables.get(OWNER) == os.environ[OWNER]
            if is_own and process.status() != psutil.STATUS_ZOMBIE:
                found.setdefault(variables[MARK], []).append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
