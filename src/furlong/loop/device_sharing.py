"""Hands the devices over between training and generation.

If trainer and engines share devices (`--colocate`), one of three uses is active, each with its own memory contents:

training: the trainer is on the device; the engines have released everything.
updating: the trainer is on the device; the engines have memory for weights, but no cache and no CUDA graphs.
generating: the engines are on the device; the trainer's parameters and optimizer states are in host memory.

Memory is released before the next owner allocates, so both never have to fit at once. This includes memory that the
trainer's allocator caches, which may be the whole device. A run therefore proceeds as follows:

1. engines start on empty devices and release everything (`Colocated.release_engines`), then the trainer is built; or a
   trainer that is built already is offloaded (`Colocated.make_room`) before engines start;
2. to update weights: engines release cache and graphs, the trainer is loaded back, weights are sent;
3. to generate: the trainer is offloaded, engines allocate graphs and cache;
4. to train: engines release everything, the trainer is loaded back;
5. to update weights again: the trainer frees its cached memory, engines allocate memory for weights, whose contents are
   undefined until the trainer's have arrived; then 3.

An engine is restarted while the trainer is offloaded (`Colocated.starting`). It releases what the others have released,
and gets its weights with the next update, or immediately if no other engine has a request (`Colocated.reloading`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

from furlong.core.device_memory import MemoryTransfer
from furlong.core.metric import Metrics, maximum, merge, total
from furlong.errors import EngineError, SyncError
from furlong.interfaces import DeviceSharing, EngineMemory, Trainer

logger = logging.getLogger(__name__)

T = TypeVar("T")
Use = Literal["training", "updating", "generating", "starting"]

WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"  # SGLang's tags
RESIDENT: dict[Use, tuple[str, ...]] = {
    "training": (),
    "updating": (WEIGHTS,),
    "generating": (WEIGHTS, CACHE, GRAPHS),
}
POLL_S = 0.1  # between two checks whether an engine may start


class EnginesMemory(EngineMemory, Protocol):
    """The memory of all engines of a run."""

    @property
    def is_awaited(self) -> bool:
        """Whether a weight update waits for an engine, because none is left."""
        ...

    def hold_requests(self) -> AbstractContextManager[None]:
        """Make new requests wait. Raises SyncError if an engine has a request."""
        ...


class Colocated(DeviceSharing):
    """Trainer and engines on the same devices.

    Several rollouts may generate at a time; training and weight updates wait for them and for each other. Memory moves
    when the device is requested, not when it is released, so that a save after a weight update costs nothing.

    Args:
        trainer: Offloaded while the engines generate, if `offload_train`.
        engine: Released while the trainer trains, if `offload_rollout`.

    Metrics of each step: `perf/sleep_time`, `perf/wake_up_time`, `perf/offload_rollout_time` and
    `perf/onload_rollout_time` in seconds; `memory/trainer_moved_gib`, what the trainer moved in one direction, over
    all ranks (0 on CPUs). As fractions of the device: `memory/engine_kept_frac`, memory in use besides the trainer's
    after the engines released theirs; `memory/trainer_peak_frac`, the peak of the trainer's tensors;
    `memory/trainer_kept_frac`, what the trainer still has on the device when offloaded.
    """

    is_colocated = True

    def __init__(
        self, trainer: Trainer, engine: EnginesMemory, *, offload_train: bool = True, offload_rollout: bool = True
    ) -> None:
        self._trainer, self._engine = trainer, engine
        self._offload_train, self._offload_rollout = offload_train, offload_rollout
        self._resident = set(RESIDENT["generating"])
        self._is_awake = True
        self._has_weights = False  # whether the engine has the trainer's weights
        self._changed = asyncio.Condition()
        self._using: Use | None = None
        self._num_using = 0
        self._metrics: Metrics = {}

    async def make_room(self) -> None:
        """Offload the trainer before engines start on its devices."""
        await self._change_trainer(is_awake=False)
        await self._empty_cache()

    async def release_engines(self) -> None:
        """Release the memory of engines that have started, before the trainer is built on their devices."""
        if self._offload_rollout:
            await self._engine.release_memory(sorted(self._resident))
            self._resident.clear()

    def training(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Reserve the device for training."""
        return self._reserved("training")

    @contextlib.asynccontextmanager
    async def updating_weights(self) -> AsyncGenerator[None]:
        """Reserve the device for reading the trainer's weights. Afterwards the engine counts as having them."""
        async with self._reserved("updating"):
            yield
            self._has_weights = True

    def generating(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Reserve the device for generation. Raises EngineError if weights were released and not updated since."""
        return self._reserved("generating")

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncGenerator[Callable[[EngineMemory], Awaitable[None]]]:
        """Reserve the device while an engine starts on it: the trainer is offloaded, and others may generate.

        Yields a function that makes the new engine release what the others have released, after which it may be used. A
        weight update that waits for an engine is suspended meanwhile, since nothing reads the trainer's weights yet.
        """
        while True:
            async with self._changed:
                if self._using == "updating" and self._num_using and self._engine.is_awaited:
                    await self._change_trainer(is_awake=False)
                    await self._empty_cache()
                    try:
                        yield self._release_and_onload
                    finally:
                        await self._change_trainer(is_awake=True)
                    return
                if not self._num_using or self._using in ("generating", "starting"):
                    await self._change_trainer(is_awake=False)
                    await self._empty_cache()
                    self._using = self._using if self._num_using else "starting"
                    self._num_using += 1
                    break
            await asyncio.sleep(POLL_S)
        try:
            yield self._release_memory_of
        finally:
            await self._release()

    @contextlib.asynccontextmanager
    async def reloading(self) -> AsyncGenerator[None]:
        """Reserve the device to load the trainer's weights into one engine during generation.

        Raises SyncError if other engines have requests, or if the trainer has trained since the last update; the next
        one will follow.
        """
        async with self._changed:
            if not self._has_weights or (self._num_using and self._using != "generating"):
                raise SyncError("the device is in use; the next weight update will follow")
            with self._engine.hold_requests():
                before = sorted(self._resident - {WEIGHTS}) if self._offload_rollout else []
                was_awake = self._is_awake
                try:
                    await _uninterrupted(self._lend(before))
                    yield
                finally:
                    await _uninterrupted(self._take_back(before, is_awake=was_awake))

    async def _lend(self, tags: Sequence[str]) -> None:
        """Release these tags of the engines' memory and load the trainer back."""
        if tags:
            await self._engine.release_memory(tags)
        await self._change_trainer(is_awake=True)

    async def _take_back(self, tags: Sequence[str], *, is_awake: bool) -> None:
        await self._change_trainer(is_awake=is_awake)
        if tags:
            await self._resume(tags)

    async def _release_and_onload(self, engine: EngineMemory) -> None:
        await self._release_as_others(engine)
        await self._change_trainer(is_awake=True)

    async def _release_memory_of(self, engine: EngineMemory) -> None:
        async with self._changed:
            await self._release_as_others(engine)

    async def _release_as_others(self, engine: EngineMemory) -> None:
        if released := sorted(set(RESIDENT["generating"]) - self._resident):
            await engine.release_memory(released)

    def metrics(self) -> Metrics:
        """Return time and memory of the hand-overs since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    @contextlib.asynccontextmanager
    async def _reserved(self, use: Use) -> AsyncGenerator[None]:
        async with self._changed:
            await self._changed.wait_for(
                lambda: not self._num_using or (use == "generating" and self._using in ("generating", "starting"))
            )
            await self._change_to(use)
            self._using, self._num_using = use, self._num_using + 1
        try:
            yield
        finally:
            await self._release()

    async def _release(self) -> None:
        async with self._changed:
            self._num_using -= 1
            self._changed.notify_all()

    async def _change_to(self, use: Use) -> None:
        required = set(RESIDENT[use]) if self._offload_rollout else self._resident
        if use == "generating" and not self._has_weights:
            raise EngineError("the engine's weights were released and not updated since; update them first")
        if released := sorted(self._resident - required):
            await self._timed("perf/offload_rollout_time", self._engine.release_memory(released))
            self._resident -= set(released)
            self._has_weights = self._has_weights and WEIGHTS in self._resident
            if not self._resident:
                await self._measure("memory/engine_kept_frac", of_engine=True)
        await self._change_trainer(is_awake=use != "generating")
        if added := sorted(required - self._resident):
            await self._timed("perf/onload_rollout_time", self._resume(added))
            self._resident |= set(added)

    async def _change_trainer(self, *, is_awake: bool) -> None:
        if self._is_awake and not is_awake and self._offload_train:
            await self._offload()
        if is_awake and not self._is_awake:
            self._count(await self._timed("perf/wake_up_time", self._trainer.onload()))
            self._is_awake = True

    async def _resume(self, tags: Sequence[str]) -> None:
        await self._empty_cache()
        await self._engine.resume_memory(tags)

    async def _empty_cache(self) -> None:
        """Free the trainer's cached memory; when offloaded it has none."""
        if self._is_awake:
            await self._trainer.empty_cache()

    async def _offload(self) -> None:
        self._count(await self._timed("perf/sleep_time", self._trainer.offload()))
        self._is_awake = False
        await self._measure("memory/trainer_kept_frac", of_engine=False)

    def _count(self, moved: MemoryTransfer) -> None:
        self._metrics = merge([self._metrics, {"memory/trainer_moved_gib": maximum(moved.num_bytes / 2**30)}])

    async def _timed(self, name: str, change: Awaitable[T]) -> T:
        started = time.perf_counter()
        result = await change
        seconds = time.perf_counter() - started
        self._metrics = merge([self._metrics, {name: total(seconds)}])
        logger.info("%s: %.3f s", name, seconds)
        return result

    async def _measure(self, name: str, *, of_engine: bool) -> None:
        memory = await self._trainer.device_memory()
        if memory is None:
            return
        kept = memory.used - memory.reserved if of_engine else memory.reserved
        shares = {name: maximum(kept / memory.total), "memory/trainer_peak_frac": maximum(memory.peak / memory.total)}
        self._metrics = merge([self._metrics, shares])
        logger.info("%s: %d of %d bytes", name, kept, memory.total)


async def _uninterrupted(change: Coroutine[Any, Any, None]) -> None:
    """Await a memory change. If the caller is cancelled, the change is completed first."""
    task = asyncio.ensure_future(change)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
