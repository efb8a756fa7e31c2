"""Runs reward functions in worker processes under a time limit and, if wanted, a memory limit.

User code can hang, exhaust memory or end its process, and only a process can be stopped from outside. Workers are
started when first needed, load the function by its path, stay for the whole run, and are replaced when they had to be
killed. A sync function gets one call at a time per worker; an async one many, so that it can wait for servers. The
workers after the first are started once a call has waited for as long as the first took to start: most functions are
quick, and one that imports sympy takes longer to start than to score a rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from furlong.core.outcome import Outcome
from furlong.core.sample import Sample
from furlong.errors import RewardError
from furlong.rewards.wire import HEADER, apply_changes, frame_from, message_from, sendable

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from furlong.rewards.sandbox_worker import main; main()"
)
_ASYNC_GRACE_S = 0.25  # an async worker ends its own overdue calls; only one that is stuck passes this
_READ_GRACE_S = 0.05  # an answer may already be in the pipe when a busy driver notices the deadline
_CONFESS_S = 0.25  # for a stuck worker to name the call that it is stuck in

Scored = tuple[list[Outcome], list[dict[str, Any]]]


class _DiedError(Exception):
    """A worker ended with open calls. `is_mine`: whether this call was the reason; None if unknown."""

    def __init__(self, reason: str, *, is_mine: bool | None, is_overdue: bool) -> None:
        super().__init__(reason)
        self.is_mine, self.is_overdue = is_mine, is_overdue


@dataclass(frozen=True)
class Limits:
    """Limits of a reward function. Times in seconds; `concurrency` is open calls per worker of an async function."""

    timeout_s: float = 60.0
    num_workers: int | None = None
    memory_limit_bytes: int | None = None
    start_timeout_s: float = 120.0
    concurrency: int = 32

    @property
    def workers(self) -> int:
        """Number of worker processes: as given, or one per usable core, at most 8."""
        return self.num_workers or min(8, len(os.sched_getaffinity(0)) if sys.platform == "linux" else 4)


@dataclass
class _Seat:
    """A place for one worker process."""

    worker: _Worker | None = None
    open_calls: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sandbox:
    """Scores samples with the function at `path`, in worker processes.

    Usable from any event loop: the workers belong to a thread with its own loop. `group` selects slime's batch
    form. `args` (a mapping or an object) is passed to the function as `args`; reading a value without a JSON form
    raises AttributeError. Changes to the sample (metadata, loss mask, ...) are copied back.

    >>> sandbox = Sandbox("my_rewards.py:reward", limits=Limits(timeout_s=5))  # doctest: +SKIP
    >>> await sandbox.score([sample])  # doctest: +SKIP
    [Outcome(kind='scored', reward=1.0, reason='', stage='reward')]
    """

    def __init__(self, path: str, *, limits: Limits | None = None, group: bool = False, args: Any = None) -> None:
        self.path = path
        self._limits = limits or Limits()
        values, unsent = sendable(args)
        self._setup = {
            "path": path,
            "group": group,
            "timeout_s": self._limits.timeout_s,
            "memory_limit_bytes": self._limits.memory_limit_bytes,
            "args": values,
            "unsent": unsent,
            "parent_pid": os.getpid(),
        }
        self._seats = [_Seat() for _ in range(self._limits.workers)]
        self._slots: asyncio.Semaphore | None = None
        self._capacity = 1
        self._num_open = 1  # seats that calls may take
        self._start_s = 0.0  # what the first worker took to start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._opening = threading.Lock()
        self._first: asyncio.Lock | None = None
        self._solo: asyncio.Lock | None = None
        self._by_group = True
        self._ids = itertools.count()

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample. Raises RewardError if the function cannot be loaded."""
        if not samples:
            return []
        scoring = asyncio.run_coroutine_threadsafe(self._score(samples), self._running_loop())
        outcomes, changes = await asyncio.wrap_future(scoring)
        for sample, change in zip(samples, changes, strict=True):
            apply_changes(sample, change)
        return outcomes

    async def start(self) -> None:
        """Start one worker and load the function. Raises RewardError if that fails."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._load(), self._running_loop()))

    def close(self) -> None:
        """Kill the workers and end the thread; calls that are still open are cancelled. May be called twice."""
        with self._opening:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._opening:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="reward-sandbox", daemon=True)
                self._thread.start()
                self._seats = [_Seat() for _ in self._seats]
                self._first, self._solo, self._slots = asyncio.Lock(), asyncio.Lock(), None
            return self._loop

    async def _load(self) -> asyncio.Semaphore:
        """Start the first worker, which reports the calling style of the function."""
        assert self._first is not None
        async with self._first:
            if self._slots is None:
                seat, began = self._seats[0], time.monotonic()
                seat.worker = await _Worker.start(self._setup, self._limits)
                self._start_s = time.monotonic() - began
                self._by_group = seat.worker.style in ("batch", "trl")
                self._capacity = self._limits.concurrency if seat.worker.is_async else 1
                self._num_open, self._slots = 1, asyncio.Semaphore(self._capacity)
            return self._slots

    async def _score(self, samples: Sequence[Sample]) -> Scored:
        slots = await self._load()
        calls = [samples] if self._by_group else [[sample] for sample in samples]
        answers = await asyncio.gather(*(self._call(call, slots) for call in calls))
        return [o for outcomes, _ in answers for o in outcomes], [c for _, changes in answers for c in changes]

    async def _call(self, samples: Sequence[Sample], slots: asyncio.Semaphore) -> Scored:
        """Make one call; repeat it if another call killed the shared worker."""
        number = next(self._ids)
        try:
            frame = frame_from({"id": number, "samples": [sample.to_dict() for sample in samples]})
        except TypeError as error:
            remedy = "put plain numbers, text, lists and dicts into samples"
            return _all(samples, Outcome.failed(f"the sample cannot be sent to the reward sandbox: {error}; {remedy}"))
        while True:
            try:
                await self._take(slots)
                try:
                    return await self._ask(number, frame)
                finally:
                    slots.release()
            except _DiedError as death:
                if death.is_mine:
                    return _all(samples, self._verdict(death))
                if death.is_mine is None:
                    return await self._call_alone(samples, number, frame)

    async def _call_alone(self, samples: Sequence[Sample], number: int, frame: bytes) -> Scored:
        """Make a call on a separate worker, to find out whether it is the one that kills workers."""
        assert self._solo is not None
        async with self._solo:
            worker = await _Worker.start(self._setup, self._limits)
            try:
                return await worker.ask(number, frame, self._limits.timeout_s)
            except _DiedError as death:
                return _all(samples, self._verdict(death))
            finally:
                await worker.stop()

    async def _take(self, slots: asyncio.Semaphore) -> None:
        """Wait for a place on a worker; open one more seat if that takes as long as starting its worker."""
        if self._num_open < len(self._seats) and slots.locked():
            try:
                await asyncio.wait_for(slots.acquire(), self._start_s)
            except TimeoutError:
                if self._num_open < len(self._seats):
                    self._num_open += 1
                    for _ in range(self._capacity):
                        slots.release()
            else:
                return
        await slots.acquire()

    async def _ask(self, number: int, frame: bytes) -> Scored:
        free = [seat for seat in self._seats[: self._num_open] if seat.open_calls < self._capacity]
        seat = min(free, key=lambda s: (s.worker is None, s.open_calls))
        seat.open_calls += 1
        try:
            async with seat.starting:
                if seat.worker is None or not seat.worker.is_alive:
                    seat.worker = await _Worker.start(self._setup, self._limits)
            return await seat.worker.ask(number, frame, self._limits.timeout_s)
        finally:
            seat.open_calls -= 1

    def _verdict(self, death: _DiedError) -> Outcome:
        return Outcome.timed_out(self._limits.timeout_s) if death.is_overdue else Outcome.failed(str(death))

    async def _stop(self) -> None:
        """End the calls, then the workers: a call whose worker ended would start another one."""
        kept = {asyncio.current_task(), *(seat.worker.reader for seat in self._seats if seat.worker is not None)}
        calls = [task for task in asyncio.all_tasks() if task not in kept]
        for task in calls:
            if not task.cancelling():  # else it is ending its worker already
                task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*(seat.worker.stop() for seat in self._seats if seat.worker is not None))


class _Worker:
    """The driver's end of one worker process."""

    def __init__(self, path: str, process: Process) -> None:
        self._path = path
        self._process = process
        self._open: dict[int, asyncio.Future[Scored]] = {}
        self._guilty: int | None = None
        self._is_overdue = False
        self.reader: asyncio.Task[None] | None = None
        self.style = ""
        self.is_async = False

    @staticmethod
    async def start(setup: dict[str, Any], limits: Limits) -> _Worker:
        """Start a process and load the function. Raises RewardError that names the path and what went wrong."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _BOOT, json.dumps(sys.path), stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        worker = _Worker(setup["path"], process)
        try:
            worker._send(frame_from(setup))
            ready = await asyncio.wait_for(worker._receive(), limits.start_timeout_s)
        except BaseException as error:
            await worker.stop()
            if not isinstance(error, TimeoutError | asyncio.IncompleteReadError | ConnectionError):
                raise
            took = f"within {limits.start_timeout_s:g} s" if isinstance(error, TimeoutError) else worker._exit_reason()
            raise RewardError(f"the sandbox for {setup['path']} did not start: {took}") from error
        if "error" in ready:
            await worker.stop()
            raise RewardError(ready["error"])
        worker.style, worker.is_async = ready["style"], ready["is_async"]
        worker.reader = asyncio.create_task(worker._read())
        return worker

    @property
    def is_alive(self) -> bool:
        """Whether calls can be sent."""
        return self._process.returncode is None and self.reader is not None and not self.reader.done()

    async def ask(self, number: int, frame: bytes, timeout_s: float) -> Scored:
        """Send one call and wait for the answer. Raises _DiedError if the worker ends first or exceeds the limit."""
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(frame)
            await asyncio.wait({answer}, timeout=timeout_s + (_ASYNC_GRACE_S if self.is_async else 0))
            if not answer.done():
                await asyncio.wait({answer}, timeout=_READ_GRACE_S)
            if not answer.done():
                self._is_overdue = True
                if self.is_async:
                    self._signal(signal.SIGUSR1)
                    await asyncio.wait({answer}, timeout=_CONFESS_S)
                self._kill()
            return await answer
        finally:
            self._open.pop(number, None)
            if not answer.done() and not self.is_async:
                self._kill()  # cancelled: the answer of this call is not read

    async def stop(self) -> None:
        """Kill the process and wait until it is gone."""
        self._kill()
        if self.reader is not None:
            await self.reader
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(ConnectionError):
                await self._process.stdin.wait_closed()

    async def _read(self) -> None:
        """Hand answers to the calls that wait for them; when the process ends, tell all that still wait."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                reply = await self._receive()
                if "hung" in reply:
                    self._guilty = reply["hung"]
                elif (answer := self._open.get(reply["id"])) is not None and not answer.done():
                    answer.set_result(([Outcome(**o) for o in reply["outcomes"]], reply["changes"]))
        await self._process.wait()
        waiting = {number: answer for number, answer in self._open.items() if not answer.done()}
        for number, answer in waiting.items():
            is_mine = True if len(waiting) == 1 else None if self._guilty is None else self._guilty == number
            answer.set_exception(_DiedError(self._exit_reason(), is_mine=is_mine, is_overdue=self._is_overdue))

    async def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        head = await self._process.stdout.readexactly(HEADER.size)
        return message_from(await self._process.stdout.readexactly(HEADER.unpack(head)[0]))

    def _send(self, frame: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(frame)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _kill(self) -> None:
        """Kill the worker's process group: itself and what user code has started in it."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _exit_reason(self) -> str:
        code = self._process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return f"the process of the reward function {self._path} ended ({how}) before it answered"


def _all(samples: Sequence[Sample], outcome: Outcome) -> Scored:
    return [outcome] * len(samples), [{} for _ in samples]
