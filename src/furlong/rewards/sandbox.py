"""Run reward functions in worker processes under a time limit and an optional memory limit.

User code can hang, exhaust memory or exit, and only a process can be stopped from outside. Workers are started on
demand and replaced after a kill. A worker runs one call of a sync function at a time, and many of an async function.
Another worker is started when a call has waited for as long as the first worker took to start: most functions are fast,
and importing sympy takes longer than scoring a rollout.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from furlong.core.outcome import Outcome
from furlong.core.sample import Sample, apply_changes
from furlong.core.worker_process import Worker, WorkerEndedError
from furlong.errors import RewardError, RolloutError
from furlong.rewards.sandbox_worker import split_args

_WORKER = "furlong.rewards.sandbox_worker:RewardWorker"
_ASYNC_GRACE_S = 0.25  # an async worker cancels its overdue calls; only a blocked one exceeds this

Scored = tuple[list[Outcome], list[dict[str, Any]]]
T = TypeVar("T")


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
class _Slot:
    """One worker process and the number of calls in it."""

    worker: Worker | None = None
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
        }
        self._slots = [_Slot() for _ in range(self._limits.workers)]
        self._num_active = 1  # slots in use
        self._start_s = 0.0  # start time of the first worker
        self._function: dict[str, Any] = {}  # is_of_group, is_async and place, as the first worker reports them
        self._capacity = 1  # calls of a worker at a time
        self._permits: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._start_lock, self._isolation_lock = asyncio.Lock(), asyncio.Lock()
        self._requests: set[asyncio.Task[Any]] = set()  # what `close` cancels
        self._alone: set[Worker] = set()

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample. Raises RewardError if the function cannot be loaded."""
        if not samples:
            return []
        outcomes, changes = await self._in_thread(self._score(samples))
        for sample, change in zip(samples, changes, strict=True):
            apply_changes(sample, change)
        return outcomes

    async def start(self) -> None:
        """Load the function in one worker. Raises RewardError if that fails."""
        await self._in_thread(self._load())

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

    async def _in_thread(self, work: Coroutine[Any, Any, T]) -> T:
        with self._thread_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="reward-sandbox", daemon=True)
                self._thread.start()
                self._slots, self._num_active, self._permits = [_Slot() for _ in self._slots], 1, None
                self._start_lock, self._isolation_lock = asyncio.Lock(), asyncio.Lock()
            loop = self._loop
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._cancellable(work), loop))

    async def _cancellable(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            return await work
        finally:
            self._requests.discard(task)

    async def _load(self) -> asyncio.Semaphore:
        """Start the first worker, which reports the style of the function. Return the permits of concurrent calls."""
        async with self._start_lock:
            if self._permits is None:
                started = time.monotonic()
                self._slots[0].worker = await self._started()
                self._start_s = time.monotonic() - started
                self._capacity = self._limits.concurrency if self._function["is_async"] else 1
                self._permits = asyncio.Semaphore(self._capacity)
            return self._permits

    async def _started(self) -> Worker:
        worker = await Worker.start(_WORKER)
        try:
            self._function = await worker.call("load", self._setup, timeout_s=self._limits.start_timeout_s)
        except BaseException as error:
            await worker.end()
            is_late = isinstance(error, WorkerEndedError) and error.overdue_at is not None
            is_own = isinstance(error, Exception) and not is_late  # raised by the function's code, or crashed in it
            if is_own and self._limits.memory_limit_bytes and await self._loads_without_limit():
                raise RewardError(
                    f"the reward function {self.path} cannot be loaded within --reward-memory-limit "
                    f"{self._limits.memory_limit_bytes / 2**30:.3g}, without the limit it can; raise it"
                ) from error
            if isinstance(error, WorkerEndedError):
                how = f"within {self._limits.start_timeout_s:g} s" if is_late else f"its process ended ({error})"
                raise RewardError(f"the sandbox for {self.path} did not start: {how}") from error
            if isinstance(error, Exception) and not isinstance(error, RewardError):
                raise RewardError(f"{type(error).__name__}: {error}") from error
            raise
        return worker

    async def _loads_without_limit(self) -> bool:
        worker = await Worker.start(_WORKER)
        try:
            setup = {**self._setup, "memory_limit_bytes": None}
            await worker.call("load", setup, timeout_s=self._limits.start_timeout_s)
        except (RewardError, WorkerEndedError):
            return False
        finally:
            await worker.end()
        return True

    async def _score(self, samples: Sequence[Sample]) -> Scored:
        permits = await self._load()
        calls = [samples] if self._function["is_of_group"] else [[sample] for sample in samples]
        answers = await asyncio.gather(*(self._cancellable(self._call(call, permits)) for call in calls))
        return [o for outcomes, _ in answers for o in outcomes], [c for _, changes in answers for c in changes]

    async def _call(self, samples: Sequence[Sample], permits: asyncio.Semaphore) -> Scored:
        fields = {"samples": [sample.to_dict() for sample in samples]}
        try:
            while True:
                try:
                    await self._acquire(permits)
                    try:
                        return await self._call_worker(fields)
                    finally:
                        permits.release()
                except WorkerEndedError as error:
                    if error.is_cause is None:
                        break
                    if error.is_cause:
                        raise
            async with self._isolation_lock:  # alone in a new worker, to find out whether it is this call
                worker = await self._started()
                self._alone.add(worker)
                try:
                    return await self._ask(worker, fields)
                finally:
                    self._alone.discard(worker)
                    await worker.end()
        except WorkerEndedError as error:
            where = self._function["where"]
            if error.overdue_at is not None:
                details = f"it did not return from {error.overdue_at or where}"
                outcome = Outcome.timed_out(self._limits.timeout_s, details=details)
            else:
                reason = f"the process of the reward function {self.path} ({where}) ended ({error}) before it replied"
                outcome = Outcome.failed(reason)
        except TypeError as error:
            fix = "put plain numbers, text, lists and dicts into samples"
            outcome = Outcome.failed(f"the sample cannot be sent to the reward sandbox: {error}; {fix}")
        except RolloutError as error:  # of the worker
            where = self._function["where"]
            reason = f"the reward or the changed sample cannot be returned from the sandbox: {error} ({where})"
            outcome = Outcome.failed(reason)
        return [outcome] * len(samples), [{} for _ in samples]

    async def _acquire(self, permits: asyncio.Semaphore) -> None:
        """Wait for capacity; add a worker if that takes as long as starting a worker."""
        if self._num_active < len(self._slots) and permits.locked():
            try:
                await asyncio.wait_for(permits.acquire(), self._start_s)
            except TimeoutError:
                if self._num_active < len(self._slots):
                    self._num_active += 1
                    for _ in range(self._capacity):
                        permits.release()
            else:
                return
        await permits.acquire()

    async def _call_worker(self, fields: dict[str, Any]) -> Scored:
        free = [slot for slot in self._slots[: self._num_active] if slot.open_calls < self._capacity]
        slot = min(free, key=lambda s: (s.worker is None, s.open_calls))
        slot.open_calls += 1
        try:
            async with slot.starting:
                if slot.worker is None or slot.worker.ending:
                    slot.worker = await self._started()
            return await self._ask(slot.worker, fields)
        finally:
            slot.open_calls -= 1

    async def _ask(self, worker: Worker, fields: dict[str, Any]) -> Scored:
        grace_s = _ASYNC_GRACE_S if self._function["is_async"] else 0.0
        done = await worker.call("score", fields, timeout_s=self._limits.timeout_s + grace_s)
        return [Outcome(**row) for row in done["outcomes"]], done["changes"]

    async def _stop(self) -> None:
        """Cancel the calls, then stop the workers: a call that lost its worker would start another one."""
        calls = list(self._requests)
        for task in calls:
            if not task.cancelling():  # otherwise it is stopping its worker already
                task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        workers = [*self._alone, *(slot.worker for slot in self._slots if slot.worker is not None)]
        await asyncio.gather(*(worker.end() for worker in workers))
