"""Trainers in the driver process: `LocalTrainer` over one backend, and `FrozenTrainer` for runs without training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from furlong.core.algorithms import Role
from furlong.core.batch import RolloutBatch
from furlong.core.device_memory import DeviceMemory, MemoryTransfer
from furlong.core.metric import Metrics
from furlong.core.weights import WeightSource
from furlong.errors import TrainerError
from furlong.files.atomic import PendingFiles
from furlong.interfaces import Trainer
from furlong.training.offload import device_memory, empty_cache
from furlong.training.worker import RoundWorker

T = TypeVar("T")


class LocalTrainer(Trainer):
    """Runs a `RoundWorker` in a dedicated thread, so that the event loop can generate during training.

    Everything that touches the model runs in that thread, one call at a time, except reading `weights()`: that runs in
    the caller's thread, between rounds.
    """

    def __init__(self, worker: RoundWorker) -> None:
        self.worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="furlong-trainer")

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def train(self, batch: RolloutBatch) -> Metrics:
        """Run all optimizer steps of one rollout.

        A cancelled call returns at once, but the round keeps running in its thread; `close` waits for it.
        """
        return await self._run(lambda: self.worker.train(batch))

    def weights(self) -> WeightSource:
        """Return the policy's current weights; tensors are views of live parameters."""
        return self.worker.weights()

    async def save(self, folder: Path) -> None:
        """Write the state of backend and worker into `folder`, which must exist."""
        await self._run(lambda: self.worker.save(folder))

    async def snapshot(self, folder: Path) -> PendingFiles:
        """Copy what `save` writes to host memory."""
        return await self._run(lambda: self.worker.snapshot(folder))

    async def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError if something is missing."""
        await self._run(lambda: self.worker.load(folder))

    async def save_hf(self, folder: Path, *, model: Role = "actor") -> None:
        """Write a folder that transformers loads."""
        await self._run(lambda: self.worker.awake.save_hf(folder, model=model))

    async def offload(self) -> MemoryTransfer:
        """Offload the model to the host. Raises TrainerError if the backend cannot."""
        return await self._run(self.worker.offload)

    async def onload(self) -> MemoryTransfer:
        """Reload the model to the device."""
        return await self._run(self.worker.onload)

    async def empty_cache(self) -> None:
        """Release device memory that no tensor uses."""
        await self._run(empty_cache)

    async def device_memory(self) -> DeviceMemory | None:
        """Return the memory use of the device; None on a CPU."""
        return await self._run(lambda: device_memory(self.worker.backend.device))

    async def close(self) -> None:
        """Wait for the round in progress and end the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)


class FrozenTrainer(Trainer):
    """A `Trainer` without a model (--debug-rollout-only): the engine serves the weights it was started with."""

    async def train(self, batch: RolloutBatch) -> Metrics:  # noqa: ARG002  the protocol's signature
        """Do nothing; returns no metrics."""
        return {}

    def weights(self) -> WeightSource:
        """Raise TrainerError: there are no weights."""
        raise TrainerError("--debug-rollout-only: this run has no trainer weights to push to engines")

    async def save(self, folder: Path) -> None:
        """Write nothing: there is no training state."""

    async def snapshot(self, folder: Path) -> PendingFiles:  # noqa: ARG002  the protocol's signature
        """Return no files: there is no training state."""
        return PendingFiles()

    async def load(self, folder: Path) -> None:
        """Read nothing: there is no training state."""

    async def save_hf(self, folder: Path, *, model: Role = "actor") -> None:  # noqa: ARG002  the protocol's signature
        """Raise TrainerError: there are no weights."""
        raise TrainerError(f"--debug-rollout-only has no trained weights to write to {folder}; drop --save-hf")

    async def close(self) -> None:
        """Do nothing."""
