"""Run reward functions in worker processes under a time limit and an optional memory limit.

User code can hang, exhaust memory or exit, and only a process can be stopped from outside. Workers are started on
demand, load the function by its path, run until the end, and are replaced after a kill. A worker runs one call of a
sync function at a time, and many of an async function, which may wait for servers. Another worker is started when a
call has waited for as long as the first worker took to start: most functions are fast, and importing sympy takes longer
than scoring a rollout.
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
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from furlong.core.outcome import Outcome
from furlong.core.sample import Sample, apply_changes
from furlong.errors import RewardError
from furlong.rewards.sandbox_worker import HEADER, encode_frame, split_args

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from furlong.rewards.sandbox_worker import main; main()"
)
_ASYNC_GRACE_S = 0.25  # an async worker cancels its overdue calls; only a blocked one exceeds this
_READ_GRACE_S = 0.05  # the reply may be in the pipe already when a busy driver reaches the deadline
_EXIT_S = 2.0  # for a worker whose pipe has ended, so that its exit code is known
_HANG_REPORT_S = 0.25  # for a blocked worker to report the call that blocks it

Scored = tuple[list[Outcome], list[dict[str, Any]]]
T = TypeVar("T")


class _WorkerDiedError(Exception):
    """A worker ended with pending calls. `is_cause`: whether this call ended it, None if that is unknown."""

    def __init__(self, reason: str, *, is_cause: bool | None, is_overdue: bool) -> None:
        super().__init__(reason)
        self.is_cause, self.is_overdue = is_cause, is_overdue


@dataclass(frozen=True)
class Limits:
    """Limits of a reward function; `concurrency` is the number of concurrent calls per worker of an async function."""

    timeout_s: float = 60.0
    num_workers: int | None = None
    memory_limit_bytes: int | None = None
    start_timeout_s: float = 120.0
    concurrency: int = 32

    @property
    def workers(self) -> int:
        """Number of worker processes; by default one per usable core, at most 8."""
        return self.num_workers or min(8, len(os.sched_getaffinity(0)) if sys.platform == "linux" else 4)


@dataclass
class _WorkerSlot:
    """One worker process and the number of calls in it."""

    worker: _Worker | None = None
    open_calls: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sandbox:
    """Scores samples with the function at `path` in worker processes.

    Usable from any event loop: the workers belong to a separate thread with its own loop. `group` selects slime's
    batch form. `args` (a mapping or an object) is passed to the function; reading a value without a JSON form raises
    AttributeError there. Changes that the function makes to its sample (metadata, loss mask, ...) are copied back.

    >>> sandbox = Sandbox("my_rewards.py:reward", limits=Limits(timeout_s=5))  # doctest: +SKIP
    >>> await sandbox.score([sample])  # doctest: +SKIP
    [Outcome(kind='scored', reward=1.0, reason='', stage='reward')]
    """

    def __init__(self, path: str, *, limits: Limits | None = None, group: bool = False, args: Any = None) -> None:
        self.path = path
        self._limits = limits or Limits()
        values, omitted = split_args(args)
        self._setup = {
            "path": path,
            "group": group,
            "timeout_s": self._limits.timeout_s,
            "memory_limit_bytes": self._limits.memory_limit_bytes,
            "args": values,
            "omitted": omitted,
            "parent_pid": os.getpid(),
        }
        self._worker_slots = [_WorkerSlot() for _ in range(self._limits.workers)]
        self._semaphore: asyncio.Semaphore | None = None
        self._capacity = 1
        self._num_active = 1  # semaphore in use
        self._start_s = 0.0  # start time of the first worker, seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._start_lock: asyncio.Lock | None = None
        self._isolation_lock: asyncio.Lock | None = None
        self._by_group = True
        self._ids = itertools.count()
        self._requests: set[asyncio.Task[Any]] = set()  # what close() cancels; the workers' own tasks are not in it

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample. Raises RewardError if the function cannot be loaded."""
        if not samples:
            return []
        scoring = asyncio.run_coroutine_threadsafe(self._cancellable(self._score(samples)), self._running_loop())
        outcomes, changes = await asyncio.wrap_future(scoring)
        for sample, change in zip(samples, changes, strict=True):
            apply_changes(sample, change)
        return outcomes

    async def start(self) -> None:
        """Start one worker and load the function. Raises RewardError if that fails."""
        await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._cancellable(self._load()), self._running_loop())
        )

    def close(self) -> None:
        """Kill the workers, cancel pending calls and end the thread. Idempotent."""
        with self._thread_lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._thread_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="reward-sandbox", daemon=True)
                self._thread.start()
                self._worker_slots = [_WorkerSlot() for _ in self._worker_slots]
                self._start_lock, self._isolation_lock, self._semaphore = asyncio.Lock(), asyncio.Lock(), None
            return self._loop

    async def _cancellable(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the current task, which `close` cancels."""
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            return await work
        finally:
            self._requests.discard(task)

    async def _load(self) -> asyncio.Semaphore:
        """Start the first worker, which reports the style of the function. Return the semaphore of concurrent calls."""
        assert self._start_lock is not None
        async with self._start_lock:
            if self._semaphore is None:
                slot, started = self._worker_slots[0], time.monotonic()
                slot.worker = await _Worker.start(self._setup, self._limits)
                self._start_s = time.monotonic() - started
                self._by_group = slot.worker.style in ("batch", "trl")
                self._capacity = self._limits.concurrency if slot.worker.is_async else 1
                self._num_active, self._semaphore = 1, asyncio.Semaphore(self._capacity)
            return self._semaphore

    async def _score(self, samples: Sequence[Sample]) -> Scored:
        semaphore = await self._load()
        calls = [samples] if self._by_group else [[sample] for sample in samples]
        answers = await asyncio.gather(*(self._cancellable(self._call(call, semaphore)) for call in calls))
        return [o for outcomes, _ in answers for o in outcomes], [c for _, changes in answers for c in changes]

    async def _call(self, samples: Sequence[Sample], semaphore: asyncio.Semaphore) -> Scored:
        """Make one call. Repeat it if another call in the same worker ended the worker."""
        number = next(self._ids)
        try:
            frame = encode_frame({"id": number, "samples": [sample.to_dict() for sample in samples]})
        except TypeError as error:
            fix = "put plain numbers, text, lists and dicts into samples"
            return _repeat_outcome(
                samples, Outcome.failed(f"the sample cannot be sent to the reward sandbox: {error}; {fix}")
            )
        while True:
            try:
                await self._acquire(semaphore)
                try:
                    return await self._call_worker(number, frame)
                finally:
                    semaphore.release()
            except _WorkerDiedError as error:
                if error.is_cause:
                    return _repeat_outcome(samples, self._failed_outcome(error))
                if error.is_cause is None:
                    return await self._call_alone(samples, number, frame)

    async def _call_alone(self, samples: Sequence[Sample], number: int, frame: bytes) -> Scored:
        """Repeat a call alone in a new worker, to find out whether it is the call that ends workers."""
        assert self._isolation_lock is not None
        async with self._isolation_lock:
            worker = await _Worker.start(self._setup, self._limits)
            try:
                return await worker.call(number, frame, self._limits.timeout_s)
            except _WorkerDiedError as error:
                return _repeat_outcome(samples, self._failed_outcome(error))
            finally:
                await worker.stop()

    async def _acquire(self, semaphore: asyncio.Semaphore) -> None:
        """Wait for capacity; add a worker slot if that takes as long as starting a worker."""
        if self._num_active < len(self._worker_slots) and semaphore.locked():
            try:
                await asyncio.wait_for(semaphore.acquire(), self._start_s)
            except TimeoutError:
                if self._num_active < len(self._worker_slots):
                    self._num_active += 1
                    for _ in range(self._capacity):
                        semaphore.release()
            else:
                return
        await semaphore.acquire()

    async def _call_worker(self, number: int, frame: bytes) -> Scored:
        free = [slot for slot in self._worker_slots[: self._num_active] if slot.open_calls < self._capacity]
        slot = min(free, key=lambda s: (s.worker is None, s.open_calls))
        slot.open_calls += 1
        try:
            async with slot.starting:
                if slot.worker is None or not slot.worker.is_alive:
                    slot.worker = await _Worker.start(self._setup, self._limits)
            return await slot.worker.call(number, frame, self._limits.timeout_s)
        finally:
            slot.open_calls -= 1

    def _failed_outcome(self, error: _WorkerDiedError) -> Outcome:
        if error.is_overdue:
            return Outcome.timed_out(self._limits.timeout_s, details=str(error))
        return Outcome.failed(str(error))

    async def _stop(self) -> None:
        """Cancel the calls, then stop the workers: a call that lost its worker would start another one."""
        calls = list(self._requests)
        for task in calls:
            if not task.cancelling():  # otherwise it is stopping its worker already
                task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*(slot.worker.stop() for slot in self._worker_slots if slot.worker is not None))


class _Worker:
    """The driver's handle of one worker process."""

    def __init__(self, path: str, process: Process, open_end: int) -> None:
        self._path = path
        self._process = process
        self._open_end: int | None = open_end
        self._pending: dict[int, asyncio.Future[Scored]] = {}
        self._hung_call: int | None = None
        self._where = ""  # the definition of the function
        self._hung_at = ""  # the line of the call that `_hung_call` is
        self._is_overdue = False
        self.reader: asyncio.Task[None] | None = None
        self.style = ""
        self.is_async = False

    @staticmethod
    async def start(setup: dict[str, Any], limits: Limits) -> _Worker:
        """Start a process and load the function. Raises RewardError with the path and the cause."""
        pipe, open_end = os.pipe()  # its end in this process closes with it, however it ends
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _BOOT,
                json.dumps(sys.path),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
                pass_fds=(pipe,),
            )
        except BaseException:
            os.close(open_end)
            raise
        finally:
            os.close(pipe)
        worker = _Worker(setup["path"], process, open_end)
        try:
            worker._send(encode_frame(setup | {"run_pipe": pipe}))
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
        worker.style, worker.is_async, worker._where = ready["style"], ready["is_async"], ready["where"]
        worker.reader = asyncio.create_task(worker._read())
        return worker

    @property
    def is_alive(self) -> bool:
        """Whether the worker accepts calls."""
        return self._process.returncode is None and self.reader is not None and not self.reader.done()

    async def call(self, number: int, frame: bytes, timeout_s: float) -> Scored:
        """Send one call and wait for the reply. Raises _WorkerDiedError if the worker ends or is killed first."""
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(frame)
            await asyncio.wait({answer}, timeout=timeout_s + (_ASYNC_GRACE_S if self.is_async else 0))
            if not answer.done():
                await asyncio.wait({answer}, timeout=_READ_GRACE_S)
            if not answer.done():
                self._is_overdue = True
                self._signal(signal.SIGUSR1)
                await asyncio.wait({answer}, timeout=_HANG_REPORT_S)
                self._kill()
            return await answer
        finally:
            self._pending.pop(number, None)
            if not answer.done() and not self.is_async:
                self._kill()  # the call was cancelled; a sync function can only be stopped with its process

    async def stop(self) -> None:
        """Kill the process and wait for its exit."""
        self._kill()
        if self.reader is not None:
            await self.reader
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(ConnectionError):
                await self._process.stdin.wait_closed()

    async def _read(self) -> None:
        """Pass replies to the pending calls; when the process ends, fail the remaining ones."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                reply = await self._receive()
                if "hung" in reply:
                    self._hung_call, self._hung_at = reply["hung"], reply["where"]
                elif (answer := self._pending.get(reply["id"])) is not None and not answer.done():
                    answer.set_result(([Outcome(**o) for o in reply["outcomes"]], reply["changes"]))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _EXIT_S)
        self._kill()  # processes that user code started, and a worker that closed its pipe
        await self._process.wait()
        waiting = {number: answer for number, answer in self._pending.items() if not answer.done()}
        for number, answer in waiting.items():
            is_cause = True if len(waiting) == 1 else None if self._hung_call is None else self._hung_call == number
            where = self._hung_at or self._where
            reason = f"it did not return from {where}" if self._is_overdue else self._exit_reason()
            answer.set_exception(_WorkerDiedError(reason, is_cause=is_cause, is_overdue=self._is_overdue))

    async def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        head = await self._process.stdout.readexactly(HEADER.size)
        return orjson.loads(await self._process.stdout.readexactly(HEADER.unpack(head)[0]))

    def _send(self, frame: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(frame)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _kill(self) -> None:
        """Kill the worker's process group, which includes processes started by user code."""
        if self._open_end is not None:  # once: afterwards the number may belong to another group
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM if only zombies are left
                os.killpg(self._process.pid, signal.SIGKILL)
            os.close(self._open_end)
            self._open_end = None

    def _exit_reason(self) -> str:
        code = self._process.returncode
        ending = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        where = f" ({self._where})" if self._where else ""
        return f"the process of the reward function {self._path}{where} ended ({ending}) before it replied"


def _repeat_outcome(samples: Sequence[Sample], outcome: Outcome) -> Scored:
    return [outcome] * len(samples), [{} for _ in samples]
