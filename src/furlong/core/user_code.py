"""Errors of user code: describe them, wrap hooks so that they raise HookError, and turn exits into exceptions."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dis
import functools
import inspect
import os
import signal
import sysconfig
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from furlong.core.forked_processes import end_if_forked
from furlong.core.process_guard import process_guard
from furlong.errors import EndedBySignal, FurlongError, HookError, TerminatedError

FRAMES = 3  # frames of a traceback that are shown
MAX_CHARS = 600  # of a message or a line of code
_FURLONG = str(Path(__file__).parent.parent)
_INSTALLED = ("/site-packages/", "/dist-packages/")  # also of another environment on the path
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class ProcessExitError(RuntimeError):
    """User code called a function that would end its process of furlong."""


_exit = os._exit  # it raises within `exits_raise`
before_exit: list[Callable[[], None]] = []  # called by `exit_process`
LOOP_STOPPED = "Event loop stopped before Future completed."  # by loop.stop()
_EXITS = ("_exit", "abort", "execv", "execve")  # functions of `os` that end this process
_C_EXITS = ("exit", "_exit", "_Exit", "quick_exit", "abort", "Py_Exit")


def exit_process(code: int) -> NoReturn:
    """End this process at once, also within `exits_raise`, after the functions of `before_exit`."""
    for call in before_exit:
        call()
    _exit(code)


def is_user_file(name: str) -> bool:
    """Return whether a file name in a traceback is not one of furlong or of an installed library."""
    return not name.startswith((_FURLONG, "<")) and not is_library_file(name)


def is_library_file(name: str) -> bool:
    """Return whether a file name in a traceback is one of Python or of an installed package other than furlong."""
    if name.startswith(_FURLONG):
        return False
    return name.startswith(("<", *LIBRARIES)) or any(part in name for part in _INSTALLED)


def describe_exception(error: BaseException) -> str:
    """Return the exception and the last frames of its traceback, including at least one in the user's files."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_FURLONG, "<frozen"))]
    users = [f for f in frames if is_user_file(f.filename)]
    shown = frames[-FRAMES:]
    if users and not any(f in users for f in shown):
        shown = [*users[-1:], *frames[1 - FRAMES :]]
    where = [f"{f.filename}:{f.lineno} in {f.name}: {_short(f.line or '')}".rstrip(": ") for f in shown]
    return "\n  ".join([f"{type(error).__name__}: {_short(message_of(error))}", *where])


def place_of(error: BaseException) -> str:
    """Return ` at file:line` of the innermost frame in a file of the user; "" if there is none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def message_of(error: BaseException) -> str:
    """Return the text of an exception, whose class may be one of user code that fails to build it.

    Characters that logs and terminals cannot show, such as surrogates and escape sequences, are written as escapes.
    """
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001  code of the user
        return f"its text could not be built, __str__ raised {type(failure).__name__}"
    return text if text.isprintable() else "".join(_shown(character) for character in text[: 2 * MAX_CHARS])


def _shown(character: str) -> str:
    return character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1]


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
            process_guard.begin(function, name)
            pid = os.getpid()
            try:
                return await function(*args, **kwargs)
            except BaseException as error:
                if _passes(error):
                    raise
                raise _hook_error(name, error) from error
            finally:
                end_if_forked(pid)
                process_guard.check(function, name)

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        process_guard.begin(function, name)
        pid = os.getpid()
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if _passes(error):
                raise
            raise _hook_error(name, error) from error
        finally:
            end_if_forked(pid)
            process_guard.check(function, name)

    return call


def _hook_error(name: str, error: BaseException) -> HookError:
    text = f"{name} raised {describe_exception(error)}"
    release_memory(error)
    return HookError(text)


def release_memory(error: BaseException) -> None:
    """Delete the local variables of the functions that a MemoryError went through: furlong needs memory to end."""
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)


def _passes(error: BaseException) -> bool:
    """Return whether callers handle the exception: furlong's own, and PyTorch's out-of-memory error, by name."""
    is_memory = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, FurlongError) or is_memory or not is_raised_by_user(error)


def is_raised_by_user(error: BaseException) -> bool:
    """Return whether user code raised this, including `sys.exit`; False for signals and for a task's cancellation.

    KeyboardInterrupt and GeneratorExit are user code's if a `raise` statement in a user's file raised them, not Ctrl-C
    or the end of a coroutine. Call it in the `except` clause, in the task that called the user code.
    """
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # outside an event loop nothing is cancelled
            return True
        return task is not None and not task.cancelling()
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return _is_from_raise_statement(error)
    return not isinstance(error, TerminatedError | EndedBySignal)


def _is_from_raise_statement(error: BaseException) -> bool:
    """Return whether a `raise` statement in a user's file, other than the handler of Ctrl-C, raised an exception."""
    frames = [(each.f_code, place) for each, place in _walk(error.__traceback__)]
    if not frames:
        return False
    handler = getattr(signal.getsignal(signal.SIGINT), "__code__", None)
    code, place = frames[-1]
    is_raise = is_user_file(code.co_filename) and code.co_code[place] == dis.opmap["RAISE_VARARGS"]
    return is_raise and all(each is not handler for each, _ in frames)


def _walk(trace: TracebackType | None) -> Generator[tuple[FrameType, int]]:
    """Yield the frames of a traceback, outermost first, with the offset of their last instruction."""
    while trace is not None:
        yield trace.tb_frame, trace.tb_lasti
        trace = trace.tb_next


@contextlib.contextmanager
def exits_raise() -> Generator[None]:
    """Make `os._exit`, `os.abort` and `os.exec*` raise RuntimeError in this process while the context is open.

    They would end the run without a word, `os._exit(0)` even with exit code 0. So do C's functions of this kind that
    are called through ctypes. Child processes created by a fork can still call them. Code that bound the functions
    before, and C code, is not affected; for C's `exit` see `core.c_exit`.
    """
    pid, before = os.getpid(), {name: getattr(os, name) for name in _EXITS}
    of_library = ctypes.CDLL.__getitem__

    def checked(self: ctypes.CDLL, name_or_ordinal: str) -> Any:
        function = of_library(self, name_or_ordinal)
        return _raising(name_or_ordinal, function, pid, "C's ") if name_or_ordinal in _C_EXITS else function

    for name, original in before.items():
        setattr(os, name, _raising(name, original, pid))
    ctypes.CDLL.__getitem__ = checked
    try:
        yield
    finally:
        ctypes.CDLL.__getitem__ = of_library
        for name, original in before.items():
            setattr(os, name, original)


def _raising(name: str, original: Callable[..., Any], pid: int, owner: str = "os.") -> Callable[..., NoReturn]:
    def leave(*args: Any) -> NoReturn:
        if os.getpid() == pid:
            shown = ", ".join(map(repr, args)) if "exit" in name.lower() else "..."
            raise ProcessExitError(
                f"{owner}{name}({shown}) would end this process of furlong; raise an exception, or call it in a child "
                "process only"
            )
        original(*args)
        raise AssertionError(f"{owner}{name} returned")

    return functools.update_wrapper(leave, original)


@contextlib.contextmanager
def exits_fail_the_run() -> Generator[None]:
    """Raise HookError with the location for what user code raised outside the functions that flags name.

    Examples are `sys.exit()` in a task that a generate function created, which ends the event loop, and an error in the
    backward pass of a loss function's own operator.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        if not is_raised_by_user(error):
            raise
        raise HookError(f"user code ended the run: {describe_exception(error)}; raise an exception instead") from error
    except Exception as error:
        if isinstance(error, RuntimeError) and str(error) == LOOP_STOPPED:
            caller = process_guard.last_called() or "no hook"
            raise HookError(f"user code stopped the event loop of the run; {caller} was called last") from error
        if _passes(error) or not place_of(error):
            raise
        raise _hook_error("user code", error) from error
