"""Helpers of actor processes: end with the parent, pass exceptions between processes, report stacks on a signal.

The signal handler (faulthandler) is written in C, so a rank that waits inside a library answers too. It needs no extra
package and no root.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from furlong import errors
from furlong.errors import FurlongError, SyncError, TrainerError

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def local_address() -> str:
    """Return the address of this machine in the cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


@dataclass(frozen=True)
class Failure:
    """An exception of an actor as data.

    kind: its class. known: the nearest class of `furlong.errors`, or "". facts: attributes of a SyncError.
    """

    kind: str
    known: str
    message: str
    trace: str
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Record an exception that is being handled."""
        known = next((c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__), "")
        trace = "".join(traceback.format_exception(error))
        facts = {"late": error.late, "broken": error.broken} if isinstance(error, SyncError) else {}
        return Failure(type(error).__name__, known, str(error), trace, facts)

    def error(self, where: str) -> FurlongError:
        """Make the exception to raise on the driver: furlong's own class if it was one, else TrainerError."""
        error_class: type[FurlongError] = getattr(errors, self.known) if self.known else TrainerError
        message = self.message if self.known else f"{self.kind}: {self.message}"
        error = error_class(f"{message} (on {where})")
        vars(error).update(self.facts)
        error.__cause__ = RemoteError(self.trace)
        return error


class RemoteError(Exception):
    """Carries the traceback of another process as the cause of an exception in this one."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


STACKS_SIGNAL = signal.SIGUSR1
STACKS_S = 3.0  # for a process to write its stacks
STACKS_POLL_S = 0.05


def answer_with_stacks() -> None:
    """Have this process write the stacks of its threads to standard error on `STACKS_SIGNAL`."""
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)


def ask_for_stacks(process: int, log: str) -> str:
    """Return the stacks of a process of this machine, whose standard error is `log`, or in brackets why it has none.

    A process id below 1 is not known yet; `os.kill` would signal this process' group.
    """
    if process < 1:
        return "(it has not started yet)"
    path, before = Path(log), b""
    try:
        start = path.stat().st_size
        os.kill(process, STACKS_SIGNAL)
    except (OSError, ProcessLookupError) as error:
        return f"(gone: {error})"
    deadline = time.monotonic() + STACKS_S
    while time.monotonic() < deadline:
        time.sleep(STACKS_POLL_S)
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(start)
            stacks = file.read()
            if stacks and stacks == before:  # complete
                return stacks.decode(errors="replace")
            before = stacks
    return f"(no answer within {STACKS_S:g} s: the process is stopped, or blocked in the kernel)"
