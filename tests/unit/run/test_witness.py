"""A process beside the run reports its sudden end, and ends it if SIGTERM cannot."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts processes

SCRIPT = """
import ctypes, os, signal, sys, time
from pathlib import Path
from furlong.core.process_exit import fatal_signals_print_stacks
from furlong.core.user_code import before_exit, exit_process
from furlong.run.witness import witnessed

signal.signal(signal.SIGTERM, lambda *_: None)
with fatal_signals_print_stacks(), witnessed(Path(sys.argv[1]), before_exit, answer_s=2) as note:
    {}
"""


def run(tmp_path: Path, body: str) -> tuple[int, str, str]:
    """Return exit code, stderr and log of a process that is witnessed."""
    script, log = tmp_path / "own.py", tmp_path / "run.log"
    script.write_text(SCRIPT.format(body))
    log.touch()
    # reads stderr until the other process has closed it, too
    done = subprocess.run([sys.executable, script, log], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr, log.read_text()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("ctypes.CDLL(None)._exit(0)", 0),
        ("ctypes.CDLL(None).exit(0)", 0),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.fork() or time.sleep(3); ctypes.CDLL(None)._exit(0)", 0),
    ],
)
def test_an_end_without_a_word_is_reported(tmp_path: Path, body: str, code: int) -> None:
    result, printed, log = run(tmp_path, body)
    assert result == code
    assert log.count("ended without recording why") == 1
    assert printed == log


def test_the_function_that_was_called_last_is_reported(tmp_path: Path) -> None:
    _, printed, log = run(tmp_path, "note('--x-path: f (mine.py:7)'); os.kill(os.getpid(), 9)")
    assert log == printed
    assert log.endswith("it called last: --x-path: f (mine.py:7)\n")


@pytest.mark.parametrize(
    "body", ["pass", "sys.exit(3)", "os.closerange(3, 256)", "os.kill(os.getpid(), 15)", "exit_process(3)"]
)
def test_other_ends_are_not(tmp_path: Path, body: str) -> None:
    result, printed, log = run(tmp_path, body)
    assert (result, printed, log) == (3 if "exit" in body else 0, "", "")


def test_sigterm_ends_compiled_code_that_keeps_the_interpreter_lock(tmp_path: Path) -> None:
    body = "os.system(f'(sleep 1; kill {os.getpid()}) >/dev/null 2>&1 &') or sum(range(10**15))"
    result, printed, log = run(tmp_path, body)
    assert result == -signal.SIGVTALRM
    assert "keeps the interpreter lock" in log
    assert 'own.py", line 10' in printed
