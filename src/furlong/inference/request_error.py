"""The error of requests that cannot be answered as they are."""

from furlong.errors import EngineError


class RequestError(EngineError):
    """The prompt or its parameters are invalid. `status` is that of an HTTP reply. param: the field, if it is one's."""

    status: int = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
