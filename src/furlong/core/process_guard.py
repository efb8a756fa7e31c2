"""Detects user code that changes this process while it is called."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from furlong.core.forked_processes import end_if_forked
from furlong.core.limit_guard import limits_stay
from furlong.core.log_state import LogState
from furlong.core.process_state import ProcessState
from furlong.errors import EngineError, FurlongError, HookError

logger = logging.getLogger(__name__)

WAKE_UP = signal.SIGURG  # ignored without a handler
STEP_PERIOD_S = 0.005  # between two comparisons after steps of async functions, which may be many for each message

_set_recursion_limit, _recursion_limit = sys.setrecursionlimit, sys.getrecursionlimit
_clock = time.perf_counter  # user code may replace it


class ProcessChangedError(HookError):
    """User code changed a state of the process on which the run depends; it ends the run."""


class ProcessGuard:
    """Compares the state of this process with that of the first call of user code in a run.

    `process_guard` is the guard of this process. Outside of `watching` it does nothing.

    A comparison takes about 100 us, that of a step 40.
    """

    def __init__(self) -> None:
        self.note: Callable[[str], object] | None = None
        self.functions: dict[str, list[str]] = {}  # names and locations of the run's user functions, by flag
        self._is_watching = self._is_of_call = False
        self._state: ProcessState | None = None
        self._log: LogState | None = None
        self._limit = 0
        self._finding = ""  # kept after `watching`
        self._reported = set[str]()  # changes in `_finding`; closed descriptors stay closed
        self._pid = self._thread = 0
        self._compares_step = True
        self._compared_s = 0.0
        self._passed: dict[tuple[Callable[..., Any], str], None] = {}  # whose steps were not compared since
        self._last: tuple[Callable[..., Any], str] | None = None  # that was called, and the name of its flag
        self._last_whole = self._last

    @contextlib.contextmanager
    def watching(self, *, each_call: bool = False) -> Generator[None]:
        """Compare in the body. A change that made furlong itself fail replaces that failure.

        each_call: compare with the state before each call instead of the first one, as furlong and libraries change it
        in between.
        """
        self._is_watching, self._finding, self._pid = True, "", os.getpid()
        self._reported.clear()
        self._is_of_call = each_call
        self._last = self._last_whole = None
        self._thread, self._log = threading.get_ident(), LogState()
        try:
            with _interruptible(), limits_stay(self._refuse_limit), self.blaming():
                yield
        finally:
            self._is_watching = False
            self._forget()

    @contextlib.contextmanager
    def blaming(self) -> Generator[None]:
        """Replace a failure of furlong itself in the body by the change of the process that user code made before it.

        Around `watching` this is for what furlong does at the end of a run.
        """
        if not self._is_watching:
            self._finding = ""  # of an earlier run
        try:
            yield
        except Exception as error:
            if self._state is not None:
                self._state.restore_builtins()
            self._finding = self._finding or self._replaced()
            if self._finding and not isinstance(error, FurlongError):
                raise ProcessChangedError(self._finding) from error
            self._add_locations(error)
            raise

    def _add_locations(self, error: Exception) -> None:
        """Add where the functions are whose flags an error names to its notes, and which was called last.

        A wrong value that a function returned or left in its arguments is found when furlong uses it, without a frame
        of the function.
        """
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        named = [flag for flag in self.functions if re.search(rf"{flag}(?![\w-])", text)]
        places = [place for flag in named for place in self.functions[flag]]
        if self._last is not None and not isinstance(error, HookError | EngineError):
            function, name = self._last_whole or self._last
            places.append(f"user code called last: {name} ({location_of(function)})")
        for place in places:
            if (where := place.rpartition("(")[2].removesuffix(")")) not in text:
                error.add_note(place)
                text += where

    def last_called(self) -> str:
        """Return flag and location of the function that was called last; "" if none was.

        Beside a generate function that was resumed last, those of the last function that was called as a whole.
        """
        calls = dict.fromkeys(each for each in (self._last, self._last_whole) if each is not None)
        return " and ".join(f"{name} ({location_of(function)})" for function, name in calls)

    def begin(self, function: Callable[..., Any] | None = None, name: str = "") -> None:
        """Record the state, before the first call of user code. `note` gets name and location of the function."""
        if self.note is not None and function is not None:
            self.note(f"{name} ({location_of(function)})")
        self._compares_step = True
        if self._is_watching and function is not None:
            self._last = function, name
        if self._is_watching and self._state is None:
            self._state, self._limit = ProcessState(is_of_call=self._is_of_call), _recursion_limit()

    def check(self, function: Callable[..., Any], name: str, *, is_step: bool = False) -> None:
        """Raise ProcessChangedError, with the location of `function`, if the state has changed; restores it.

        A change that only silences the log is undone with a warning.
        `is_step`: after a step of an async function between two awaits; functions of libraries are not compared then.
        After the first step of a call, steps are compared every `STEP_PERIOD_S`, and a change is attributed to all
        functions that had one since. A process that `function` forked and that returns from it ends here.
        """
        if self._state is None:
            return
        now_s = _clock()
        if is_step and not self._compares_step and now_s - self._compared_s < STEP_PERIOD_S:
            end_if_forked(self._pid)
            self._last = function, name
            self._passed[self._last] = None
            return
        self._compares_step, self._compared_s = False, now_s
        try:
            self._compare(self._state, function, name, is_step=is_step)
        finally:
            self._passed.clear()
            if self._is_of_call and not is_step:
                self._forget()

    def _compare(self, state: ProcessState, function: Callable[..., Any], name: str, *, is_step: bool) -> None:
        state.restore_builtins()
        state.restore_limits()
        self._last = function, name
        if not is_step:
            self._last_whole = self._last
        end_if_forked(self._pid)
        if _recursion_limit() < self._limit:  # at once: a low limit fails in any code
            _set_recursion_limit(self._limit)
            self._finding = self._text(function, name, ["it lowered the recursion limit"])
            raise ProcessChangedError(self._finding)
        if self._log is not None and (silenced := self._log.repair()):
            logger.warning("%s (%s): %s; undone", name, location_of(function), " and ".join(silenced))
        if changes := state.changes(libraries=not is_step):
            state.restore()
            if not set(changes) <= self._reported:  # else of a function that this one has called
                self._finding, self._reported = self._text(function, name, changes), set(changes)
            if threading.get_ident() != self._thread:  # the descriptors by which it would learn of it may be closed
                signal.pthread_kill(self._thread, WAKE_UP)
            raise ProcessChangedError(self._finding)

    def _refuse_limit(self, what: str) -> None:
        """Raise ProcessChangedError instead of lowering a limit; `what` is place and change."""
        caller = f" ({self.last_called()})" if self.last_called() else ""
        self._finding = f"{what} in the process of the run{caller}; do that in a child process"
        raise ProcessChangedError(self._finding)

    def _forget(self) -> None:
        if self._state is not None:
            self._state.close()
            self._state = None

    def _replaced(self) -> str:
        """Describe functions that are replaced now; "" if none is. They are attributed to the last call."""
        if self._last is None or self._state is None or not (changes := self._state.replaced()):
            return ""
        function, name = self._last
        return self._text(function, name, changes)

    def _text(self, function: Callable[..., Any], name: str, changes: list[str]) -> str:
        users = dict.fromkeys([(function, name), *self._passed])
        who = " or ".join(f"{name} ({location_of(function)})" for function, name in users)
        return (
            f"{who} changed the process of the run: {' and '.join(changes)}; do that in a "
            "child process, or undo it before the function returns or awaits"
        )


@contextlib.contextmanager
def _interruptible() -> Generator[None]:
    """Let `WAKE_UP` interrupt what a thread waits for; a wait on a closed descriptor then fails.

    The handler is a C function without effect: asyncio reports handlers of Python through a descriptor that may be
    closed.
    """
    set_handler = ctypes.pythonapi.PyOS_setsig
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    before = set_handler(WAKE_UP, ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(WAKE_UP, before)


process_guard = ProcessGuard()


def location_of(function: Callable[..., Any]) -> str:
    """Return `file:line` of a function's definition, or its name."""
    inner = inspect.unwrap(function)
    methods = (
        [*vars(inner).values()] if isinstance(inner, type) else [inspect.getattr_static(type(inner), "__call__", None)]
    )
    codes = [getattr(each, "__code__", None) for each in (inner, *methods)]
    code = next((code for code in codes if code is not None), None)
    return repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"
