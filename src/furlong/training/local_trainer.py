"""The trainer in this process: the driver's `interfaces.Trainer` over one backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics
from furlong.core.pending_files import PendingFiles
from furlong.core.weights import WeightSource
from furlong.interfaces import DeviceMemory, MemoryTransfer, Trainer
from furlong.training.device_memory import device_memory, empty_cache
from furlong.training.worker import RoundWorker

T = TypeVar("T")


class LocalTrainer(Trainer):
    """Runs a `RoundWorker` in one thread of its own, so that the event loop goes on: generation overlaps with training.

    Everything that touches the model runs in that thread, one after the other. `weights()` is read in the caller's
    thread; call it between rounds.
    """

    def __init__(self, worker: RoundWorker) -> None:
        self.worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="furlong-trainer")

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def train(self, batch: RolloutBatch) -> Metrics:
        """Run all optimizer steps of one rollout.

        A cancelled call returns at once while the round goes on in its thread; `close` waits for its end.
        """
        return await self._run(lambda: self.worker.train(batch))

    def weights(self) -> WeightSource:
        """The policy's current weights; tensors are views of live parameters."""
        return self.worker.weights()

    async def save(self, folder: Path) -> None:
        """Write the backend's state and the worker's into `folder`, which exists."""
        await self._run(lambda: self.worker.save(folder))

    async def snapshot(self, folder: Path) -> PendingFiles:
        """Copy what `save` writes to host memory."""
        return await self._run(lambda: self.worker.snapshot(folder))

    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError if something is missing."""
        await self._run(lambda: self.worker.load(folder))

    async def save_hf(self, folder: Path) -> None:
        """Write a folder that transformers loads."""
        await self._run(lambda: self.worker.awake.save_hf(folder))

    async def offload(self) -> MemoryTransfer:
        """Leave the device. Raises TrainerError if the backend cannot."""
        return await self._run(self.worker.offload)

    async def onload(self) -> MemoryTransfer:
        """Come back to the device."""
        return await self._run(self.worker.onload)

    async def empty_cache(self) -> None:
        """Give back memory of the device that no tensor has."""
        await self._run(empty_cache)

    async def device_memory(self) -> DeviceMemory | None:
        """Memory of the device; None on a CPU."""
        return await self._run(lambda: device_memory(self.worker.backend.device))

    async def close(self) -> None:
        """Wait for the round in progress and end the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)
