"""SIGTERM, SIGHUP and Ctrl-C end a run, also while user code blocks the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Literal

from furlong.core.event_loop import LoopProbe, user_frame
from furlong.core.sigterm import EXIT_CODE, ends_child, ignore_signal
from furlong.core.user_code import exit_process
from furlong.core.user_processes import kill_user_processes
from furlong.errors import TerminatedError

logger = logging.getLogger(__name__)

Reason = Literal["Ctrl-C", "SIGTERM", "SIGHUP"]
REASONS: dict[int, Reason] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP"}
EXIT_CODES: dict[Reason, int] = {
    "SIGTERM": EXIT_CODE,
    "Ctrl-C": 128 + signal.SIGINT,
    "SIGHUP": 128 + signal.SIGHUP,
}
ANSWER_S = 3.0  # for the event loop to run; then TerminatedError is raised in the user code that blocks it
INTERRUPT_S = 15.0  # to raise it; then the process exits
PAUSE_S = 0.02  # between two attempts


class EndSignals:
    """Handles the signals that end a run, in a `with` block around its event loop in the main thread.

    A signal asks the run to end in good order. If user code blocks the event loop, it gets TerminatedError: at once at
    the second Ctrl-C, else after `answer_s`. Does nothing in other threads than the main one. Handlers are functions,
    because child processes inherit ignored signals.
    """

    def __init__(self, *, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._reason: Reason | None = None
        self._pid = os.getpid()
        self._is_interrupting = False
        self._done = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Callable[[Reason], object] = lambda _: None
        self._before: dict[signal.Signals, signal.Handlers | Callable[..., object] | int | None] = {}
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> EndSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                before = signal.getsignal(number)
                if number == signal.SIGINT and before is not signal.default_int_handler:
                    continue  # the program that calls furlong handles Ctrl-C
                if number == signal.SIGHUP and before is not signal.SIG_DFL:
                    continue  # nohup, or that program, lets the run survive its terminal
                self._before[number] = before
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers. The signal that ended the run does nothing from now on: it would replace its code."""
        self._done.set()
        for number, before in self._before.items():
            is_ending = self._reason == REASONS[number] and number != signal.SIGINT
            signal.signal(number, ignore_signal if is_ending else before)
        if self._watcher is not None:
            self._watcher.join()

    def attach(self, end: Callable[[Reason], object]) -> None:
        """Call the thread-safe `end(reason)` at each signal, and at once for one that has come before.

        Call it on the event loop.
        """
        self._loop, self._end = asyncio.get_running_loop(), end
        if self._reason is not None:
            end(self._reason)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, in the main thread between two instructions of whatever it runs."""
        if ends_child(number, self._pid):
            return
        if self._is_interrupting:
            if user_frame(frame) is not None:
                raise TerminatedError(self._reason)
            return
        is_repeated, reason = self._reason is not None, REASONS[number]
        self._reason = self._reason or reason
        if self._loop is not None:
            self._end(reason)
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._watch, args=(self._loop,), name="furlong-end", daemon=True
                )
                self._watcher.start()
        if number == signal.SIGINT and (is_repeated or self._loop is None):
            raise KeyboardInterrupt if user_frame(frame) is None else TerminatedError(self._reason)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Interrupt user code that keeps the event loop from ending the run."""
        probe = LoopProbe(loop)
        probe.blocked_at()
        while not self._done.wait(self._answer_s):
            if (place := probe.blocked_at()) is not None:
                logger.warning("%s blocks the event loop; interrupting it, because the run ends", place)
                self._interrupt(probe)

    def _interrupt(self, probe: LoopProbe) -> None:
        """Raise TerminatedError in user code until the event loop runs; each of its tasks may block it."""
        assert self._reason is not None
        deadline_s = time.monotonic() + INTERRUPT_S
        self._is_interrupting = True
        while not probe.has_run and not self._done.wait(PAUSE_S):
            if time.monotonic() > deadline_s and (place := probe.blocked_at()) is not None:
                logger.error("%s does not end; exiting without waiting for it", place)
                kill_user_processes()
                exit_process(EXIT_CODES[self._reason])
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        self._is_interrupting = False
