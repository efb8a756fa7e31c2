"""Weight transport by broadcast: trainer and engines form one process group and tensors are sent in buckets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  documented

from furlong.core.addresses import host_and_port, is_loopback, socket_for
from furlong.core.tracing import tracer
from furlong.core.weights import Bucket, EngineAddress, NamedTensor, WeightSource
from furlong.errors import EngineError, EngineTimeoutError, NoAnswerError, SyncError
from furlong.inference.sglang.server import SglangServer
from furlong.transfer.process_group import join_group, wire_view
from furlong.transfer.threads import in_thread
from furlong.weight_sync.transports.transport import Connect, Transport, TransportContext, buckets_of
from furlong.weight_sync.weight_record import WeightRecord

logger = logging.getLogger(__name__)

MARGIN_S = 60.0  # NCCL's watchdog, which kills the process, must fire this much later than our own limit
WAIT_FOR_MESSAGE_S = 2.0  # until engines say why sending has failed
DROP_S = 5.0  # to wait for a group to be destroyed

Backend = Literal["gloo", "nccl"]


class BroadcastTransport(Transport):
    """Broadcasts over a torch.distributed group of trainer rank 0 and the engines' processes.

    The backend is NCCL if trainer and engines are all on GPUs, else gloo. The group is created at the first update, and
    again whenever the engines in use have changed.
    """

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._backend: Backend = "nccl" if context.on_gpu else "gloo"
        self.name = f"{self._backend} broadcast"
        self._device = torch.device("cuda" if context.on_gpu else "cpu")
        self._group: Any = None
        self._group_name = ""
        self._members: tuple[EngineAddress, ...] = ()
        which = "are all" if context.on_gpu else "are not all"
        logger.info("weights are sent by %s: trainer and engines %s on GPUs", self._backend, which)

    async def send(
        self, source: WeightSource, servers: Sequence[SglangServer], version: int, sent: WeightRecord
    ) -> None:
        """Broadcast bucket by bucket. Raises SyncError naming the bucket and the servers that failed."""
        del sent
        if [server.url for server in servers] != [member.url for member in self._members]:
            await self._regroup(servers, version)
        async with buckets_of(source, self.flags.update_weight_buffer_size) as buckets:
            async for bucket in buckets:
                started = time.perf_counter()
                with tracer.flight("engines load bucket", index=bucket.index):
                    await self._send(bucket, servers, version)
                self.log_bucket(logger, version, bucket, time.perf_counter() - started)

    async def close(self, connect: Connect) -> None:
        """Destroy the group; engines that do not answer are ignored."""
        if self._members:
            async with connect(self._members) as servers:
                await self._leave(servers)

    async def _send(self, bucket: Bucket, servers: Sequence[SglangServer], version: int) -> None:
        tensors = [(name, tensor.detach().to(self._device).contiguous()) for name, tensor in bucket.tensors]
        calls = {s.url: s.receive(self._group_name, tensors, version, is_last=bucket.is_last) for s in servers}
        action = f"receive bucket {bucket.index} of the {self.name}"
        received = asyncio.ensure_future(self.call_servers(version, action, calls, bucket=bucket.index))
        broadcast = in_thread(partial(self._broadcast, tensors, self._group))
        try:
            done, _ = await asyncio.wait({received, broadcast}, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in (received, broadcast) if task in done and task.exception() is not None]
            if failed:
                await self._drop_group()
                if received not in done:  # an engine's own message says more than the broken connection
                    await asyncio.wait({received}, timeout=WAIT_FOR_MESSAGE_S)
                if received.done() and not received.cancelled() and (error := received.exception()) is not None:
                    raise await self._excusing_waiters(error, servers, self._group_name)
                raise SyncError(
                    f"weight_sync version {version}: bucket {bucket.index} of the {self.name} failed: "
                    f"{broadcast.exception()}"
                )
        finally:
            for task in (received, broadcast):
                task.cancel()
            await asyncio.gather(received, broadcast, return_exceptions=True)

    def _broadcast(self, tensors: Sequence[NamedTensor], group: Any) -> None:
        with tracer.span("broadcast bucket", num_tensors=len(tensors)):
            works = [dist.broadcast(wire_view(tensor), src=0, group=group, async_op=True) for _, tensor in tensors]
            for work in works:
                if work is not None:
                    work.wait()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # checksums run on another stream

    async def _regroup(self, servers: Sequence[SglangServer], version: int) -> None:
        if self._group is not None:
            members = {member.url for member in self._members}
            await self._leave([server for server in servers if server.url in members])
        try:
            sizes = [server.num_ranks for server in servers]
        except EngineError as error:
            raise SyncError(f"weight_sync version {version}: {error}") from error
        world, name = 1 + sum(sizes), f"furlong-{uuid.uuid4().hex[:12]}"
        address = _own_address([server.url for server in servers])
        listener, any_port = socket_for(address)
        listener.bind(any_port)
        listener.listen()
        port = int(listener.getsockname()[1])
        where = host_and_port(address, port)
        joins: dict[str, Awaitable[None]] = {}
        rank = 1
        for server, size in zip(servers, sizes, strict=True):
            joins[server.url] = server.join_group(
                name=name, address=address, port=port, rank=rank, world_size=world, backend=self._backend
            )
            rank += size
        limit = timedelta(seconds=self.flags.update_weight_timeout + (MARGIN_S if self._backend == "nccl" else 0.0))
        created = in_thread(lambda: _create_group(listener, world, name, self._backend, limit))
        joined = asyncio.ensure_future(self.call_servers(version, "join the process group", joins))
        try:
            await asyncio.wait({created, joined}, return_when=asyncio.FIRST_EXCEPTION)
            if not joined.done():  # an engine's own message says more than the missing connection
                await asyncio.wait({joined}, timeout=WAIT_FOR_MESSAGE_S)
            if joined.done() and not joined.cancelled() and (failure := joined.exception()) is not None:
                created.add_done_callback(_drop_late)
                raise await self._excusing_waiters(failure, servers, name)
            try:
                self._group = await created
            except (RuntimeError, OSError) as error:
                raise SyncError(
                    f"weight_sync version {version}: creating the process group of {world} ranks at {where} "
                    f"failed: {error}; the engines must be able to connect to this address"
                ) from error
            await joined
        finally:
            joined.cancel()
            await asyncio.gather(joined, return_exceptions=True)
        self._group_name, self._members = name, tuple(server.address for server in servers)
        logger.info(
            "weight_sync group: %d ranks by %s at %s; the engines must reach this address", world, self._backend,
            where,
        )  # fmt: skip

    async def _excusing_waiters(
        self, error: BaseException, servers: Sequence[SglangServer], group: str
    ) -> BaseException:
        """Return the error of calls without the servers that did not answer only because they waited for another one.

        In a broadcast, servers pass tensors on to each other, so one that hangs holds up others. Those still answer a
        request to leave the group, which also ends their wait. If all of them do, nothing shows which one is at fault,
        and the error is unchanged.
        """
        if not isinstance(error, SyncError) or not error.late:
            return error
        missing = [server for server in servers if server.url in error.late["missing"]]
        waited = await asyncio.gather(*(self._answers_leave(server, group) for server in missing))
        at_fault = [server.url for server, answers in zip(missing, waited, strict=True) if not answers]
        if len(at_fault) == len(missing) or not (at_fault or error.broken):
            return error
        excused = [server.url for server in missing if server.url not in at_fault]
        return SyncError(
            f"{error}. These waited for another engine only: {', '.join(excused)}",
            late={**error.late, "missing": at_fault} if at_fault else None,
            broken=error.broken,
        )

    @staticmethod
    async def _answers_leave(server: SglangServer, group: str) -> bool:
        """Ask a server to leave a group, and return whether it answers; it may refuse, or have left already."""
        try:
            await server.leave_group(group)
        except (EngineTimeoutError, NoAnswerError):
            return False
        except EngineError:
            return True
        return True

    async def _leave(self, servers: Sequence[SglangServer]) -> None:
        for server in servers:
            try:
                await server.leave_group(self._group_name)
            except EngineError as error:
                logger.warning("%s did not leave the process group: %s", server.url, error)
        await self._drop_group()

    async def _drop_group(self) -> None:
        only_reference, self._group, self._members = [self._group], None, ()
        if only_reference != [None]:
            await asyncio.wait({in_thread(partial(_destroy, only_reference))}, timeout=DROP_S)


def _drop_late(created: asyncio.Future[Any]) -> None:
    """Destroy a group whose creation was given up, if it succeeds after all; its error has been reported."""
    if not created.cancelled() and created.exception() is None:
        in_thread(partial(_destroy, [created.result()]))


def _destroy(only_reference: list[Any]) -> None:
    """Destroy the group in the list in this thread, since gloo blocks there until its operations have ended."""
    group = only_reference.pop()
    with contextlib.suppress(RuntimeError):  # a peer is gone
        group.abort()
    dist.destroy_process_group(group)


def _create_group(
    listener: socket.socket, world: int, name: str, backend: Backend, timeout: timedelta
) -> dist.ProcessGroup:
    """Create a group as rank 0, which the engines join at the listener's address.

    Operations of gloo fail after `timeout`, so that the group of a server that was given up can be destroyed.
    """
    host, port = listener.getsockname()[:2]
    store = TCPStore(
        host,
        port,
        world,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # to listen at this address only
    )
    return join_group(store, rank=0, world_size=world, name=name, backend=backend, timeout=timeout)


def _own_address(urls: Sequence[str]) -> str:
    """Return this machine's address as seen by the engines: loopback only if all of them are on this machine."""
    addresses: list[str] = []
    for url in urls:
        parts = urlsplit(url)
        try:
            probe, address = socket_for(str(parts.hostname), parts.port or 80, socket.SOCK_DGRAM)
            with probe:
                probe.connect(address)  # UDP: sends nothing
                addresses.append(probe.getsockname()[0])
        except OSError as error:
            raise SyncError(
                f"no route to {url}: {error}; use an address of the engine that this machine reaches, or "
                "--update-weight-transport disk"
            ) from error
    return next((address for address in addresses if not is_loopback(address)), addresses[0])
