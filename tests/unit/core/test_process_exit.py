"""Ends of the process of a run: threads that never end, fatal signals, code that keeps the interpreter lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts processes

THREAD = """
import sys, threading, time
from furlong.core.process_exit import exit_within

def wait():
    while True:
        time.sleep(0.1)

threading.Thread(target=wait, name="of-the-user").start()
exit_within(0.2, 7)
"""
SEGFAULT = """
import ctypes
from furlong.core.process_exit import fatal_signals_print_stacks

with fatal_signals_print_stacks():
    ctypes.string_at(0)
"""
ALARM = """
import signal, time
from furlong.core.process_exit import fatal_signals_print_stacks

with fatal_signals_print_stacks():
    signal.alarm(1)
    time.sleep(60)
"""
LOCKED = """
import sys
from pathlib import Path
from unittest.mock import Mock
from furlong.diagnosis.hang_watchdog import HangWatchdog

with HangWatchdog(Path(sys.argv[1]), seconds=0.4, observer=Mock(), stops="stop", grace_s=0.1):
    sum(range(10**15))
"""


def run(tmp_path: Path, text: str) -> tuple[int, str]:
    script = tmp_path / "own.py"
    script.write_text(text)
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("text", "code", "line"), [(SEGFAULT, -11, 6), (ALARM, -14, 7), (LOCKED, 1, 8)], ids=["segfault", "alarm", "lock"]
)
def test_the_line_of_user_code_is_printed(tmp_path: Path, text: str, code: int, line: int) -> None:
    result, printed = run(tmp_path, text)
    assert result == code
    assert f'own.py", line {line}' in printed


def test_a_thread_that_never_ends_does_not_keep_the_process(tmp_path: Path) -> None:
    result, printed = run(tmp_path, THREAD)
    assert result == 7
    assert "of-the-user" in printed
    assert f"{tmp_path / 'own.py'}:" in printed
