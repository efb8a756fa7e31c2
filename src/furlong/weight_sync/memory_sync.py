"""Weight sync within one process."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator

import torch
from torch import Tensor

from furlong.core.tracing import heartbeat
from furlong.core.weights import NamedTensor, SyncReport, WeightSource
from furlong.interfaces import Engine, Trainer, WeightSync
from furlong.quantization.scheme import QuantizationScheme
from furlong.transfer.device_checksum import LocalChecksums
from furlong.weight_sync.verification import compare_checksums

logger = logging.getLogger(__name__)


class MemorySync(WeightSync):
    """Copies weights from a trainer to an engine in the same process and compares the checksum of every tensor.

    Args:
        trainer: Provides the weights.
        engine: Receives them.
        as_stored: Returns a tensor in the precision and on the device in which the engine stores this name.
        engine_checksums: Reads all tensors of the engine back. If given, the first update is done twice, and what the
            engine had in between must equal what is sent the second time (`--check-weight-update-equal`).
        scheme: How the engine stores quantized weights; None if it has none.
        verbose: Whether to log every tensor.
    """

    def __init__(
        self,
        trainer: Trainer,
        engine: Engine,
        *,
        as_stored: Callable[[str, Tensor], Tensor],
        engine_checksums: Callable[[], Awaitable[dict[str, str]]] | None = None,
        scheme: QuantizationScheme | None = None,
        verbose: bool = False,
    ) -> None:
        self._trainer, self._engine = trainer, engine
        self._as_stored, self._verbose = as_stored, verbose
        self._engine_checksums, self._scheme = engine_checksums, scheme
        self._level = logging.INFO

    def _weights(self) -> WeightSource:
        source = self._trainer.weights()
        return source if self._scheme is None else self._scheme.quantized(source)

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
        expected = LocalChecksums()
        sent: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        num_bytes = 0
        verify_s = 0.0

        def recording() -> Iterator[NamedTensor]:
            nonlocal num_bytes, verify_s
            for name, tensor in source.open():
                before = time.perf_counter()
                expected.add(name, self._as_stored(name, tensor))
                verify_s += time.perf_counter() - before
                num_bytes += tensor.nbytes
                heartbeat.beat("tensor sent")
                sent.append((name, tuple(tensor.shape), tensor.dtype))
                yield name, tensor

        source = self._weights()
        logger.debug("weight_sync start: version %d", version)
        loaded = await self._engine.load_weights(WeightSource(recording), version)
        before = time.perf_counter()
        checksums = expected.digests()
        verify_s += time.perf_counter() - before
        if self._verbose:
            for name, shape, dtype in sent:
                logger.info("weight_sync version %d: %s %s %s %s", version, name, shape, dtype, checksums[name])
        compare_checksums(checksums, loaded, version=version, source=self._weights())
        seconds = time.perf_counter() - started
        logger.log(
            self._level,
            "weight_sync done: version %d, %d tensors, %d bytes, %.3f s, every checksum verified",
            version, len(checksums), num_bytes, seconds,
        )  # fmt: skip
        self._level = logging.DEBUG  # events.jsonl has every update
        return SyncReport(version, len(checksums), num_bytes, seconds, verify_s, checksums)
