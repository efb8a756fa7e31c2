"""Errors raised by user code: describe them, and wrap hooks so that they raise HookError."""

from __future__ import annotations

import functools
import inspect
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from furlong.errors import FurlongError, HookError

FRAMES = 3  # frames of a traceback that are shown
MAX_CHARS = 600  # of a message or a line of code
_FURLONG = str(Path(__file__).parent.parent)
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def describe_exception(error: BaseException) -> str:
    """Return the exception and the last frames of its traceback, including at least one in the user's files."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_FURLONG, "<frozen"))]
    users = [f for f in frames if not f.filename.startswith(LIBRARIES)]
    shown = frames[-FRAMES:]
    if users and not any(f in users for f in shown):
        shown = [*users[-1:], *frames[1 - FRAMES :]]
    where = [f"{f.filename}:{f.lineno} in {f.name}: {_short(f.line or '')}".rstrip(": ") for f in shown]
    return "\n  ".join([f"{type(error).__name__}: {_short(str(error))}", *where])


def _short(text: str) -> str:
    """Truncate a text that may contain a whole page or tensor."""
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text):,} characters)"


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call returns an awaitable: for an async function, or an object with an async `__call__`."""
    call = None if inspect.isclass(function) else getattr(function, "__call__", None)  # noqa: B004  may be async itself
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def with_hook_errors(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap `function`, sync or async, to raise HookError with `name` and the location for exceptions of user code.

    furlong's own errors pass through.
    """
    if is_async(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except (Exception, SystemExit) as error:
                if _passes(error):
                    raise
                raise HookError(f"{name} raised {describe_exception(error)}") from error

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Exception, SystemExit) as error:
            if _passes(error):
                raise
            raise HookError(f"{name} raised {describe_exception(error)}") from error

    return call


def _passes(error: BaseException) -> bool:
    """Return whether callers handle the exception: furlong's own, and out-of-memory errors (PyTorch's, by name)."""
    return isinstance(error, FurlongError | MemoryError) or type(error).__name__ == "OutOfMemoryError"
