"""The interface of weight transports, and the buckets that they send."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from furlong.config.sections import SyncFlags
from furlong.core.tracing import tracer
from furlong.core.weights import Bucket, EngineAddress, WeightSource
from furlong.weight_sync.daemon_threads import in_thread
from furlong.weight_sync.weight_record import WeightRecord
from furlong.weight_sync.weight_server import WeightServer

Connect = Callable[[Sequence[EngineAddress]], AbstractAsyncContextManager[Sequence[WeightServer]]]


@dataclass(frozen=True)
class TransportContext:
    """Arguments from which a transport is built.

    model_dir: the Hugging Face folder; run_dir: the run's own folder; on_gpu: whether trainer and engines are all on
    GPUs; rank, world_size: among the trainer ranks; verbose: whether to log each bucket.
    """

    flags: SyncFlags
    model_dir: Path
    run_dir: Path
    on_gpu: bool
    rank: int = 0
    world_size: int = 1
    verbose: bool = False


class Transport(ABC):
    """Sends weights from the trainer ranks to engine servers. One object per rank, for the whole run.

    name: for messages and events. every_rank: whether all ranks call `send`, or only rank 0.
    """

    name: str
    every_rank: bool = False

    @classmethod
    @abstractmethod
    def build(cls, context: TransportContext) -> Self:
        """Make the transport of one rank. Called on all ranks at once."""

    @abstractmethod
    async def send(
        self, source: WeightSource, servers: Sequence[WeightServer], version: int, sent: WeightRecord
    ) -> None:
        """Load the weights into these servers. `sent` is recorded while `source` is read.

        Raises SyncError naming the bucket and the servers that failed or timed out.
        """

    async def resend(self, servers: Sequence[WeightServer], version: int) -> bool:
        """Load `version` again from a stored copy, without the trainer. False if there is none (the default)."""
        del servers, version
        return False

    async def close(self, connect: Connect) -> None:
        """Release process groups, folders and buffers."""
        del connect


@contextlib.asynccontextmanager
async def buckets_of(source: WeightSource, max_bytes: int) -> AsyncGenerator[AsyncIterator[Bucket]]:
    """Read buckets of at most `max_bytes` in threads while earlier ones are sent. At most three exist at a time."""
    opened = source.buckets(max_bytes)
    ahead: list[asyncio.Future[Bucket | None]] = []
    is_left = False

    def read_one() -> Bucket | None:
        with tracer.span("read bucket"):
            return next(opened, None)

    async def read_after(before: asyncio.Future[Bucket | None]) -> Bucket | None:
        return None if await before is None or is_left else await in_thread(read_one)

    async def buckets() -> AsyncIterator[Bucket]:
        current = await in_thread(read_one)
        if current is not None:
            ahead.append(in_thread(read_one))
        while current is not None:
            ahead.append(asyncio.ensure_future(read_after(ahead[0])))
            yield current
            current = await ahead[0]
            del ahead[0]

    try:
        yield buckets()
    finally:  # never leave the source in the middle of a read
        is_left = True
        await asyncio.gather(*ahead, return_exceptions=True)


def log_bucket(logger: logging.Logger, version: int, bucket: Bucket, seconds: float) -> None:
    """Log size and time of one bucket (`--debug-weight-sync`)."""
    num_bytes = sum(tensor.nbytes for _, tensor in bucket.tensors)
    logger.info(
        "weight_sync version %d: bucket %d, %d tensors from %s, %d bytes, %.4f s, %.2f GB/s",
        version, bucket.index, len(bucket.tensors), bucket.tensors[0][0], num_bytes, seconds,
        num_bytes / max(seconds, 1e-9) / 1e9,
    )  # fmt: skip
