"""Errors of user code: describe them with the user's own frame, and wrap hooks so that they raise HookError."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from furlong.core.text import redact_credentials
from furlong.errors import EndedBySignal, FurlongError, HookError, TerminatedError

FRAMES = 3  # frames of a traceback that are shown
MAX_CHARS = 600  # of a message or a line of code
STACK_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+) in (\S+)', re.MULTILINE)  # as faulthandler prints it
_FURLONG = str(Path(__file__).parent.parent)
_INSTALLED = ("/site-packages/", "/dist-packages/")  # also of another environment on the path
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def is_user_file(name: str) -> bool:
    """Return whether a file name in a traceback is not one of furlong or of an installed library."""
    return not name.startswith((_FURLONG, "<")) and not is_library_file(name)


def is_library_file(name: str) -> bool:
    """Return whether a file name in a traceback is one of Python or of an installed package other than furlong."""
    if name.startswith(_FURLONG):
        return False
    return name.startswith(("<", *LIBRARIES)) or any(part in name for part in _INSTALLED)


def location_of(function: Callable[..., Any]) -> str:
    """Return `file:line` of a function's definition, or its name."""
    inner = inspect.unwrap(function)
    methods = (
        [*vars(inner).values()] if isinstance(inner, type) else [inspect.getattr_static(type(inner), "__call__", None)]
    )
    codes = [getattr(each, "__code__", None) for each in (inner, *methods)]
    code = next((code for code in codes if code is not None), None)
    return repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def describe_exception(error: BaseException) -> str:
    """Return the exception and the last frames of its traceback, including at least one in the user's files."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_FURLONG, "<frozen"))]
    users = [f for f in frames if is_user_file(f.filename)]
    shown = frames[-FRAMES:]
    if users and not any(f in users for f in shown):
        shown = [*users[-1:], *frames[1 - FRAMES :]]
    where = [f"{f.filename}:{f.lineno} in {f.name}: {_short(f.line or '')}".rstrip(": ") for f in shown]
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return "\n  ".join([f"{type(error).__name__}: {_short(redact_credentials(message_of(error)))}{notes}", *where])


def place_of(error: BaseException) -> str:
    """Return ` at file:line` of the innermost frame in a file of the user; "" if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def message_of(error: BaseException) -> str:
    """Return the text of an exception, whose `__str__` may fail; control characters and surrogates are escaped."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001  code of the user
        return f"its text could not be built, __str__ raised {type(failure).__name__}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text[: 2 * MAX_CHARS])


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text):,} characters)"


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of user code that the event loop called; None if it runs none."""
    found: FrameType | None = None
    while frame is not None:
        if is_event_loop(frame):
            return found
        if found is None and is_user_file(frame.f_code.co_filename):
            found = frame
        frame = frame.f_back
    return None


def is_event_loop(frame: FrameType) -> bool:
    """Return whether this is the frame of the event loop itself."""
    code = frame.f_code
    return code.co_name == "run_forever" and code.co_filename.endswith("asyncio/base_events.py")


def frame_place(frame: FrameType) -> str:
    """Return `function (file:line)` of a frame."""
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


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
            except BaseException as error:
                if passes(error):
                    raise
                raise HookError(f"{name} raised {describe_exception(error)}") from error

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if passes(error):
                raise
            raise HookError(f"{name} raised {describe_exception(error)}") from error

    return call


def passes(error: BaseException) -> bool:
    """Return whether callers handle the exception: furlong's own, and PyTorch's out-of-memory error, by name."""
    is_memory = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, FurlongError) or is_memory or not is_raised_by_user(error)


def is_raised_by_user(error: BaseException) -> bool:
    """Return whether user code raised this, including `sys.exit`; False for signals and for a task's cancellation.

    Call it in the `except` clause, in the task that called the user code.
    """
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # outside an event loop nothing is cancelled
            return True
        return task is not None and not task.cancelling()
    return not isinstance(error, KeyboardInterrupt | GeneratorExit | TerminatedError | EndedBySignal)
