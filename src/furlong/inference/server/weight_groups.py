"""Process groups through which a trainer broadcasts weights, joined and left in threads of their own.

A join waits for all members. It occupies neither the event loop nor the threads of other requests, ends at a time
limit, and does not delay the exit of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from furlong.core.addresses import host_and_port
from furlong.core.weights import NamedTensor
from furlong.errors import EngineError
from furlong.inference.request_error import RequestError
from furlong.inference.server.schemas import Name, convert, quote
from furlong.transfer.process_group import join_group, wire_view
from furlong.transfer.threads import in_thread

logger = logging.getLogger(__name__)

GROUP_TIMEOUT = timedelta(seconds=300)
LEAVE_S = 10.0  # to leave a group
MAX_GROUPS = 16  # joined or being joined
MAX_WORLD_SIZE = 65536
DEFAULT_NAME = "weight_update_group"


class _Join(msgspec.Struct):
    master_address: Annotated[str, msgspec.Meta(pattern=r"\A([A-Za-z0-9._-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?)\Z")]
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    world_size: Annotated[int, msgspec.Meta(ge=2, le=MAX_WORLD_SIZE)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]  # the trainer is rank 0
    group_name: Name = DEFAULT_NAME
    backend: Literal["gloo", "nccl"] = "gloo"


class _Leave(msgspec.Struct):
    group_name: Name = DEFAULT_NAME


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

    async def join(self, body: Mapping[str, Any]) -> str:
        """Join a group of the trainer (rank 0) and engines, like SGLang. Raises EngineError if that fails."""
        fields = convert(body, _Join)
        name, rank, world = fields.group_name, fields.rank_offset, fields.world_size
        if name in self._groups:
            state = "is being joined" if self._groups[name].process_group is None else "already exists"
            raise RequestError(f"process group {quote(name)} {state}; destroy it first")
        if rank >= world:
            raise RequestError(f"rank_offset is {rank} in a group of {world}; engines have ranks 1 .. {world - 1}")
        if len(self._groups) >= MAX_GROUPS:
            raise RequestError(f"{len(self._groups)} process groups exist, the limit; destroy one first")
        url = f"tcp://{host_and_port(fields.master_address, fields.master_port)}"
        await self._join(name, lambda: _join(url, rank, world, name, fields.backend))
        return f"joined {name} as rank {rank} of {world}"

    async def _join(self, name: str, join: Callable[[], dist.ProcessGroup]) -> None:
        group = self._groups[name] = _Group()
        joining = asyncio.ensure_future(in_thread(lambda: group.settle(join()), "furlong-join"))
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

    async def leave(self, body: Mapping[str, Any]) -> str:
        """Leave a group, or give up joining it."""
        name = convert(body, _Leave).group_name
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
