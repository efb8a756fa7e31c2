"""Weight sync within one process: the engine copies the trainer's tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from furlong.core.heartbeat import heartbeat
from furlong.core.weights import NamedTensor, SyncReport, WeightSource
from furlong.interfaces import Engine, Trainer, WeightSync
from furlong.weight_sync.checksum_compare import check_arrived

logger = logging.getLogger(__name__)


class Expected(Protocol):
    """A record of what is sent to an engine."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it stays as it is until `digests`."""
        ...

    def digests(self) -> dict[str, str]:
        """The checksums that the engine will report."""
        ...


class MemorySync(WeightSync):
    """Implements `interfaces.WeightSync` for a trainer and an engine of one process.

    `expected()` makes a record of the trainer's tensors that knows the checksums which the engine reports once it has
    stored them in its own precision. With `held_checksums`, which reads back every tensor that the engine holds, the
    first publication is done twice and what the engine held in between has to be what the second one sends.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        *,
        expected: Callable[[], Expected],
        held_checksums: Callable[[], Awaitable[dict[str, str]]] | None = None,
        verbose: bool = False,
    ) -> None:
        self._trainer, self._engine = trainer, engine
        self._expected, self._verbose = expected, verbose
        self._held_checksums = held_checksums

    async def update_weights(self, version: int) -> SyncReport:
        """Load the trainer's weights into the engine and compare the checksum of every tensor."""
        report = await self._update(version)
        if self._held_checksums is not None:
            held, self._held_checksums = await self._held_checksums(), None
            again = await self._update(version)
            names = held.keys() & again.checksums.keys()
            check_arrived({n: again.checksums[n] for n in names}, {n: held[n] for n in names}, version=version)
            logger.info(
                "weight_sync check: published twice, the engine held the same %d tensors in between", len(names)
            )
        return report

    async def _update(self, version: int) -> SyncReport:
        started = time.perf_counter()
        expected = self._expected()
        shown: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        num_bytes = 0
        verify_s = 0.0

        def watched() -> Iterator[NamedTensor]:
            nonlocal num_bytes, verify_s
            for name, tensor in source.open():
                before = time.perf_counter()
                expected.add(name, tensor)
                verify_s += time.perf_counter() - before
                num_bytes += tensor.nbytes
                heartbeat.beat("published tensor")
                shown.append((name, tuple(tensor.shape), tensor.dtype))
                yield name, tensor

        source = self._trainer.weights()
        logger.debug("weight_sync start: version %d", version)
        loaded = await self._engine.load_weights(WeightSource(watched), version)
        before = time.perf_counter()
        sent = expected.digests()
        verify_s += time.perf_counter() - before
        if self._verbose:
            for name, shape, dtype in shown:
                logger.info("weight_sync version %d: %s %s %s %s", version, name, shape, dtype, sent[name])
        check_arrived(sent, loaded, version=version, source=self._trainer.weights())
        seconds = time.perf_counter() - started
        logger.info(
            "weight_sync done: version %d, %d tensors, %d bytes, %.3f s, every checksum verified",
            version, len(sent), num_bytes, seconds,
        )  # fmt: skip
        return SyncReport(version, len(sent), num_bytes, seconds, verify_s, sent)
