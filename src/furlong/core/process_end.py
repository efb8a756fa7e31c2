"""The end of a command: SIGTERM, processes that user code has started, and threads that do not return."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Generator
from typing import NoReturn

from furlong.errors import EndedBySignal

logger = logging.getLogger(__name__)

SIGTERM_CODE = 128 + signal.SIGTERM
EXIT_WITHIN_S = 15.0
_KILLED_WITHIN_S = 5.0
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # they end with this process
_OWN = "from furlong."  # in commands of furlong's own workers


@contextlib.contextmanager
def sigterm_unwinds() -> Generator[None]:
    """Raise EndedBySignal in the main thread at the first SIGTERM, so that temporary files and processes are removed.

    The process exits `EXIT_WITHIN_S` later, whatever swallows the exception. Event loops have their own handlers in
    the meantime. Does nothing in other threads than the main one, or if SIGTERM has a handler already.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:  # noqa: ARG001  signature of signal handlers
        signal.signal(signal.SIGTERM, ignore_signal)  # a further one would replace the exit code
        exit_within(EXIT_WITHIN_S, SIGTERM_CODE)
        raise EndedBySignal(SIGTERM_CODE)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:  # not `ignore_signal`: the interpreter resets handlers of Python while it exits
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def ignore_signal(number: int, frame: object) -> None:
    """Handle a signal by doing nothing. SIG_IGN would be inherited by programs that are started."""


def _restore_in_child() -> None:
    """Undo handlers of furlong in a forked process: pools of processes rely on SIGTERM to end their workers."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if (getattr(signal.getsignal(number), "__module__", None) or "").startswith("furlong."):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_restore_in_child)


def end_children() -> None:
    """Kill the processes that user code started here and that still run, with their children, and log their commands.

    Helpers of Python and of installed packages, such as Ray and W&B, end by themselves.
    """
    from psutil import AccessDenied, NoSuchProcess, Process, wait_procs

    shown: list[str] = []
    processes: list[Process] = []
    for process in Process().children(recursive=True):
        with contextlib.suppress(NoSuchProcess, AccessDenied):
            words = process.cmdline()
            command = shlex.join(words or [process.name()])
            if process.status() == "zombie" or any(each in command for each in _HELPERS) or _is_of_package(words):
                continue
            process.kill()
            processes.append(process)
            if _OWN not in command:
                shown.append(f"{command[:120]} (process {process.pid})")
    wait_procs(processes, timeout=_KILLED_WITHIN_S)
    if shown:
        count = f"{len(shown)} process{'es' * (len(shown) != 1)}"
        logger.warning("killed %s that user code had started and that still ran: %s", count, "; ".join(shown[:5]))


def _is_of_package(words: list[str]) -> bool:
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    return any("/site-packages/" in word or "/dist-packages/" in word for word in (*words[:1], script))


def exit_now(code: int) -> NoReturn:
    """End the children and exit without waiting for threads or cleanup."""
    with contextlib.suppress(Exception):  # this process may be out of memory or descriptors
        end_children()
        logging.shutdown()
        sys.stdout.flush()
    os._exit(code)


def exit_within(seconds: float, code: int) -> None:
    """Exit with `code` after `seconds` at the latest, although threads or pools of user code still run."""

    def exit_late() -> None:
        time.sleep(seconds)
        running = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
        sys.stderr.write(f"furlong: exiting without waiting for {', '.join(running) or 'user code'}\n")
        exit_now(code)

    threading.Thread(target=exit_late, name="furlong-exit", daemon=True).start()
