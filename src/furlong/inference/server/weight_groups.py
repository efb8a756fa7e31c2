"""Process groups through which a trainer broadcasts weights, joined and left in threads of their own.

A join waits for all members. It occupies neither the event loop nor the threads of other requests, ends at a time
limit, and does not delay the exit of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from furlong.core.addresses import host_and_port
from furlong.core.weights import NamedTensor
from furlong.errors import EngineError
from furlong.inference.request_error import RequestError
from furlong.inference.server.fields import integer, name_of, quote, required
from furlong.transfer.process_group import join_group, wire_view
from furlong.transfer.threads import in_thread

logger = logging.getLogger(__name__)

GROUP_TIMEOUT = timedelta(seconds=300)
LEAVE_S = 10.0  # to leave a group
MAX_GROUPS = 16  # joined or being joined
MAX_JOINS = 64  # threads that join, those of abandoned groups included, which end at GROUP_TIMEOUT
MAX_WORLD_SIZE = 65536
DEFAULT_NAME = "weight_update_group"
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?")


@dataclass(eq=False)
class _Group:
    """A group that was joined, or is being joined (`process_group` is None). `receiving` is held while it receives."""

    process_group: dist.ProcessGroup | None = None
    is_abandoned: bool = False
    receiving: asyncio.Lock = field(default_factory=asyncio.Lock)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    _settling: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, joined: dist.ProcessGroup) -> None:
        """Keep the group, or leave it if it was abandoned meanwhile; called by the thread that joined."""
        with self._settling:
            if not self.is_abandoned:
                self.process_group = joined
                return
        dist.destroy_process_group(joined)

    def abandon(self) -> bool:
        """Stop waiting for the members; returns whether they had not all joined."""
        with self._settling:
            self.is_abandoned = self.is_abandoned or self.process_group is None
        if self.is_abandoned:
            self.given_up.set()
        return self.is_abandoned


class WeightGroups:
    """The process groups of one server, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._joins: set[_Group] = set()  # changed by threads, one atomic operation each

    async def join(self, body: Mapping[str, Any]) -> str:
        """Join a group of the trainer (rank 0) and engines, like SGLang. Raises EngineError if that fails."""
        name, backend = name_of(body, "group_name", DEFAULT_NAME), body.get("backend", "gloo")
        if name in self._groups:
            state = "is being joined" if self._groups[name].process_group is None else "already exists"
            raise RequestError(f"process group {quote(name)} {state}; destroy it first")
        if backend not in ("gloo", "nccl"):
            raise RequestError(f"backend is {quote(backend)}, must be gloo or nccl")
        address = required(body, "master_address", str)
        if not _HOST.fullmatch(address):
            raise RequestError(f"master_address is {quote(address)}, must be a host name or an IP address")
        port = integer(body, "master_port", low=1, high=65535)
        world = integer(body, "world_size", low=2, high=MAX_WORLD_SIZE)
        rank = integer(body, "rank_offset", low=0, high=MAX_WORLD_SIZE)
        if not 0 < rank < world:
            raise RequestError(f"rank_offset is {rank} in a group of {world}; engines have ranks 1 .. {world - 1}")
        if len(self._groups) >= MAX_GROUPS:
            raise RequestError(f"{len(self._groups)} process groups exist, the limit; destroy one first")
        if len(self._joins) >= MAX_JOINS:
            raise RequestError(
                f"{len(self._joins)} process groups still wait for members, abandoned ones included; such a wait ends "
                f"after {GROUP_TIMEOUT.total_seconds():g} s, retry then"
            )
        await self._join(name, lambda: _join(f"tcp://{host_and_port(address, port)}", rank, world, name, backend))
        return f"joined {name} as rank {rank} of {world}"

    async def _join(self, name: str, join: Callable[[], dist.ProcessGroup]) -> None:
        group = self._groups[name] = _Group()
        self._joins.add(group)

        def join_and_settle() -> None:
            try:
                group.settle(join())
            finally:
                self._joins.discard(group)

        joining = asyncio.ensure_future(in_thread(join_and_settle, "furlong-join"))
        given_up = asyncio.ensure_future(group.given_up.wait())
        try:
            await asyncio.wait({joining, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                joining.result()
        except (RuntimeError, ValueError, OSError) as error:
            raise EngineError(f"cannot join process group {name!r}: {error}") from error
        finally:
            joining.cancel()  # its thread ends by itself
            given_up.cancel()
            if group.abandon() and self._groups.get(name) is group:
                del self._groups[name]
        if group.is_abandoned:
            raise EngineError(f"process group {name!r} was destroyed before all its members had joined")

    async def receive(
        self, name: str, names: list[str], dtypes: list[torch.dtype], shapes: list[list[int]], device: torch.device
    ) -> list[NamedTensor]:
        """Receive the tensors that rank 0 broadcasts, in this order."""
        group = self._joined(name)
        if group.receiving.locked():
            raise RequestError(f"process group {quote(name)} is receiving tensors; wait for the answer to that request")

        def receive() -> list[NamedTensor]:
            tensors = [
                torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            sent = map(wire_view, tensors)
            works = [dist.broadcast(tensor, src=0, group=group.process_group, async_op=True) for tensor in sent]
            for work in works:
                if work is not None:
                    work.wait()
            return list(zip(names, tensors, strict=True))

        async with group.receiving:
            return await in_thread(receive, "furlong-receive")

    async def leave(self, name: str) -> str:
        """Leave a group, or give up joining it."""
        if (group := self._groups.get(name)) is not None and group.abandon():
            del self._groups[name]
            return f"gave up joining {name}"
        group = self._joined(name)
        del self._groups[name]
        try:
            async with asyncio.timeout(LEAVE_S):
                await in_thread(lambda: _leave(group.process_group))
        except TimeoutError:
            logger.warning("leaving process group %s takes longer than %g s; not waiting for it", name, LEAVE_S)
        return f"left {name}"

    def abandon(self) -> None:
        """Leave all groups in the background: the server exits."""
        for name, group in list(self._groups.items()):
            del self._groups[name]
            if not group.abandon() and (joined := group.process_group) is not None:
                threading.Thread(target=_leave, args=(joined,), name="furlong-leave-group", daemon=True).start()

    def check_joined(self, name: str) -> None:
        """Raise RequestError unless the group was joined."""
        self._joined(name)

    def _joined(self, name: str) -> _Group:
        group = self._groups.get(name)
        if group is None or group.process_group is None:
            raise RequestError(
                f"there is no process group {quote(name)}; call /init_weights_update_group and wait for it first"
            )
        return group


def _join(url: str, rank: int, world: int, name: str, backend: str) -> dist.ProcessGroup:
    """Join the process group of the trainer."""
    store, rank, world = next(rendezvous(url, rank, world, timeout=GROUP_TIMEOUT))
    store.set_timeout(GROUP_TIMEOUT)
    return join_group(store, rank=rank, world_size=world, name=name, backend=backend, timeout=GROUP_TIMEOUT)


def _leave(group: dist.ProcessGroup | None) -> None:
    """Leave a process group; a request that waits in it for a peer fails at once, not after `GROUP_TIMEOUT`."""
    assert group is not None  # it was joined
    with contextlib.suppress(RuntimeError):  # a peer is gone
        group.abort()
    dist.destroy_process_group(group)
