"""Child process of `core.import_trial`: imports modules of user functions, and reports exits and changes.

The report goes to a file that is opened for each line, as a module may close descriptors.
"""

from __future__ import annotations

import asyncio  # noqa: F401  # pyright: ignore[reportUnusedImport]  compared by ProcessState
import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil  # noqa: F401  # pyright: ignore[reportUnusedImport]  compared by ProcessState

from furlong.core.import_trial import REPORT, STACKS
from furlong.core.process_exit import FATAL_SIGNALS
from furlong.core.process_state import TORCH_DEFAULTS, ProcessState, imported_replacements, torch_settings
from furlong.core.process_tree import die_with_parent
from furlong.core.user_code import describe_exception, is_user_file
from furlong.core.user_modules import import_module_of
from furlong.errors import ConfigError

_EXIT, _OPEN, _WRITE, _CLOSE, _DUMPS = os._exit, os.open, os.write, os.close, json.dumps


def main() -> None:
    """Import the modules that the request in `sys.argv` names, one after the other."""
    request = json.loads(sys.argv[1])
    die_with_parent(request["parent_pid"])
    sys.argv[:] = request["argv"]
    report = _Report(Path(request["folder"]) / REPORT)
    stacks = (Path(request["folder"]) / STACKS).open("w")
    faulthandler.enable(stacks)
    for number in FATAL_SIGNALS:
        faulthandler.register(number, stacks, chain=True)
    faulthandler.dump_traceback_later(request["timeout_s"], exit=True, file=stacks)
    report.report_exits()
    for path in request["paths"]:
        report.write(event="begin", path=path)
        state = ProcessState()
        tracer = _Tracer(state) if request["is_traced"] else None
        try:
            if tracer is not None:
                sys.settrace(tracer)
            import_module_of(path)
        except ConfigError as error:
            cause = error.__cause__
            if cause is not None and not isinstance(cause, Exception):
                report.write(event="exit", what=describe_exception(cause))
                _EXIT(1)
        except BaseException as error:  # noqa: BLE001  KeyboardInterrupt, raised by the module
            report.write(event="exit", what=describe_exception(error))
            _EXIT(1)
        finally:
            sys.settrace(None)
        traced = None if tracer is None else tracer.place
        if (changes := _changes(state)) or traced:  # a comparison undoes some changes, so a traced one may be gone
            place = "" if traced is None else f" at {traced}"
            report.write(event="changes", path=path, changes=changes, place=place)
            break  # later modules would be imported in a changed process
    report.write(event="end")
    _EXIT(0)


class _Report:
    """Writes one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._path = str(path.resolve())

    def write(self, **row: Any) -> None:
        handle = _OPEN(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        _WRITE(handle, _DUMPS(row).encode() + b"\n")
        _CLOSE(handle)

    def report_exits(self) -> None:
        """Report the line that calls `os._exit`, `os.abort` or `os.exec*` before the process ends."""
        pid = os.getpid()
        for name in ("_exit", "abort", "execv", "execve"):
            original = getattr(os, name)

            def leave(*args: Any, name: str = name, original: Any = original) -> NoReturn:
                if os.getpid() == pid:
                    frames = [f for f in traceback.extract_stack()[:-1] if is_user_file(f.filename)]
                    where = f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
                    self.write(event="exit", what=f"os.{name}{where}")
                    _EXIT(1)
                original(*args)
                raise AssertionError("unreachable")

            setattr(os, name, leave)


class _Tracer:
    """Finds the line of a user's file after which the state of the process has changed."""

    def __init__(self, state: ProcessState) -> None:
        self._state, self._last = state, ""
        self.place: str | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ARG002  signature of trace functions
        return self._line if self.place is None and is_user_file(frame.f_code.co_filename) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ARG002
        if self.place is None and event in ("line", "return"):
            if self._last and _changes(self._state):
                self.place = self._last
                return None
            self._last = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return self._line


def _changes(state: ProcessState) -> list[str]:
    """Return the changes of this process, which had imported no library before."""
    now = torch_settings()
    of_torch = [
        f"it set PyTorch's {name} to {now[name]}"
        for name, usual in TORCH_DEFAULTS.items()
        if now and now[name] != usual
    ]
    return [*state.changes(), *imported_replacements(), *of_torch]
