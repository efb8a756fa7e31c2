"""Every error that furlong raises on purpose.

    FurlongError
    |- ConfigError(ValueError)    a flag or a combination of flags; raised before anything is started
    |- DataError(ValueError)      a row, a sample or a batch that cannot be used
    |- EngineError                generation, an engine's server, or its process
    |  `- NoAnswerError           an engine's server that did not answer
    |     |- EngineTimeoutError          in time: it is busy, or hangs
    |     `- UnreachableError     at all: it is gone, or refuses connections
    |- TrainerError               forward, backward, optimizer, or a training rank
    |- SyncError                  weights that did not arrive as they were sent
    |- RolloutError               a custom generate function, a filter, or the rollout round
    |- HookError                  a function that a flag names raised
    |- RewardError                a reward function or verifier
    |- ClusterError               Ray, the placement of processes, or a machine
    |- CheckpointError            a checkpoint that is missing, incomplete, or of another run
    `- DiagnosisError             a diagnosis ended the run, as --on-diagnosis says

A message has three parts: what is wrong, the values seen, the way out.
All of them pickle, because they cross process boundaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FurlongError(Exception):
    """Root of furlong's own errors."""


class ConfigError(FurlongError, ValueError):
    """One or more problems with the configuration; `problems` holds each as one message."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class DataError(FurlongError, ValueError):
    """A row, a sample or a batch that cannot be used."""


class EngineError(FurlongError):
    """Generation failed, or an engine is not in a state to generate."""


class NoAnswerError(EngineError):
    """The server at `url` did not answer."""

    def __init__(self, message: str, *, url: str = "") -> None:
        super().__init__(message)
        self.url = url


class UnreachableError(NoAnswerError):
    """The connection was refused, reset or closed, or a router had no server for the request."""


class EngineTimeoutError(NoAnswerError):
    """No answer came in time: the server is busy, or hangs."""


class TrainerError(FurlongError):
    """A training step could not be done."""


class SyncError(FurlongError):
    """Weights did not arrive at an engine as the trainer sent them.

    `late`, if something did not answer in time: what of the publication (version, bucket, group), after how many
    seconds, and which engines are missing. `broken`, by URL: what became of the connections of engines that gave no
    answer. Both are plain data.
    """

    def __init__(
        self, message: str, *, late: Mapping[str, Any] | None = None, broken: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.late, self.broken = late, broken or {}


class RolloutError(FurlongError):
    """A rollout round could not be completed."""


class HookError(FurlongError):
    """A function of the user's, named by a flag, raised; the message says where."""


class RewardError(FurlongError):
    """A reward function cannot be loaded or called."""


class ClusterError(FurlongError):
    """Ray cannot be reached, or does not give the GPUs that the run needs."""


class CheckpointError(FurlongError):
    """A checkpoint is missing, incomplete, or does not fit this run."""


class DiagnosisError(FurlongError):
    """A diagnosis ended the run in good order, as --on-diagnosis says; the message is its text."""
