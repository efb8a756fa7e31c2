"""Who owns the device: nobody, where trainer and engine have their own, or one after the other.

Where they share devices (`--colocate`), three things can be going on, and each has its own contents of memory:

training: the trainer is whole, the engine has released everything.
publishing: the trainer is whole, the engine has (room for) weights, but no cache and no CUDA graphs.
generating: the engine is whole, the trainer's parameters and optimizer states are in host memory.

What is not wanted goes before what is wanted comes, so that both never have to fit. That holds of memory that a trainer
has used and keeps for later, too: it may be all of the device. A run therefore goes in this order:

1. the trainer is built and sleeps (`Colocated.make_room`); engines start and size their caches by what is free;
2. to publish: engines release cache and graphs, the trainer wakes, weights go over;
3. to generate: the trainer sleeps, engines take memory for graphs and cache;
4. to train: engines release everything, the trainer wakes;
5. to publish again: the trainer gives back what it kept of its training, engines take memory for weights, whose
   contents are garbage until the trainer's have come; then 3.

An engine that is started again does so while the trainer sleeps (`Colocated.starting`), releases what the others have
released, and gets its weights with the next publication, or at once where none of the others has a request (`reloading`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

from furlong.core.metric import Metrics, maximum, merge, total
from furlong.errors import EngineError, SyncError
from furlong.interfaces import MemoryTransfer, Trainer

logger = logging.getLogger(__name__)

T = TypeVar("T")
Use = Literal["training", "publishing", "generating", "starting"]

WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"  # SGLang's tags
RESIDENT: dict[Use, tuple[str, ...]] = {
    "training": (),
    "publishing": (WEIGHTS,),
    "generating": (WEIGHTS, CACHE, GRAPHS),
}
LOOK_S = 0.1  # between two looks whether an engine may start


class Releases(Protocol):
    """One engine, or all, that can leave their devices."""

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Give the memory of these tags back; the contents are lost. Raises EngineError while requests run."""
        ...

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory for these tags again, without contents."""
        ...


class EngineMemory(Releases, Protocol):
    """The engines of a run, as long as they are there."""

    @property
    def is_awaited(self) -> bool:
        """Whether a publication waits for an engine, because none is left."""
        ...

    def held(self) -> AbstractContextManager[None]:
        """Let requests wait here. Raises SyncError if an engine has one."""
        ...


class SeparateDevices:
    """Implements `interfaces.DeviceSharing` for trainer and engines on separate devices: both may run at any time."""

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        """Hold the device for training; it is always free."""
        yield

    @contextlib.asynccontextmanager
    async def updating_weights(self) -> AsyncGenerator[None]:
        """Hold the device for reading the trainer's weights; it is always free."""
        yield

    @contextlib.asynccontextmanager
    async def generating(self) -> AsyncGenerator[None]:
        """Hold the device for generation; it is always free."""
        yield

    def metrics(self) -> Metrics:
        """Nothing was changed."""
        return {}


class Colocated:
    """Implements `interfaces.DeviceSharing` where trainer and engines share devices.

    Several may generate at a time; training and publishing wait for them and for each other. A change is made when the
    device is wanted, not when it is let go, so that a save after a publication costs nothing.

    Args:
        trainer: Sleeps while the engines generate, unless `offload_train` is off.
        engine: Releases its memory while the trainer trains, unless `offload_rollout` is off.

    Metrics of each step: `perf/sleep_time`, `perf/wake_up_time`, `perf/offload_rollout_time` and
    `perf/onload_rollout_time` in seconds; `memory/trainer_moved_gib`, what the trainer moved to or from the host at a
    time, over all ranks (0 on CPUs); `memory/engine_kept_frac`, what is in use beside the trainer once the engines
    have released all, `memory/trainer_peak_frac`, the most that the trainer's tensors took, and
    `memory/trainer_kept_frac`, what the trainer keeps asleep, as shares of the device.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: EngineMemory,
        *,
        offload_train: bool = True,
        offload_rollout: bool = True,
    ) -> None:
        self._trainer, self._engine = trainer, engine
        self._offload_train, self._offload_rollout = offload_train, offload_rollout
        self._resident = set(RESIDENT["generating"])
        self._is_awake = True
        self._has_weights = False  # of the trainer, in the engine
        self._changed = asyncio.Condition()
        self._using: Use | None = None
        self._num_using = 0
        self._metrics: Metrics = {}

    async def make_room(self) -> None:
        """Have the trainer leave the device before engines start on it; they are whole then, with weights of no use."""
        await self._change_trainer(is_awake=False)
        await self._trim()

    def training(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold the device for training."""
        return self._held("training")

    @contextlib.asynccontextmanager
    async def updating_weights(self) -> AsyncGenerator[None]:
        """Hold the device for reading the trainer's weights; once it is left, the engine is taken to have them."""
        async with self._held("publishing"):
            yield
            self._has_weights = True

    def generating(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold the device for generation. Raises EngineError if weights were released and not published since."""
        return self._held("generating")

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncGenerator[Callable[[Releases], Awaitable[None]]]:
        """Hold the device while an engine starts on it: the trainer sleeps, and others may generate.

        What is given has the new engine, which is whole, release what the others have released; then it may be used. A
        publication that found no engine is interrupted until then: nobody reads the trainer's weights.
        """
        while True:
            async with self._changed:
                if self._using == "publishing" and self._num_using and self._engine.is_awaited:
                    await self._change_trainer(is_awake=False)
                    await self._trim()
                    try:
                        yield self._settle_and_wake
                    finally:
                        await self._change_trainer(is_awake=True)
                    return
                if not self._num_using or self._using in ("generating", "starting"):
                    await self._change_trainer(is_awake=False)
                    await self._trim()
                    self._using = self._using if self._num_using else "starting"
                    self._num_using += 1
                    break
            await asyncio.sleep(LOOK_S)
        try:
            yield self._settle
        finally:
            await self._let_go()

    @contextlib.asynccontextmanager
    async def reloading(self) -> AsyncGenerator[None]:
        """Hold the device for giving one engine the trainer's weights in the middle of generation.

        Raises SyncError if that cannot be: others have requests, or the trainer has trained since, so that a
        publication is about to come.
        """
        async with self._changed:
            if not self._has_weights or (self._num_using and self._using != "generating"):
                raise SyncError("the device is in use, and a publication follows")
            with self._engine.held():
                before = sorted(self._resident - {WEIGHTS}) if self._offload_rollout else []
                was_awake = self._is_awake
                try:
                    await _to_its_end(self._lend(before))
                    yield
                finally:
                    await _to_its_end(self._take_back(before, is_awake=was_awake))

    async def _lend(self, tags: Sequence[str]) -> None:
        """Have the trainer come back in place of these tags of the engines' memory."""
        if tags:
            await self._engine.release_memory(tags)
        await self._change_trainer(is_awake=True)

    async def _take_back(self, tags: Sequence[str], *, is_awake: bool) -> None:
        await self._change_trainer(is_awake=is_awake)
        if tags:
            await self._resume(tags)

    async def _settle_and_wake(self, engine: Releases) -> None:
        await self._release_as_others(engine)
        await self._change_trainer(is_awake=True)

    async def _settle(self, engine: Releases) -> None:
        async with self._changed:
            await self._release_as_others(engine)

    async def _release_as_others(self, engine: Releases) -> None:
        if gone := sorted(set(RESIDENT["generating"]) - self._resident):
            await engine.release_memory(gone)

    def metrics(self) -> Metrics:
        """Times and memory of the changes since the last call."""
        found, self._metrics = self._metrics, {}
        return found

    @contextlib.asynccontextmanager
    async def _held(self, use: Use) -> AsyncGenerator[None]:
        async with self._changed:
            await self._changed.wait_for(
                lambda: not self._num_using or (use == "generating" and self._using in ("generating", "starting"))
            )
            await self._change_to(use)
            self._using, self._num_using = use, self._num_using + 1
        try:
            yield
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        async with self._changed:
            self._num_using -= 1
            self._changed.notify_all()

    async def _change_to(self, use: Use) -> None:
        wanted = set(RESIDENT[use]) if self._offload_rollout else self._resident
        if use == "generating" and not self._has_weights:
            raise EngineError("the engine's weights were released and not published since; publish before generating")
        if gone := sorted(self._resident - wanted):
            await self._timed("perf/offload_rollout_time", self._engine.release_memory(gone))
            self._resident -= set(gone)
            self._has_weights = self._has_weights and WEIGHTS in self._resident
            if not self._resident:
                await self._measure("memory/engine_kept_frac", of_engine=True)
        await self._change_trainer(is_awake=use != "generating")
        if come := sorted(wanted - self._resident):
            await self._timed("perf/onload_rollout_time", self._resume(come))
            self._resident |= set(come)

    async def _change_trainer(self, *, is_awake: bool) -> None:
        if self._is_awake and not is_awake and self._offload_train:
            await self._sleep()
        if is_awake and not self._is_awake:
            self._count(await self._timed("perf/wake_up_time", self._trainer.onload()))
            self._is_awake = True

    async def _resume(self, tags: Sequence[str]) -> None:
        await self._trim()
        await self._engine.resume_memory(tags)

    async def _trim(self) -> None:
        """Leave to others what no tensor of the trainer has; asleep it has left all."""
        if self._is_awake:
            await self._trainer.empty_cache()

    async def _sleep(self) -> None:
        self._count(await self._timed("perf/sleep_time", self._trainer.offload()))
        self._is_awake = False
        await self._measure("memory/trainer_kept_frac", of_engine=False)

    def _count(self, moved: MemoryTransfer) -> None:
        self._metrics = merge([self._metrics, {"memory/trainer_moved_gib": maximum(moved.num_bytes / 2**30)}])

    async def _timed(self, name: str, change: Awaitable[T]) -> T:
        started = time.perf_counter()
        found = await change
        seconds = time.perf_counter() - started
        self._metrics = merge([self._metrics, {name: total(seconds)}])
        logger.info("%s: %.3f s", name, seconds)
        return found

    async def _measure(self, name: str, *, of_engine: bool) -> None:
        memory = await self._trainer.device_memory()
        if memory is None:
            return
        kept = memory.used - memory.own if of_engine else memory.own
        shares = {name: maximum(kept / memory.total), "memory/trainer_peak_frac": maximum(memory.peak / memory.total)}
        self._metrics = merge([self._metrics, shares])
        logger.info("%s: %d of %d bytes", name, kept, memory.total)


async def _to_its_end(change: Coroutine[Any, Any, None]) -> None:
    """Await a change of memory; one whose waiter is cancelled is made whole before that is."""
    task = asyncio.ensure_future(change)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
