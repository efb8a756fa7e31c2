"""The error of requests that cannot be answered as they are."""

from furlong.errors import EngineError


class RequestError(EngineError):
    """The prompt or its parameters are invalid. `status` is that of an HTTP reply."""

    status: int = 400
