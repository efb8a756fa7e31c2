"""Weight sync within one process, and without engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from furlong.core.tracing import heartbeat
from furlong.core.weights import NamedTensor, SyncReport, WeightSource
from furlong.interfaces import Engine, Trainer, WeightSync
from furlong.weight_sync.verification import compare_checksums

logger = logging.getLogger(__name__)


class ChecksumRecord(Protocol):
    """Computes the checksums that an engine should report from the tensors sent to it."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor, which must not change until `digests`."""
        ...

    def digests(self) -> dict[str, str]:
        """Return the checksum of each tensor as the engine will report it."""
        ...


class MemorySync(WeightSync):
    """Copies weights from a trainer to an engine in the same process and compares the checksum of every tensor.

    Args:
        trainer: Provides the weights.
        engine: Receives them.
        expected: Makes a record of the checksums that the engine reports after storing tensors in its own precision.
        engine_checksums: Reads all tensors of the engine back. If given, the first update is done twice, and what the
            engine had in between must equal what is sent the second time (`--check-weight-update-equal`).
        verbose: Whether to log every tensor.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        *,
        expected: Callable[[], ChecksumRecord],
        engine_checksums: Callable[[], Awaitable[dict[str, str]]] | None = None,
        verbose: bool = False,
    ) -> None:
        self._trainer, self._engine = trainer, engine
        self._expected, self._verbose = expected, verbose
        self._engine_checksums = engine_checksums

    async def update_weights(self, version: int) -> SyncReport:
        """Load the trainer's weights into the engine. Raises SyncError (CKPT03) if a checksum differs."""
        report = await self._update(version)
        if self._engine_checksums is not None:
            loaded, self._engine_checksums = await self._engine_checksums(), None
            again = await self._update(version)
            names = loaded.keys() & again.checksums.keys()
            compare_checksums({n: again.checksums[n] for n in names}, {n: loaded[n] for n in names}, version=version)
            logger.info("weight_sync check: updated twice, %d tensors were the same in the engine", len(names))
        return report

    async def _update(self, version: int) -> SyncReport:
        started = time.perf_counter()
        expected = self._expected()
        sent: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        num_bytes = 0
        verify_s = 0.0

        def recording() -> Iterator[NamedTensor]:
            nonlocal num_bytes, verify_s
            for name, tensor in source.open():
                before = time.perf_counter()
                expected.add(name, tensor)
                verify_s += time.perf_counter() - before
                num_bytes += tensor.nbytes
                heartbeat.beat("tensor sent")
                sent.append((name, tuple(tensor.shape), tensor.dtype))
                yield name, tensor

        source = self._trainer.weights()
        logger.debug("weight_sync start: version %d", version)
        loaded = await self._engine.load_weights(WeightSource(recording), version)
        before = time.perf_counter()
        checksums = expected.digests()
        verify_s += time.perf_counter() - before
        if self._verbose:
            for name, shape, dtype in sent:
                logger.info("weight_sync version %d: %s %s %s %s", version, name, shape, dtype, checksums[name])
        compare_checksums(checksums, loaded, version=version, source=self._trainer.weights())
        seconds = time.perf_counter() - started
        logger.info(
            "weight_sync done: version %d, %d tensors, %d bytes, %.3f s, every checksum verified",
            version, len(checksums), num_bytes, seconds,
        )  # fmt: skip
        return SyncReport(version, len(checksums), num_bytes, seconds, verify_s, checksums)


class NoWeightSync(WeightSync):
    """For runs without engines: SFT without evaluation, training from a dump."""

    async def update_weights(self, version: int) -> SyncReport:
        """Send nothing."""
        return SyncReport(version, 0, 0, 0.0)
