"""Import modules of user functions in a child process first.

A module that exits, hangs, crashes or changes the state of the process (`core.process_state`) is then an error with its
file and line, instead of the end of the run. Ordinary exceptions are left to the import in this process, which reports
them. The child imports all modules, concurrently with other work of the start; a second child finds the line that
changed the state.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from furlong.core.user_code import is_user_file
from furlong.core.user_modules import split_path
from furlong.errors import ConfigError

REPORT, STACKS = "report.jsonl", "stacks.txt"  # files of a child
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1])['sys_path']; "
    "from furlong.core.import_trial_child import main; main()"
)
_GRACE_S = 5.0  # after the limit, for the child to write its stacks and exit
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


class ImportTrial:
    """Imports the modules of functions in a child process, which starts at once.

    paths: of functions, as flags name them; modules of furlong, and those that are imported already, are skipped.
    timeout_s: limit of all imports together. Call `problems` once, from the thread that created it.
    """

    def __init__(self, paths: Iterable[str], *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._paths = list(dict.fromkeys(path for path in paths if _is_new(path)))
        self._child = _Child(self._paths, timeout_s=timeout_s) if self._paths else None
        self._problems: Mapping[str, str] | None = None

    def problems(self) -> Mapping[str, str]:
        """Wait for the child; returns why modules must not be imported in this process, by function path."""
        if self._problems is None:
            self._problems = {} if self._child is None else self._child_problems(self._child)
        return self._problems

    def close(self) -> None:
        """End the child, if it still runs. Idempotent."""
        if self._child is not None:
            self._child.close()

    def _child_problems(self, child: _Child) -> dict[str, str]:
        outcome = child.wait()
        path = child.last_path or self._paths[0]
        if isinstance(outcome, str):
            problems = {path: f"{path}: {outcome}"}
        elif outcome:
            tracing = _Child([path], timeout_s=self._timeout_s, is_traced=True)
            tracing.wait()
            problems = {
                path: f"{path}: importing its module changes this process: {' and '.join(outcome)}{tracing.place}; "
                "do that in a child process, or undo it"
            }
        else:
            return {}
        rest = self._paths[self._paths.index(path) + 1 :]  # not imported yet
        return problems | dict(ImportTrial(rest, timeout_s=self._timeout_s).problems())


def _is_new(path: str) -> bool:
    """Return whether a function's path is valid, and its module is the user's and not imported."""
    try:
        module_name, _ = split_path(path)
    except ConfigError:  # reported by the import
        return False
    if module_name.endswith(".py"):
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        return str(Path(module_name).expanduser().resolve()) not in files
    return module_name not in sys.modules and not module_name.startswith("furlong.")


class _Child:
    """One child process, its folder, and its report."""

    def __init__(self, paths: list[str], *, timeout_s: float, is_traced: bool = False) -> None:
        self._timeout_s, self._started = timeout_s, time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="furlong-import-"))
        request = {
            "sys_path": sys.path,
            "argv": sys.argv,
            "folder": str(self._folder),
            "paths": paths,
            "timeout_s": timeout_s,
            "is_traced": is_traced,
            "parent_pid": os.getpid(),
        }
        self.last_path: str | None = None
        self.place = ""
        try:
            self._process = self._started_process(request)
        except BaseException:  # SIGTERM at this moment, too
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _started_process(self, request: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        with (self._folder / "output.txt").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(request)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self) -> str | list[str]:
        """Wait for the end; returns the changes of the last module, or why the child ended early.

        Ends its process group.
        """
        is_late = False
        try:
            left = self._started + self._timeout_s + _GRACE_S - time.monotonic()
            self._process.wait(max(left, 0.0))
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            self._kill()
        try:
            return self._outcome(is_late=is_late)
        finally:
            self.close()

    def close(self) -> None:
        """Kill the process group and delete the folder."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM if only zombies are left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _outcome(self, *, is_late: bool) -> str | list[str]:
        rows: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError):
            rows = [json.loads(line) for line in (self._folder / REPORT).read_text("utf-8").splitlines()]
        changes: list[str] = []
        for row in rows:
            match row["event"]:
                case "begin":
                    self.last_path = row["path"]
                case "exit":
                    return f"importing its module ends the process: {row['what']}; remove that call"
                case "changes":
                    changes, self.place = row["changes"], row["place"]
                case _:
                    return changes
        return self._early_end(is_late=is_late)

    def _early_end(self, *, is_late: bool) -> str:
        """Explain an end without a complete report: a crash, an exit in compiled code, or the time limit."""
        code, stacks = self._process.returncode, ""
        with contextlib.suppress(FileNotFoundError):
            stacks = (self._folder / STACKS).read_text("utf-8", "replace")
        frame = _user_frame(stacks)
        where = f" at {frame}" if frame else ""
        if is_late or "Timeout (" in stacks:
            return (
                f"importing its module did not end within {self._timeout_s:g} s{where}; do slow work in the first "
                "call of the function, or raise --hook-import-timeout"
            )
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self.last_path is None:
            output = (self._folder / "output.txt").read_text("utf-8", "replace").strip()
            return f"the process that imports its module did not start ({how}): {output[-600:]}; check PYTHONPATH"
        return f"importing its module ends the process ({how}){where}; fix the module"


def _user_frame(stacks: str) -> str:
    """Return the user's innermost frame in the stacks that a child wrote, as `file:line in function`."""
    for block in reversed(re.split(r"^(?=Thread |Current thread )", stacks, flags=re.MULTILINE)):  # main thread last
        for file, line, name in _FRAME.findall(block):
            if is_user_file(file):
                return f"{file}:{line} in {name}"
    return ""
