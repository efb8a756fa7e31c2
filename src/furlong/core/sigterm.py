"""SIGTERM ends a command in good order while no event loop handles it, and reaches processes that user code forks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator

from furlong.errors import EndedBySignal

EXIT_CODE = 128 + signal.SIGTERM
UNWIND_S = 15.0


@contextlib.contextmanager
def sigterm_unwinds() -> Generator[None]:
    """Raise EndedBySignal in the main thread at the first SIGTERM, so that temporary files and processes are removed.

    Further ones do nothing, also after the body: they would replace the exit code. The process exits `UNWIND_S` after
    the first one, whatever swallows the exception. Event loops have handlers of their own in the meantime. Does nothing
    in other threads than the main one, or if SIGTERM has a handler already.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    pid = os.getpid()
    signal.signal(signal.SIGTERM, lambda number, _: _end(number, pid))
    try:
        yield
    finally:  # not `ignore_signal`: the interpreter resets handlers of Python while it exits
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def ignore_signal(number: int, frame: object) -> None:
    """Handle a signal by doing nothing. SIG_IGN would be inherited by programs that are started."""


def ends_child(number: int, pid: int) -> bool:
    """Return whether this is not process `pid` but forked from it; the signal's default action then ends it.

    A signal may arrive in a forked process before its handlers are restored.
    """
    if os.getpid() == pid:
        return False
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return True


def _end(number: int, pid: int) -> None:
    if ends_child(number, pid):
        return
    signal.signal(signal.SIGTERM, ignore_signal)
    threading.Thread(target=_exit_late, name="furlong-sigterm", daemon=True).start()
    raise EndedBySignal(EXIT_CODE)


def _exit_late() -> None:
    time.sleep(UNWIND_S)
    from furlong.core.process_exit import exit_within  # what it imports takes time at the start of a command

    exit_within(0, EXIT_CODE)


def _restore_in_child() -> None:
    """Undo handlers of furlong in a forked process: pools of processes rely on SIGTERM to end their workers."""
    own = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    for number, default in own.items():
        if (getattr(signal.getsignal(number), "__module__", None) or "").startswith("furlong."):
            signal.signal(number, default)


os.register_at_fork(after_in_child=_restore_in_child)
