"""State of a process that user code must not change: functions of modules, descriptors, directory, signal handlers.

The run depends on it: asyncio on `time.monotonic` and on open descriptors, relative paths on the working directory,
the end of a run on its signal handlers.
"""

from __future__ import annotations

import contextlib
import locale
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

# Modules whose public functions and classes are compared, if they are imported.
MODULES = (
    *("asyncio", "asyncio.events", "asyncio.tasks", "builtins", "collections", "contextlib", "copy", "dataclasses"),
    *("functools", "hashlib", "io", "itertools", "json", "logging", "math", "os", "os.path", "pathlib"),
    *("queue", "random", "re", "select", "selectors", "shutil", "signal", "socket", "struct", "subprocess", "sys"),
    *("tempfile", "threading", "time", "traceback", "uuid"),
)
UNUSED = {"print", "breakpoint", "breakpointhook", "displayhook", "excepthook", "unraisablehook"}  # libraries set them
TOLERATED = {"nest_asyncio", "socks"}  # libraries that replace functions by equivalent ones
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGPIPE)
DIRECTORY, LOCALE = "the working directory", "the locale"
STANDARD = {0: "stdin", 1: "stdout", 2: "stderr"}

_Functions = dict[str, Callable[..., Any]]


class ProcessState:
    """The state of this process when the object is created; `changes` compares it with the present.

    A comparison takes about 30 us. `is_worker` compares only functions, descriptors and the recursion limit: a worker
    that runs one reward function does not depend on the rest. Call `close` to close the descriptor that it opens.

    >>> state = ProcessState()
    >>> state.changes()
    []
    >>> state.close()
    """

    def __init__(self, *, is_worker: bool = False) -> None:
        self._is_worker = is_worker
        self._sentinel = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # user code that closes a range closes it
        self._descriptors = {number: _identity(number) for number in (*STANDARD, self._sentinel)}
        self._streams = [name for name in ("stdout", "stderr") if _is_open(name)]
        self._recursion_limit = sys.getrecursionlimit()
        self._modules = {name: module for name in MODULES if (module := sys.modules.get(name)) is not None}
        self._functions: dict[str, _Functions] = {name: _public(vars(m)) for name, m in self._modules.items()}
        self._place = {} if is_worker else _place()

    def changes(self) -> list[str]:
        """Describe each change since creation, such as "it replaced time.monotonic"; [] if there is none."""
        return [*self._replaced(), *self._closed(), *self._moved()]

    def restore(self) -> None:
        """Undo changes, as far as possible: closed descriptors stay closed."""
        for name, module in self._modules.items():
            sys.modules[name] = module
            for attribute, value in self._functions[name].items():
                if vars(module).get(attribute) is not value:
                    setattr(module, attribute, value)
        if sys.getrecursionlimit() < self._recursion_limit:
            sys.setrecursionlimit(self._recursion_limit)
        if self._place:
            with contextlib.suppress(OSError):
                os.chdir(self._place[DIRECTORY])
            locale.setlocale(locale.LC_ALL, self._place[LOCALE])
            for number in SIGNALS:
                with contextlib.suppress(ValueError, TypeError):  # not the main thread; a handler of C code
                    signal.signal(number, self._place[f"the handler of {number.name}"])

    def close(self) -> None:
        """Close the descriptor that detects closed ranges, unless user code has closed it."""
        if self._sentinel >= 0 and _identity(self._sentinel) == self._descriptors[self._sentinel]:
            os.close(self._sentinel)
        self._sentinel = -1

    def _replaced(self) -> Iterator[str]:
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                yield f"it replaced the module {name}"
                continue
            now, before = vars(module), self._functions[name]
            if [*map(now.get, before)] == [*before.values()]:  # the usual case, compared by identity
                continue
            for attribute, value in before.items():
                new = now.get(attribute)
                if new is not value and _is_foreign(new):
                    yield f"it {'deleted' if attribute not in now else 'replaced'} {name}.{attribute}"

    def _closed(self) -> Iterator[str]:
        for number, before in self._descriptors.items():
            now = _identity(number)
            if now == before or (number in STANDARD and now is not None):  # libraries redirect output
                continue
            yield f"it closed descriptor {number} ({STANDARD.get(number, 'a file of furlong')})"
        for name in self._streams:
            if not _is_open(name):
                yield f"it closed sys.{name}"

    def _moved(self) -> Iterator[str]:
        limit = sys.getrecursionlimit()
        if limit < self._recursion_limit:
            yield f"it lowered the recursion limit from {self._recursion_limit} to {limit}"
        now = {} if self._is_worker else _place()
        for name, before in self._place.items():
            if now[name] != before:
                yield f"it changed {name} from {_shown(before)} to {_shown(now[name])}"


def _public(names: dict[str, Any]) -> _Functions:
    """Return the public functions and classes of a module."""
    kinds = (FunctionType, BuiltinFunctionType, type)
    return {n: v for n, v in names.items() if isinstance(v, kinds) and not n.startswith("_") and n not in UNUSED}


def _is_foreign(value: object) -> bool:
    """Return whether the new value of a function is another implementation than those tolerated."""
    return str(getattr(value, "__module__", "") or "").partition(".")[0] not in TOLERATED


def _place() -> dict[str, Any]:
    """Return the working directory, locale and signal handlers of this process."""
    try:
        directory = os.getcwd()
    except OSError:
        directory = "a deleted directory"
    values: dict[str, Any] = {DIRECTORY: directory, LOCALE: locale.setlocale(locale.LC_ALL)}
    return values | {f"the handler of {number.name}": signal.getsignal(number) for number in SIGNALS}


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Return what an open descriptor refers to, None if it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_open(name: str) -> bool:
    stream = getattr(sys, name, None)
    return stream is not None and not getattr(stream, "closed", False)


def _shown(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    return str(name) if name else repr(value)
