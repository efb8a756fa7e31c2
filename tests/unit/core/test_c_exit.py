"""Exit codes of processes in which compiled code calls exit."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import _ctypes, ctypes, os, sys, threading
from furlong.core.c_exit import c_exit_fails
leave = ctypes.CFUNCTYPE(None, ctypes.c_int)(_ctypes.dlsym(_ctypes.dlopen(None, 2), "exit"))
def thread():
    other = threading.Thread(target=leave, args=(0,))
    other.start()
    other.join()
def fork():
    if not os.fork():
        leave(0)
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) + 5)
with c_exit_fails():
    {inside}
{after}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "after", "code"),
    [
        ("leave(0)", "", 1),
        ("leave(3)", "", 3),
        ("thread()", "", 1),
        ("sys.exit(0)", "", 0),
        ("os._exit(0)", "", 0),
        ("fork()", "", 5),  # a child may end
        ("pass", "leave(0)", 0),
        ("pass", "", 0),
    ],
)
def test_exit_of_compiled_code_is_no_success(inside, after, code):
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(inside=inside, after=after)], timeout=120, check=False)
    assert done.returncode == code
