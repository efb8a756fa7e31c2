"""Why a session does not answer a request."""

from furlong.errors import RolloutError


class EndedError(RolloutError):
    """The session has ended. Servers answer it with status 410."""


class FullContextError(RolloutError):
    """A prompt leaves no room for an answer. Servers answer it with status 400 and code context_length_exceeded."""
