"""SIGTERM, SIGHUP and Ctrl-C end a run in good order; a second Ctrl-C exits at once."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Literal

from furlong.core.event_loop import LoopProbe
from furlong.core.process_end import SIGTERM_CODE, exit_now, ignore_signal

logger = logging.getLogger(__name__)

Reason = Literal["Ctrl-C", "SIGTERM", "SIGHUP"]
REASONS: dict[int, Reason] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP"}
EXIT_CODES: dict[Reason, int] = {
    "SIGTERM": SIGTERM_CODE,
    "Ctrl-C": 128 + signal.SIGINT,
    "SIGHUP": 128 + signal.SIGHUP,
}
ANSWER_S = 3.0  # for the event loop to run; then user code that blocks it is reported
BLOCKED_S = 15.0  # for which it may block the loop; then the process exits


class EndSignals:
    """Handles the signals that end a run, in a `with` block around its event loop in the main thread.

    A signal asks the run to end in good order. The process exits at the second Ctrl-C, and if user code still blocks
    the event loop after `BLOCKED_S`. Does nothing in other threads than the main one. Handlers are functions, because
    child processes inherit ignored signals.
    """

    def __init__(self) -> None:
        self._reason: Reason | None = None
        self._done = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: Callable[[Reason], object] = lambda _: None
        self._before: dict[signal.Signals, signal.Handlers | Callable[..., object] | int | None] = {}

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

    def attach(self, end: Callable[[Reason], object]) -> None:
        """Call the thread-safe `end(reason)` at each signal, and at once for one that has come before.

        Call it on the event loop.
        """
        self._loop, self._end = asyncio.get_running_loop(), end
        if self._reason is not None:
            end(self._reason)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  signature of signal handlers
        reason = REASONS[number]
        if number == signal.SIGINT and self._reason is not None:
            logger.error("a second Ctrl-C: exiting without waiting for the run to end")
            exit_now(EXIT_CODES["Ctrl-C"])
        is_first, self._reason = self._reason is None, self._reason or reason
        if self._loop is None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self._end(reason)
        if is_first:
            threading.Thread(target=self._watch, args=(self._loop, reason), name="furlong-end", daemon=True).start()

    def _watch(self, loop: asyncio.AbstractEventLoop, reason: Reason) -> None:
        """Report user code that keeps the event loop from ending the run, and exit if it does not stop."""
        probe, blocked_s = LoopProbe(loop), 0.0
        probe.blocked_at()
        while not self._done.wait(ANSWER_S):
            if (place := probe.blocked_at()) is None:
                blocked_s = 0.0
                continue
            blocked_s += ANSWER_S
            logger.warning("%s blocks the event loop, so the run cannot end; Ctrl-C (again) exits at once", place)
            if blocked_s >= BLOCKED_S:
                logger.error("%s does not end; exiting without waiting for it", place)
                exit_now(EXIT_CODES[reason])
