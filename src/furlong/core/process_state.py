"""State of a process that user code must not change: functions of modules, descriptors, directory, signal handlers.

The run depends on it: asyncio on `time.monotonic` and on open descriptors, relative paths on the working directory,
the end of a run on its signal handlers.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import locale
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

# Modules whose public functions and classes are compared, if they are imported.
MODULES = (
    *("asyncio", "asyncio.events", "asyncio.tasks", "builtins", "collections", "contextlib", "copy", "dataclasses"),
    *("functools", "hashlib", "io", "itertools", "json", "logging", "math", "os", "os.path", "pathlib"),
    *("queue", "random", "re", "select", "selectors", "shutil", "signal", "socket", "struct", "subprocess", "sys"),
    *("tempfile", "threading", "time", "traceback", "uuid"),
)
# Modules and classes of libraries that the run uses. Libraries replace functions of each other, so that only functions
# in files of the user, and deleted ones, count as replaced.
LIBRARIES = ("torch", "torch.nn.functional", "psutil", "safetensors.torch")
CLASSES = (("torch", "Tensor"), ("torch.nn", "Module"), ("pathlib", "Path"))
NONE_OF_LIBRARIES = {"newaxis"}  # public names that are None
LIMITS = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC")
# Settings of PyTorch after its import; gradients are a setting of each thread.
TORCH_DEFAULTS = {
    "default dtype": "torch.float32",
    "default device": "cpu",
    "deterministic algorithms": False,
    "gradients": True,
}
UNUSED = {"print", "breakpoint", "breakpointhook", "displayhook", "excepthook", "unraisablehook"}  # libraries set them
TOLERATED = {"nest_asyncio", "socks"}  # libraries that replace functions by equivalent ones
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGPIPE)
DIRECTORY, LOCALE = "the working directory", "the locale"
HOOKS = ("excepthook", "displayhook", "unraisablehook")  # libraries replace them; without one, threads do not start
STANDARD = {0: "stdin", 1: "stdout", 2: "stderr"}
COPIES_FROM = 900  # number of the first copy of a standard descriptor

_Functions = dict[str, Callable[..., Any]]


class ProcessState:
    """The state of this process when the object is created; `changes` compares it with the present.

    A comparison takes about 100 us, without libraries 40.

    `is_worker` compares only functions, descriptors and the recursion limit: a worker
    that runs one reward function does not depend on the rest. `is_of_call`: it is of one call in one thread, so that
    PyTorch's gradient mode is compared, too. Call `close` to close the descriptor that it opens.

    >>> state = ProcessState()
    >>> state.changes()
    []
    >>> state.close()
    """

    def __init__(self, *, is_worker: bool = False, is_of_call: bool = False) -> None:
        self._is_worker, self._is_of_call = is_worker, is_of_call
        self._lowered_limits, self._replaced_functions = list[str](), list[str]()
        self._sentinel = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # user code that closes a range closes it
        self._descriptors = {number: _identity(number) for number in (*STANDARD, self._sentinel)}
        self._streams = {name: getattr(sys, name) for name in ("stdout", "stderr") if _is_open(name)}
        self._copies = {} if is_worker else {number: _copy_of(number) for number in STANDARD}
        self._umask = None if is_worker else _current_umask()
        self._builtins = [(n, v) for n, v in vars(builtins).items() if n not in UNUSED and n != "_"]
        self._hooks = {name: getattr(sys, name) for name in HOOKS}
        self._print = print
        self._namespace, self._replaced_builtins = builtins.__dict__, list[str]()
        self._recursion_limit = sys.getrecursionlimit()
        self._raising_warnings = _raising_warnings()
        self._modules = {name: module for name in MODULES if (module := sys.modules.get(name)) is not None}
        self._functions: dict[str, _Functions] = {name: _public(vars(m)) for name, m in self._modules.items()}
        self._libraries = {} if is_worker else _library_functions()
        self._place = {} if is_worker else _place()
        self._limits = {} if is_worker else _limits()
        self._torch = {} if is_worker else torch_settings()

    def restore_builtins(self) -> None:
        """Undo replacements of built-in functions, without which nothing of Python works; `changes` reports them.

        It calls no built-in function.
        """
        now = self._namespace
        for each in self._builtins:
            if now.get(each[0]) is not each[1]:
                now[each[0]] = each[1]
                self._replaced_builtins += [each[0]]

    def restore_functions(self) -> None:
        """Undo replacements of functions of standard modules at once; `changes` reports them."""
        self.restore_builtins()
        for name, module in self._modules.items():
            now, before = vars(module), self._functions[name]
            for attribute, value in before.items() if [*map(now.get, before)] != [*before.values()] else ():
                new = now.get(attribute)
                if new is not value and _is_foreign(new):
                    self._replaced_functions.append(f"it replaced {name}.{attribute}")
                    setattr(module, attribute, value)

    def restore_limits(self) -> None:
        """Undo lowered resource limits at once, with which any code may fail; `changes` reports them."""
        for name, before in self._limits.items():
            if (text := lowered_limit(name, resource.getrlimit(getattr(resource, name)), before)) is None:
                continue
            with contextlib.suppress(OSError, ValueError):  # a lowered hard limit stays
                resource.setrlimit(getattr(resource, name), before)
            self._lowered_limits += [] if f"it {text}" in self._lowered_limits else [f"it {text}"]

    def changes(self, *, libraries: bool = True) -> list[str]:
        """Describe each change since creation, such as "it replaced time.monotonic"; [] if there is none.

        `libraries`: also compare functions of libraries, which takes most of the time.
        """
        self.restore_limits()
        of_libraries = self._replaced_in_libraries() if libraries else ()
        return [*self._replaced(), *of_libraries, *self._closed(), *self._moved(), *self._lowered()]

    def replaced(self) -> list[str]:
        """Describe the functions that were replaced, and the descriptors that were closed, since creation."""
        return [*self._replaced(), *self._replaced_in_libraries(), *self._closed()]

    def restore(self) -> None:
        """Undo changes, as far as possible: closed descriptors other than 0, 1 and 2 stay closed."""
        self._replaced_builtins.clear()
        self._reopen()
        for name, module in self._modules.items():
            sys.modules[name] = module
            for attribute, value in self._functions[name].items():
                if vars(module).get(attribute) is not value:
                    setattr(module, attribute, value)
        for name, (owner, functions) in self._libraries.items():
            for attribute, value in functions.items():
                if _is_replaced(name, attribute, value, vars(owner).get(attribute)):
                    delattr(owner, attribute) if value is None else setattr(owner, attribute, value)
        self._lowered_limits.clear()
        self._replaced_functions.clear()
        _restore_torch(self._torch)
        if sys.getrecursionlimit() < self._recursion_limit:
            sys.setrecursionlimit(self._recursion_limit)
        for each in _raising_warnings():
            if each not in self._raising_warnings:
                warnings.filters.remove(each)  # pyright: ignore[reportAttributeAccessIssue]  a list, of any kind for pyright
        if self._place:
            with contextlib.suppress(OSError):
                os.chdir(self._place[DIRECTORY])
            locale.setlocale(locale.LC_ALL, self._place[LOCALE])
            for number in SIGNALS:
                with contextlib.suppress(ValueError, TypeError):  # not the main thread; a handler of C code
                    signal.signal(number, self._place[f"the handler of {number.name}"])

    def _reopen(self) -> None:
        """Open stdin, stdout and stderr again, where messages are printed."""
        for number, copy in self._copies.items():
            if copy is not None and _identity(number) is None and _identity(copy) == self._descriptors[number]:
                os.dup2(copy, number)
        for name, stream in self._streams.items():
            if not _is_open(name):
                number = 1 if name == "stdout" else 2
                setattr(sys, name, open(number, "w", closefd=False) if stream.closed else stream)  # noqa: SIM115

        for name, hook in self._hooks.items():
            if not callable(getattr(sys, name, None)):
                setattr(sys, name, hook)

    def close(self) -> None:
        """Close the descriptors that this object opened, unless user code has closed them; restore `print`."""
        if _is_of_user(vars(builtins).get("print")):
            builtins.print = self._print
        for number, copy in self._copies.items():
            if copy is not None and _identity(copy) == self._descriptors[number]:
                os.close(copy)
        self._copies = {}
        if self._sentinel >= 0 and _identity(self._sentinel) == self._descriptors[self._sentinel]:
            os.close(self._sentinel)
        self._sentinel = -1

    def _replaced(self) -> Iterator[str]:
        for attribute in self._replaced_builtins:
            yield f"it replaced builtins.{attribute}"
        yield from self._replaced_functions
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

    def _replaced_in_libraries(self) -> Iterator[str]:
        for name, (owner, functions) in self._libraries.items():
            now = vars(owner)
            if [*map(now.get, functions)] == [*functions.values()]:
                continue
            for attribute, value in functions.items():
                if _is_replaced(name, attribute, value, now.get(attribute)):
                    yield f"it {'deleted' if attribute not in now else 'replaced'} {name}.{attribute}"

    def _lowered(self) -> Iterator[str]:
        yield from self._lowered_limits
        now = torch_settings() if self._torch else {}
        for name, before in self._torch.items():
            if now[name] != before and (name != "gradients" or self._is_of_call):
                yield f"it changed PyTorch's {name} from {before} to {now[name]}"

    def _closed(self) -> Iterator[str]:
        for number, before in self._descriptors.items():
            now = _identity(number)
            if now == before or (number in STANDARD and now is not None):  # libraries redirect output
                continue
            yield f"it closed descriptor {number} ({STANDARD.get(number, 'a file of furlong')})"
        for name in self._streams:
            if not _is_open(name):
                yield f"it closed sys.{name}, or replaced it by an object that is no stream"
        for name in self._hooks:
            if not callable(getattr(sys, name, None)):
                yield f"it removed sys.{name}"

    def _moved(self) -> Iterator[str]:
        limit = sys.getrecursionlimit()
        if any(each not in self._raising_warnings for each in _raising_warnings()):
            yield "it made warnings of any module exceptions"
        if limit < self._recursion_limit:
            yield f"it lowered the recursion limit from {self._recursion_limit} to {limit}"
        if self._umask is not None and (mask := os.umask(self._umask)) != self._umask:  # restores it
            yield f"it changed the umask from {self._umask:03o} to {mask:03o}"
        now = {} if self._is_worker else _place()
        for name, before in self._place.items():
            if now[name] != before:
                yield f"it changed {name} from {_shown(before)} to {_shown(now[name])}"


def _raising_warnings() -> list[tuple[Any, ...]]:
    """Return the filters that make warnings of every module and message exceptions."""
    return [each for each in warnings.filters if each[0] == "error" and each[1] is None and each[3] is None]


def _public(names: dict[str, Any]) -> _Functions:
    """Return the public functions and classes of a module."""
    kinds = (FunctionType, BuiltinFunctionType, type)
    return {n: v for n, v in names.items() if isinstance(v, kinds) and not n.startswith("_") and n not in UNUSED}


def imported_replacements() -> list[str]:
    """Describe functions of libraries that files of the user have replaced, whatever they were before."""
    found = [
        f"it replaced {name}.{attribute}"
        for name, (_, functions) in _library_functions().items()
        for attribute, value in functions.items()
        if _is_of_user(value)
    ]
    modules = {name: sys.modules[name] for name in LIBRARIES if name in sys.modules}
    removed = [
        f"it removed {name}.{attribute}"
        for name, module in modules.items()
        for attribute in getattr(module, "__all__", ())
        if getattr(module, attribute, None) is None and attribute not in NONE_OF_LIBRARIES
    ]
    return [*found, *removed]


def _library_functions() -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Return the public functions of the libraries and classes that are imported, and where they are."""
    owners: dict[str, Any] = {name: sys.modules[name] for name in LIBRARIES if name in sys.modules}
    found: dict[str, tuple[Any, Mapping[str, Any]]] = {
        name: (owner, _public(vars(owner))) for name, owner in owners.items()
    }
    for module, name in CLASSES:
        owner: Any = getattr(sys.modules.get(module), name, None)
        if owner is not None:  # None for inherited methods: a replacement is then a new attribute of the class
            methods = {each: vars(owner).get(each) for each in dir(owner) if not each.startswith("_")}
            found[f"{module}.{name}"] = owner, methods
    return found


def _is_replaced(owner: str, attribute: str, before: object, now: object) -> bool:
    """Return whether the user replaced a function of a library; `torch.load` has a default that many change."""
    return now is not before and (owner, attribute) != ("torch", "load") and (_is_of_user(now) or _is_no_function(now))


def _is_of_user(function: object) -> bool:
    """Return whether a function is defined in a file of the user."""
    from furlong.core.user_code import is_user_file  # imports this module

    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return isinstance(code, CodeType) and is_user_file(code.co_filename)


def _is_no_function(value: object) -> bool:
    """Return whether the new value of a function is a plain value, a built-in type, or of a class of the user."""
    from furlong.core.user_code import is_user_file  # imports this module

    if value is None or isinstance(value, bool | int | float | str | bytes | tuple | list | dict):
        return True
    owner = value if isinstance(value, type) else type(value)
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    is_builtin = isinstance(value, type) and owner.__module__ == "builtins"
    return is_builtin or owner.__module__ == "unittest.mock" or (file is not None and is_user_file(file))


def torch_settings() -> dict[str, Any]:
    """Return PyTorch's settings that apply to the whole process, and its number of threads; {} if not imported."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):
        return {}
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": torch.get_default_device().type,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


def _restore_torch(before: Mapping[str, Any]) -> None:
    torch: Any = sys.modules.get("torch")
    if before and torch_settings() != before:
        torch.set_default_dtype(getattr(torch, before["default dtype"].removeprefix("torch.")))
        torch.use_deterministic_algorithms(before["deterministic algorithms"])
        torch.set_num_threads(before["threads"])


def _limits() -> dict[str, tuple[int, int]]:
    """Return soft and hard limits of this process."""
    return {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS if hasattr(resource, name)}


def lowered_limit(name: str, now: Sequence[int], before: Sequence[int]) -> str | None:
    """Return that user code lowered the soft limit `name` of `LIMITS`; None if it did not."""
    if _number(now[0]) >= _number(before[0]):
        return None
    return f"lowered {name} from {_shown_limit(before[0])} to {now[0]}"


def _number(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _shown_limit(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else str(limit)


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


def _copy_of(number: int) -> int | None:
    """Return a copy of an open descriptor, beyond those that user code closes in a loop; None if it is closed."""
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, COPIES_FROM)
    except OSError:
        return None


def _current_umask() -> int:
    """Return the umask; this process has none for a moment, so it must not create files in other threads."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _is_open(name: str) -> bool:
    """Whether `sys.stdout` or `sys.stderr` can be written to, whatever object it is."""
    stream = getattr(sys, name, None)
    return all(callable(getattr(stream, each, None)) for each in ("write", "flush")) and not getattr(
        stream, "closed", False
    )


def _shown(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    return str(name) if name else repr(value)
