"""What a function of the user raised, and where in the user's files."""

from __future__ import annotations

import functools
import inspect
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from furlong.errors import FurlongError, HookError

FRAMES = 3  # of a traceback that are shown
LETTERS = 600  # of what was said, and of a line of code
_OWN = str(Path(__file__).parent.parent)
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})  # nobody mends these


def describe_exception(error: BaseException) -> str:
    """Say what was raised and where: the exception, the last frames, one of the user's files among them."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_OWN, "<frozen"))]
    users = [f for f in frames if not f.filename.startswith(LIBRARIES)]
    shown = frames[-FRAMES:]
    if users and not any(f in users for f in shown):
        shown = [*users[-1:], *frames[1 - FRAMES :]]
    where = [f"{f.filename}:{f.lineno} in {f.name}: {_short(f.line or '')}".rstrip(": ") for f in shown]
    return "\n  ".join([f"{type(error).__name__}: {_short(str(error))}", *where])


def _short(text: str) -> str:
    """The beginning of a text that may hold a whole page or tensor."""
    return text if len(text) <= LETTERS else f"{text[:LETTERS]}... ({len(text):,} letters)"


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives something to await: of an async function, or of an object with an async `__call__`."""
    call = None if inspect.isclass(function) else getattr(function, "__call__", None)  # noqa: B004  may be async itself
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def with_hook_errors(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, of which an exception becomes a HookError that begins with `name` and says where it was raised.

    Errors of furlong itself, which say what is wrong, pass. Works for async functions, too.
    """
    if is_async(function):

        @functools.wraps(function)
        async def awaited(*words: Any, **named_words: Any) -> Any:
            try:
                return await function(*words, **named_words)
            except (Exception, SystemExit) as error:
                if _passes(error):
                    raise
                raise HookError(f"{name} raised {describe_exception(error)}") from error

        return awaited

    @functools.wraps(function)
    def called(*words: Any, **named_words: Any) -> Any:
        try:
            return function(*words, **named_words)
        except (Exception, SystemExit) as error:
            if _passes(error):
                raise
            raise HookError(f"{name} raised {describe_exception(error)}") from error

    return called


def _passes(error: BaseException) -> bool:
    """Whether an exception is understood further up: furlong's own, and a lack of memory (PyTorch's, by its name)."""
    return isinstance(error, FurlongError | MemoryError) or type(error).__name__ == "OutOfMemoryError"
