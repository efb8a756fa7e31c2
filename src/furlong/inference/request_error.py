"""The error of requests that cannot be answered as they are."""

from furlong.errors import EngineError


class RequestError(EngineError):
    """The prompt or its parameters are invalid."""
