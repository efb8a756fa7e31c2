"""Weight transport by shared memory between a trainer rank and the engine process on the same GPU.

Each bucket is packed into one of two buffers and described over HTTP. While the engine loads from one buffer, the next
bucket is packed into the other. For SGLang a buffer is CUDA memory, described by an IPC handle; for `furlong serve` it
is POSIX shared memory, described by JSON.

SGLang expects the description as a pickle. It is written here with the standard library's ForkingPickler, from plain
values and torch's own description of a CUDA tensor; furlong never reads one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from furlong.core.tracing import tracer
from furlong.core.weights import Bucket, NamedTensor, WeightSource
from furlong.errors import EngineError, SyncError
from furlong.inference.sglang.server import SglangServer
from furlong.sglang_layout.quantized_loading import LOADER, check_header_of, header_of
from furlong.transfer.cuda_allocator import cuda_allocator
from furlong.transfer.shared_memory import SharedBuffer, offsets
from furlong.transfer.threads import in_thread
from furlong.weight_sync.transports.transport import Transport, TransportContext, buckets_of
from furlong.weight_sync.weight_record import WeightRecord

logger = logging.getLogger(__name__)

EXCHANGE_TIMEOUT_S = 600.0
PIECE_BYTES = 64 << 20  # CUDA buffers are multiples of this, so that a slightly larger next bucket fits, too
DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor


class RankMessages:
    """Exchanges short messages between the trainer ranks over gloo. With several ranks, made on all of them at once."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._group = None
        if world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S))

    def exchange(self, message: bytes) -> list[bytes]:
        """Return every rank's message, in rank order, once all ranks have called."""
        if self.world_size == 1:
            return [message]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(message)]), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        if message:
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        gathered: list[Tensor] = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, group=self._group)
        return [bytes(each[: int(size)].numpy()) for each, size in zip(gathered, sizes, strict=True)]


class IpcTransport(Transport):
    """Shares memory with engines on the trainer's own GPUs or machine.

    Trainer rank r shares its GPU with process r - `first_rank` of a server. `peers` exchanges messages between the
    ranks, by default over gloo.
    """

    name = "ipc"
    every_rank = True

    def __init__(self, context: TransportContext, peers: RankMessages | None = None) -> None:
        super().__init__(context)
        self._peers = peers or RankMessages(rank=context.rank, world_size=context.world_size)

    async def send(
        self, source: WeightSource, servers: Sequence[SglangServer], version: int, sent: WeightRecord
    ) -> None:
        """Share bucket by bucket. Raises SyncError, on every rank, naming the bucket and the servers that failed."""
        del sent
        led, is_shared = self._led_servers(servers, version)
        packer = _SharedPacker() if is_shared else _CudaPacker(servers)
        replies: list[asyncio.Task[None] | None] = [None, None]
        try:
            async with buckets_of(source, self.flags.update_weight_buffer_size) as buckets:
                async for bucket in buckets:
                    slot = bucket.index % 2
                    reply, replies[slot] = replies[slot], None
                    await self._agree(reply)
                    messages = await self._pack(packer, slot, bucket, version)
                    replies[slot] = asyncio.create_task(self._load(led, messages, bucket, version, is_shared=is_shared))
            for reply in replies:
                await self._agree(reply)
        finally:
            pending = [reply for reply in replies if reply is not None]
            for reply in pending:
                reply.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            packer.close()

    def needs_shapes(self, servers: Sequence[SglangServer]) -> bool:
        """Return False if all have furlong's loader, which knows them."""
        return not all(server.info.has_quantized_loader for server in servers)

    def _led_servers(self, servers: Sequence[SglangServer], version: int) -> tuple[list[SglangServer], bool]:
        """Return the servers that this rank sends requests to, and whether buffers are POSIX shared memory."""
        kinds = {server.info.is_furlong for server in servers}
        if len(kinds) > 1:
            raise SyncError(f"weight_sync version {version}: SGLang and furlong servers cannot be mixed over ipc")
        led: list[SglangServer] = []
        for server in servers:
            try:
                end = server.first_rank + server.num_ranks
            except EngineError as error:
                raise SyncError(f"weight_sync version {version}: {error}") from error
            if end > self._peers.world_size:
                raise SyncError(
                    f"weight_sync version {version}: {server.url} has processes on the GPUs of trainer ranks "
                    f"{server.first_rank} .. {end - 1}, but there are {self._peers.world_size} ranks; start engines on "
                    "the trainer's GPUs, or use --update-weight-transport nccl"
                )
            if server.first_rank == self._peers.rank:
                led.append(server)
        return led, True in kinds

    async def _pack(self, packer: _SharedPacker | _CudaPacker, slot: int, bucket: Bucket, version: int) -> list[bytes]:
        """Fill a buffer; return the descriptions of all ranks' buffers. Raises SyncError on all ranks if one fails."""
        failure: Exception | None = None
        message = b""

        def pack() -> bytes:
            with tracer.span("pack bucket", index=bucket.index):
                return packer.pack(slot, bucket)

        try:
            message = await in_thread(pack)
        except (SyncError, RuntimeError) as error:  # out of memory: the other ranks must not wait for this one
            failure = error
        messages = await self._exchange(message)
        if failure is not None:
            raise SyncError(f"weight_sync version {version}: bucket {bucket.index} by ipc: {failure}") from failure
        if bad := [rank for rank, each in enumerate(messages) if not each]:
            raise SyncError(f"weight_sync version {version}: bucket {bucket.index} failed on trainer ranks {bad}")
        return messages

    async def _agree(self, reply: asyncio.Task[None] | None) -> None:
        """Wait for the engines that read this buffer, on all ranks. Raises the same error on all of them."""
        problem = b""
        if reply is not None:
            try:
                await reply
            except SyncError as error:
                problem = orjson.dumps([str(error), error.late, error.broken])
        problems = [orjson.loads(each) for each in await self._exchange(problem) if each]
        if problems:
            late = next((late for _, late, _ in problems if late is not None), None)
            broken = {url: text for _, _, by_url in problems for url, text in by_url.items()}
            raise SyncError("; ".join(dict.fromkeys(text for text, _, _ in problems)), late=late, broken=broken)

    async def _exchange(self, message: bytes) -> list[bytes]:
        return [message] if self._peers.world_size == 1 else await in_thread(lambda: self._peers.exchange(message))

    async def _load(
        self, led: Sequence[SglangServer], messages: list[bytes], bucket: Bucket, version: int, *, is_shared: bool
    ) -> None:
        started = time.perf_counter()
        calls: dict[str, Any] = {}
        for server in led:
            parts = messages[server.first_rank : server.first_rank + server.num_ranks]
            if is_shared:
                shared = orjson.loads(parts[0])
                calls[server.url] = server.load_shared(
                    shared["name"], shared["tensors"], version, is_last=bucket.is_last
                )
            else:
                calls[server.url] = server.load_handles(parts, version, is_last=bucket.is_last)
        with tracer.flight("engines load bucket", index=bucket.index):
            await self.call_servers(version, f"load bucket {bucket.index} by ipc", calls, bucket=bucket.index)
        if led:
            self.log_bucket(logger, version, bucket, time.perf_counter() - started)


class _SharedPacker:
    """Two POSIX shared memory buffers, which grow with the buckets."""

    def __init__(self) -> None:
        self._buffers: list[SharedBuffer | None] = [None, None]

    def pack(self, slot: int, bucket: Bucket) -> bytes:
        """Fill a buffer and return its description."""
        _, size = offsets(bucket.tensors)
        buffer = self._buffers[slot]
        if buffer is None or buffer.num_bytes < size:
            if buffer is not None:
                buffer.close()
            buffer = self._buffers[slot] = SharedBuffer(size)
        return orjson.dumps({"name": buffer.name, "tensors": buffer.fill(bucket.tensors)})

    def close(self) -> None:
        for buffer in self._buffers:
            if buffer is not None:
                buffer.close()


class _CudaPacker:
    """Two buffers of CUDA memory, freed after the update to leave room for the engine's cache."""

    def __init__(self, servers: Sequence[SglangServer]) -> None:
        self._buffers: list[Tensor | None] = [None, None]
        self._is_quantized = any(server.info.has_quantized_loader for server in servers)
        if self._is_quantized and not all(server.info.has_quantized_loader for server in servers):
            raise SyncError(
                f"of the engines, only some have furlong's loader of quantized weights; start all of them with "
                f"--custom-weight-loader {LOADER}"
            )

    def pack(self, slot: int, bucket: Bucket) -> bytes:
        tensors = bucket.tensors
        if self._is_quantized:
            tensors = in_order_of_parts(tensors)
        starts, size = offsets(tensors)
        buffer = self._buffers[slot]
        if buffer is None or buffer.numel() < size:
            self._buffers[slot] = None
            with tracer.span("allocate buffer", num_bytes=size), cuda_allocator.fixed_segments():
                rounded = -(-size // PIECE_BYTES) * PIECE_BYTES
                buffer = self._buffers[slot] = torch.empty(rounded, dtype=torch.uint8, device="cuda")
        fill(buffer, [tensor for _, tensor in tensors], starts)
        torch.cuda.current_stream().synchronize()
        with tracer.span("describe buffer"):
            uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
            message = quantized_message if self._is_quantized else handle_message
            return message(reduce_tensor(buffer), uuid, replace(bucket, tensors=tensors), starts)

    def close(self) -> None:
        if self._buffers != [None, None]:
            self._buffers = [None, None]
            torch.cuda.ipc_collect()


def in_order_of_parts(tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Return equal parts of quantized weights one after another.

    Weights are quantized together, so equal parts of them follow each other in memory.
    """
    return sorted(tensors, key=lambda pair: pair[0].rpartition(".")[2])


def fill(buffer: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> None:
    """Copy tensors into a buffer of bytes, those that follow each other in both by one operation."""
    runs: list[tuple[Tensor, int, int]] = []  # first tensor, its start, and the end of the last tensor
    dtype, end, shift, memory_end = None, -1, 0, -1  # shift: from places in the buffer to addresses of the last run
    for tensor, start in zip(tensors, starts, strict=True):
        address, next_end = tensor.data_ptr(), start + tensor.nbytes
        is_adjacent = start == end and address == start + shift and next_end + shift <= memory_end
        if is_adjacent and tensor.dtype == dtype and tensor.is_contiguous():
            runs[-1] = (*runs[-1][:2], next_end)
        else:
            runs.append((tensor, start, next_end))
            dtype, shift = tensor.dtype, address - start
            memory = tensor.untyped_storage()
            memory_end = memory.data_ptr() + memory.nbytes() if tensor.is_contiguous() else -1
        end = next_end
    with torch.no_grad():
        for first, start, end in runs:
            place = buffer[start:end].view(first.dtype)
            count = place.numel()
            source = first if count == first.numel() else first.as_strided((count,), (1,))
            place.view(source.shape).copy_(source)


class _Rebuilt:
    """Pickles as a call that makes a tensor: for CUDA memory torch's, with the GPU named by UUID as SGLang expects."""

    def __init__(self, rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._rebuild, self._arguments = rebuild, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._rebuild, self._arguments


def handle_message(reduced: tuple[Any, tuple[Any, ...]], uuid: str, bucket: Bucket, starts: Sequence[int]) -> bytes:
    """Return the message for one SGLang process (`load_format` flattened_bucket)."""
    layout: list[SimpleNamespace] = []  # SGLang reads attributes of any class
    for (name, tensor), start in zip(bucket.tensors, starts, strict=True):
        entry = {"start_idx": start, "end_idx": start + tensor.nbytes, "numel": tensor.nbytes}
        layout.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **entry))
    return _pickled({"flattened_tensor": _on_gpu(reduced, uuid), "metadata": layout})


def quantized_message(reduced: tuple[Any, tuple[Any, ...]], uuid: str, bucket: Bucket, starts: Sequence[int]) -> bytes:
    """Return the message for one SGLang process with furlong's loader: a header, with the buffer as its tensor."""
    header = header_of(bucket.tensors, starts, is_first=bucket.index == 0, is_last=bucket.is_last)
    return _pickled([(header, _on_gpu(reduced, uuid))])


def check_message(checksums: Mapping[str, Sequence[str]]) -> bytes:
    """Return the message with which one SGLang process with furlong's loader compares its unquantized tensors."""
    return _pickled([(check_header_of(checksums), _Rebuilt(torch.zeros, (0,)))])


def _on_gpu(reduced: tuple[Any, tuple[Any, ...]], uuid: str) -> _Rebuilt:
    """Name the GPU by UUID, since device numbers differ between processes that see different GPUs."""
    rebuild, arguments = reduced
    return _Rebuilt(rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :]))


def _pickled(message: object) -> bytes:
    return bytes(ForkingPickler.dumps(message))
