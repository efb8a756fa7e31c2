"""Exceptions that furlong raises.

    FurlongError
    |- ConfigError(ValueError)    a flag or a combination of flags; raised before anything is started
    |- DataError(ValueError)      a row, a sample or a batch that cannot be used
    |- EngineError                generation, an engine server, or its process
    |  `- NoAnswerError           an engine server did not answer
    |     |- EngineTimeoutError   in time: it is busy, or hangs
    |     `- UnreachableError     at all: it is gone, or refuses connections
    |- TrainerError               forward, backward, optimizer, or a training rank
    |- SyncError                  weights that did not arrive as they were sent
    |- RolloutError               a custom generate function, a filter, or the rollout round
    |- InfraError                 for generate functions to raise: the episode failed, and not because of the policy
    |- HookError                  a function named by a flag raised
    |- RewardError                a reward function or verifier
    |- ClusterError               Ray, the placement of processes, or a machine
    |- CheckpointError            a checkpoint that is missing, incomplete, or of another run
    `- DiagnosisError             a diagnosis ended the run, because of --on-diagnosis

    TerminatedError(BaseException)  a signal ends the run

A message has three parts: what is wrong, the values seen, and the fix.
All exceptions can be pickled, because they cross process boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Codes of failures: a row of the catalogue of diagnoses, and a case of it.
ENGINE_EXITED, ENGINE_KILLED = "ENG03.exited", "ENG03.killed"  # killed: by SIGKILL or SIGTERM
ENGINE_HANGS, ENGINE_UNANSWERED = "ENG03.hangs", "ENG03.unanswered"  # unanswered: it refused or closed a connection
WORKER_DIED = "ENG03.worker"
MACHINE_MEMORY = "MEM02.machine"
PLACEMENT_TIMEOUT = "GPU02.timeout"


class FurlongError(Exception):
    """Base class of furlong's exceptions. Post-mortems recognize a failure by its `code`; "" for other errors."""

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        self.code = code

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows in place of frames (IPython's protocol)."""
        return [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", [])]


class InfraError(FurlongError):
    """Raised by a custom generate function if a sandbox, a server or the network failed, not the policy.

    The sample is generated once more. If that fails, too, it is excluded from the loss and from its group's baseline.
    """


class ConfigError(FurlongError, ValueError):
    """One or more problems with the configuration, each one message in `problems`."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class DataError(FurlongError, ValueError):
    """A row, a sample or a batch that cannot be used."""


class EngineError(FurlongError):
    """Generation failed, or an engine is not in a state to generate."""


@dataclass(frozen=True)
class Loss:
    """Why an engine or the router is lost, with the `code` of the failure; `log_end`: the end of its log."""

    reason: str
    code: str
    name: str = ""
    log_end: str = ""

    def __str__(self) -> str:
        name = f"{self.name}: " if self.name else ""
        return f"{name}{self.reason}{'; ' if self.log_end else ''}{self.log_end}"

    def error(self, prefix: str = "", suffix: str = "") -> EngineError:
        """Return an error with this text and code."""
        return EngineError(f"{prefix}{self}{suffix}", code=self.code)


class NoAnswerError(EngineError):
    """The server at `url` did not answer."""

    def __init__(self, message: str, *, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class UnreachableError(NoAnswerError):
    """The connection was refused, reset or closed, or a router had no server for the request."""


class EngineTimeoutError(NoAnswerError):
    """No answer in time: the server is busy, or hangs."""


class TrainerError(FurlongError):
    """A training step could not be done."""


class SyncError(FurlongError):
    """Weights did not arrive at an engine as the trainer sent them.

    `late`: after a timeout, the part of the weight update that is late (version, bucket, group), the seconds, and the
    engines that are missing. `broken`: the state of the connections of engines that did not answer, by URL. Both are
    plain data.
    """

    def __init__(
        self, message: str, *, late: Mapping[str, Any] | None = None, broken: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.late, self.broken = late, broken or {}


class RolloutError(FurlongError):
    """A rollout round could not be completed."""


class HookError(FurlongError):
    """A user function named by a flag raised; the message has the location."""


class RewardError(FurlongError):
    """A reward function cannot be loaded or called."""


class ClusterError(FurlongError):
    """Ray is unreachable, or does not provide the GPUs that the run needs."""


class CheckpointError(FurlongError):
    """A checkpoint is missing or incomplete, or does not fit this run."""


class TerminatedError(BaseException):
    """A run is ended from outside; the message is "SIGTERM", "SIGHUP" or "Ctrl-C".

    It may be raised in user code that blocks the event loop; `except Exception` does not catch it.
    """


class EndedBySignal(SystemExit):
    """SIGTERM ends a command that has no event loop of a run; its code is the exit code."""


class DiagnosisError(FurlongError):
    """A diagnosis ended the run in good order, because of --on-diagnosis; the message is its text."""


def failure_record(error: BaseException) -> dict[str, str]:
    """Return type, message and code of an error that ends a run; without a code, that of its cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, FurlongError) and cause.code:
            break
        cause = cause.__cause__ or cause.__context__
    code = "" if cause is None else cause.code
    return {"error": type(error).__name__, "message": str(error), "code": code}
