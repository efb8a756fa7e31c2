"""Helpers of actor processes: end with the parent, look up the address, pass exceptions between processes."""

from __future__ import annotations

import ctypes
import signal
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from furlong import errors
from furlong.errors import FurlongError, SyncError, TrainerError

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def own_address() -> str:
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
