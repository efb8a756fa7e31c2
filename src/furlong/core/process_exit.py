"""The end of the process of a run: an exit that user code cannot prevent, and stacks of fatal signals."""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator

from furlong.core.text import abbreviate
from furlong.core.user_code import exit_process, is_user_file
from furlong.core.user_processes import kill_user_processes

EXIT_WITHIN_S = 15.0
STDERR = 2
# Signals that end a process by default and that timers, limits and schedulers send.
FATAL_SIGNALS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU)


@contextlib.contextmanager
def fatal_signals_print_stacks() -> Generator[None]:
    """Print the stacks of all threads to stderr when a signal such as SIGSEGV or SIGALRM ends this process."""
    was_enabled = faulthandler.is_enabled()
    registered = [number for number in FATAL_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    if not was_enabled:
        faulthandler.enable(STDERR)
    for number in registered:
        faulthandler.register(number, STDERR, chain=True)
    try:
        yield
    finally:
        for number in registered:
            faulthandler.unregister(number)
        if not was_enabled:
            faulthandler.disable()


def exit_within(seconds: float, code: int) -> None:
    """Exit with `code` after `seconds` at the latest, whatever user code still runs.

    The interpreter waits at its end for threads that are not daemons, and for pools of processes. `Thread.start` would
    wait for ever if memory does not suffice for the thread.
    """
    with contextlib.suppress(RuntimeError):  # no thread can be started
        _thread.start_new_thread(_exit_after, (seconds, code))


def _exit_after(seconds: float, code: int) -> None:
    time.sleep(seconds)
    kill_user_processes()
    logging.shutdown()
    with contextlib.suppress(Exception):  # user code may have replaced or closed them
        sys.stderr.write(f"furlong: exiting without waiting for {abbreviate(_running()) or 'user code'}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    exit_process(code)


def _running() -> list[str]:
    """Describe the threads that run, and where user code is in them."""
    frames, shown = sys._current_frames(), list[str]()  # pyright: ignore[reportPrivateUsage]
    for thread in threading.enumerate():
        is_own = thread in (threading.current_thread(), threading.main_thread())
        if is_own or (frame := frames.get(thread.ident or 0)) is None:
            continue
        users = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack(frame) if is_user_file(f.filename)]
        if not thread.daemon or users:
            shown.append(f"the thread {thread.name}{f' at {users[-1]}' if users else ''}")
    return shown
