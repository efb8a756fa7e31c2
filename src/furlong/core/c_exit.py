"""Keeps compiled code that calls C's `exit(0)` during a run from looking like success.

`exit(0)` runs no line of Python, so nothing in Python can change the exit code. A handler that libc calls in `exit`
can, if it replaces the process: the handler is libc's own `execv`, which `exit` calls with the string `_program` and
the status as arguments. With status 0, a null pointer, it starts the program, which fails. With another status, which
is no address, and with an empty string, `execv` returns and `exit` continues.

Compiled code that calls `_exit(0)` or the system call itself runs no handler either. The process beside the run
(`run.witness`) reports it, and the exit code stays 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Generator
from pathlib import Path

PROGRAM = Path("/bin/false")
_program = ctypes.create_string_buffer(len(str(PROGRAM)) + 1)  # never freed: `exit` reads it at the very end


@contextlib.contextmanager
def c_exit_fails() -> Generator[None]:
    """Give C's `exit(0)` in this process the exit code 1 while the context is open."""
    if not _is_registered() or not PROGRAM.is_file():
        yield
        return
    _program.value = str(PROGRAM).encode()
    try:
        yield
    finally:
        _program.value = b""


@functools.cache
def _is_registered() -> bool:
    """Register the handler, which cannot be removed; False if libc has no such function, as on macOS."""
    libc = ctypes.CDLL(None)
    register, replace = getattr(libc, "__cxa_atexit", None), getattr(libc, "execv", None)
    if register is None or replace is None or not hasattr(libc, "gnu_get_libc_version"):
        return False
    address = ctypes.cast(replace, ctypes.c_void_p)
    os.register_at_fork(after_in_child=functools.partial(setattr, _program, "value", b""))
    return register(address, ctypes.byref(_program), None) == 0
