"""What went wrong on a rank, carried to the driver whole: once, as furlong's own error, with the remote traceback."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from furlong import errors
from furlong.errors import FurlongError, SyncError, TrainerError


@dataclass(frozen=True)
class Failure:
    """An exception of a worker as data: `kind` is its class, `known` the nearest one of `furlong.errors`, or "".

    `facts` are the attributes of a SyncError.
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
        """The exception to raise on the driver: furlong's own class if it was one, else TrainerError."""
        made: type[FurlongError] = getattr(errors, self.known) if self.known else TrainerError
        message = self.message if self.known else f"{self.kind}: {self.message}"
        error = made(f"{message} (on {where})")
        vars(error).update(self.facts)
        error.__cause__ = RemoteError(self.trace)
        return error


class RemoteError(Exception):
    """Shows the traceback of another process below an exception of this one."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"
