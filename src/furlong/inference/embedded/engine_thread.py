"""`EngineThread`: the thread that runs a slot batch, and delivery of its results to event loops."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from furlong.core.tracing import tracer
from furlong.errors import EngineError
from furlong.inference.embedded.request import Request
from furlong.inference.embedded.slot_batch import SlotBatch

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineThread:
    """Runs `batch` until it is closed; the only thread that uses the batch and its model.

    blocked: Why nothing can be generated; None if it can.
    busy_s: Time in which the model ran.
    """

    def __init__(self, batch: SlotBatch) -> None:
        self.batch = batch
        self.blocked: str | None = None
        self.busy_s = 0.0
        self.is_admitting = True
        self._is_stepping = True
        self._is_closing = False
        self._wake = threading.Condition()
        self._incoming: list[Request] = []
        self._commands: list[Callable[[], Any]] = []
        self._drained: list[Callable[[None], None]] = []
        self._pending: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        self._thread = threading.Thread(target=self._run, name="furlong-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Number of queued requests."""
        pending = sum(map(len, list(self._pending.values())))
        return len(self.batch.waiting) + len(self._incoming) + pending

    def check_open(self) -> None:
        """Raise EngineError if the engine is closed."""
        if self._is_closing:
            raise EngineError("the embedded engine is closed; build a new one")

    def add(self, request: Request) -> None:
        """Queue a request.

        Requests from one iteration of an event loop are handed over together, so that equal prompts share a prefill.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._pending:
            self._pending[loop] = []
            loop.call_soon(self.hand_over, loop)
        self._pending[loop].append(request)

    def hand_over_all(self) -> None:
        """Hand over the requests of all event loops now."""
        for loop in list(self._pending):
            self.hand_over(loop)

    def hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand over the requests of `loop` now."""
        requests = self._pending.pop(loop, [])
        with self._wake:
            self._incoming += requests
            self._wake.notify()

    def post(self, command: Callable[[], Any]) -> None:
        """Run `command` on the thread between two decode steps."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def stop(self) -> None:
        """Fail unfinished requests with EngineError and wait for the end of the thread."""
        self.hand_over_all()
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def set_running(self, *, admitting: bool, stepping: bool) -> None:
        """Set whether queued requests are admitted and running ones decoded."""
        self.is_admitting, self._is_stepping = admitting, stepping

    def drain(self, answer: Callable[[None], None]) -> None:
        """Stop admitting requests; `answer` is called once none is running."""
        self.set_running(admitting=False, stepping=True)
        self._drained.append(answer)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests with `error`."""
        for request in self.batch.reset():
            known = isinstance(error, EngineError)
            failure = EngineError(str(error) if known else f"generation failed ({type(error).__name__}): {error}")
            failure.__cause__ = error
            request.deliver(failure)

    def _has_work(self) -> bool:
        if not self._is_stepping or self.blocked is not None:
            return False
        return bool(self.batch.running) or (self.is_admitting and bool(self.batch.waiting))

    def _interrupted(self) -> bool:
        has_free_slot = len(self.batch.running) < self.batch.num_slots
        return bool(self._commands) or self._is_closing or (bool(self._incoming) and has_free_slot)

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._is_closing:
                with self._wake:
                    while not (self._commands or self._incoming or self._is_closing or self._has_work()):
                        self._wake.wait()
                self._process_queues()
                if self._has_work() and not self._is_closing:
                    self._step()
                if not self.batch.running:
                    self._notify_drained()
            self._process_queues()
            self._notify_drained()
            for request in self.batch.reset():
                request.deliver(EngineError(f"the embedded engine was closed before request {request.rid} finished"))

    def _process_queues(self) -> None:
        """Queue new requests, then run commands."""
        with self._wake:
            commands, self._commands = self._commands, []
            incoming, self._incoming = self._incoming, []
        self.batch.add(incoming)
        for command in commands:
            command()

    def _notify_drained(self) -> None:
        for answer in self._drained:
            answer(None)
        self._drained.clear()

    def _step(self) -> None:
        began = time.perf_counter()
        try:
            with tracer.span("engine busy", running=len(self.batch.running)):
                self.batch.run(admit=self.is_admitting, interrupted=self._interrupted)
        except Exception as error:
            message = "a step of the embedded engine failed; all its requests fail with this error"
            if isinstance(error, EngineError):
                logger.error("%s: %s", message, str(error).splitlines()[0])  # the requests raise the full text
            else:
                logger.exception(message)
            self.fail_all(error)
        self.busy_s += time.perf_counter() - began


def settler(future: asyncio.Future[T]) -> Callable[[T | Exception], None]:
    """Return a thread-safe function that sets the result or error of `future`."""

    def settle(result: T | Exception) -> None:
        if future.done():
            return  # the caller was cancelled
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    return lambda result: call_on_loop(future.get_loop(), settle, result)


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> None:
    """Call `function` on `loop`; does nothing if the loop was closed."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        if not loop.is_closed():
            raise
        logger.warning("the event loop of a request was closed before it finished")
