"""The interface of weight transports, and what they share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.config.sections import SyncFlags
from furlong.core.tracing import tracer
from furlong.core.weights import Bucket, EngineAddress, WeightSource
from furlong.errors import EngineError, NoAnswerError, SyncError
from furlong.inference.sglang.server import SglangServer
from furlong.transfer.threads import in_thread
from furlong.weight_sync.weight_record import WeightRecord

Connect = Callable[[Sequence[EngineAddress]], AbstractAsyncContextManager[Sequence[SglangServer]]]


@dataclass(frozen=True)
class TransportContext:
    """Arguments from which a transport is built.

    model_dir: the Hugging Face folder; run_dir: the run's own folder; on_gpu: whether trainer and engines are all on
    GPUs; rank, world_size: among the trainer ranks; verbose: whether to log each bucket; after_write(folder, urls): the
    user's function for files that are complete, called before these engines read them.
    """

    flags: SyncFlags
    model_dir: Path
    run_dir: Path
    on_gpu: bool
    rank: int = 0
    world_size: int = 1
    verbose: bool = False
    after_write: Callable[[str, list[str]], object] | None = None


class Transport(ABC):
    """Sends weights from the trainer ranks to engine servers. One object per rank, for the whole run.

    name: for messages and events. every_rank: whether all ranks call `send`, or only rank 0.
    """

    name: str
    every_rank: bool = False

    def __init__(self, context: TransportContext) -> None:
        """Make the transport of one rank. Called on all ranks at once."""
        self.context, self.flags = context, context.flags

    @abstractmethod
    async def send(
        self, source: WeightSource, servers: Sequence[SglangServer], version: int, sent: WeightRecord
    ) -> None:
        """Load the weights into these servers. `sent` is recorded while `source` is read.

        Raises SyncError naming the bucket and the servers that failed or timed out.
        """

    def needs_shapes(self, servers: Sequence[SglangServer]) -> bool:
        """Whether these servers read the stored shapes of quantized weights, which are most of the small tensors."""
        del servers
        return True

    async def resend(self, servers: Sequence[SglangServer], version: int) -> bool:
        """Load `version` again from a stored copy, without the trainer. False if there is none (the default)."""
        del servers, version
        return False

    async def close(self, connect: Connect) -> None:
        """Release process groups, folders and buffers."""
        del connect

    async def call_servers(
        self, version: int, action: str, calls: Mapping[str, Awaitable[None]], *, bucket: int | None = None
    ) -> None:
        """Await one call per server, by URL. `action` completes "engines failed to".

        Raises SyncError naming every server that failed or timed out, with its own message.
        """
        timeout_s = self.flags.update_weight_timeout
        tasks = {url: asyncio.ensure_future(call) for url, call in calls.items()}
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=timeout_s)
            silent = [url for url, task in tasks.items() if not task.done()]
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        failed, broken = [f"{url}: did not answer within {timeout_s:g} s" for url in silent], dict[str, str]()
        for url, task in tasks.items():
            if url in silent or (error := task.exception()) is None:
                continue
            if not isinstance(error, EngineError):
                raise error
            failed.append(f"{url}: {error}")
            if isinstance(error, NoAnswerError):
                broken[url] = str(error)
        if failed:
            late = late_fields(version, timeout_s, silent, bucket=bucket, transport=self.name) if silent else None
            raise SyncError(
                f"weight_sync version {version}: {len(failed)} of {len(calls)} engines failed to {action}. "
                + "; ".join(failed),
                late=late,
                broken=broken,
            )

    def log_bucket(self, logger: logging.Logger, version: int, bucket: Bucket, seconds: float) -> None:
        """Log size and time of one bucket, with `--debug-weight-sync`."""
        if not self.context.verbose:
            return
        num_bytes = sum(tensor.nbytes for _, tensor in bucket.tensors)
        logger.info(
            "weight_sync version %d: bucket %d, %d tensors from %s, %d bytes, %.4f s, %.2f GB/s",
            version, bucket.index, len(bucket.tensors), bucket.tensors[0][0], num_bytes, seconds,
            num_bytes / max(seconds, 1e-9) / 1e9,
        )  # fmt: skip


def late_fields(
    version: int, seconds: float, missing: Sequence[str], *, bucket: int | None = None, transport: str
) -> dict[str, Any]:
    """Make `SyncError.late` for servers that timed out: the fields of the event `weight_update_timeout`."""
    return {"version": version, "seconds": seconds, "bucket": bucket, "transport": transport, "missing": list(missing)}


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
