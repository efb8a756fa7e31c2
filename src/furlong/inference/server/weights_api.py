"""Weight updates over HTTP: from a folder, safetensors bytes, shared memory, or a torch.distributed broadcast.

A model may be sent in several requests with one `weight_version`; the engine generates again once it is complete.
Nothing is unpickled: `/update_weights_from_tensor` supports `load_format: "safetensors"`, where each element of
`serialized_named_tensors` is a base64 safetensors file, and `load_format: "shared_memory"`, where `shared` describes a
buffer on this machine (`core.shared_memory`). A request that is refused changes nothing.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.rendezvous import rendezvous

from furlong.core.addresses import host_and_port
from furlong.core.weights import NamedTensor, dtype_of
from furlong.errors import EngineError
from furlong.files.delta import Delta
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.embedded.model_loading import check_weight_files, source_from_folder
from furlong.inference.request_error import RequestError
from furlong.inference.server.schemas import MAX_INT64, Name, convert, quote, version_label
from furlong.transfer.process_group import join_group, wire_view
from furlong.transfer.shared_memory import open_shared
from furlong.transfer.threads import in_thread

logger = logging.getLogger(__name__)

INCOMPLETE = "incomplete"  # label of released or partially replaced weights, which cannot be the base of a delta
DEFAULT_NAME = "weight_update_group"
GROUP_TIMEOUT = timedelta(seconds=300)  # for all members to join, and of a broadcast
LEAVE_S = 10.0  # to leave a group
DIAL_S, REDIAL_S = 5.0, 0.1  # for a connection to the store of a group, and between attempts
MAX_GROUPS = 16  # joined or being joined
MAX_WORLD_SIZE = 65536
GROUP_THREAD = "furlong-group"  # name of the threads that are in torch.distributed


class _Update(msgspec.Struct):
    """What all updates have; SGLang's further fields have no effect."""

    weight_version: Any = None
    abort_all_requests: bool | None = None

    @property
    def label(self) -> str | None:
        return version_label("weight_version", self.weight_version)


class _FromDisk(_Update):
    model_path: str = ""
    load_format: str | None = None


class _FromTensors(_Update):
    load_format: Any = None
    serialized_named_tensors: list[str] | None = None
    shared: dict[str, Any] | None = None


class _FromGroup(_Update, kw_only=True):
    names: list[Name]
    dtypes: list[str]
    shapes: list[list[Any]]
    group_name: Name = DEFAULT_NAME


class _Join(msgspec.Struct):
    master_address: Annotated[str, msgspec.Meta(pattern=r"\A([A-Za-z0-9._-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?)\Z")]
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    world_size: Annotated[int, msgspec.Meta(ge=2, le=MAX_WORLD_SIZE)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD_SIZE)]  # the trainer is rank 0
    group_name: Name = DEFAULT_NAME
    backend: Literal["gloo", "nccl"] = "gloo"


class _Leave(msgspec.Struct):
    group_name: Name = DEFAULT_NAME


class _Rename(msgspec.Struct):
    new_version: Any = None
    abort_all_requests: bool | None = None


class WeightEndpoints:
    """Weight endpoints of one server, with its version labels and process groups."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.groups = WeightGroups()
        self._labels: dict[int, str] = {}
        self._lock = asyncio.Lock()  # one load at a time, so that labels and numbers stay in order

    @property
    def label(self) -> str:
        """The version label that the client assigned; `INCOMPLETE` while weights are missing."""
        if not self.engine.has_weights:
            return INCOMPLETE
        return self._labels.get(self.engine.version, str(self.engine.version))

    def _number(self, label: str | None) -> int:
        """The version number of a label: the label itself if it is an integer, else the next number."""
        if label is not None:
            for number, known in self._labels.items():
                if known == label:
                    return number
            if label.isdecimal():
                return int(label)
        number = self.engine.version + 1 if label is None else max([self.engine.version, *self._labels]) + 1
        while number > MAX_INT64 or (number in self._labels and label is not None):
            number = 1 if number > MAX_INT64 else number + 1
        return number

    def _record(self, number: int, label: str | None) -> None:
        if label is not None:
            self._labels[number] = label

    async def from_disk(self, body: Mapping[str, Any]) -> str:
        """Load a folder of safetensors files; returns a message."""
        fields = convert(body, _FromDisk)
        label, folder, load_format = fields.label, Path(fields.model_path), fields.load_format
        if not fields.model_path or not await asyncio.to_thread(folder.is_dir):
            raise RequestError(f"model_path {quote(fields.model_path)} is not a folder on the server")
        if load_format not in (None, "auto", "safetensors", "delta"):
            raise RequestError(
                f"load_format is {quote(load_format)}; only safetensors folders and deltas are supported"
            )
        async with self._lock:
            if load_format == "delta":
                return await self._from_delta(folder, fields, label)
            await asyncio.to_thread(check_weight_files, folder, self.engine.model.table, self.engine.config)
            if fields.abort_all_requests:
                await self.engine.abort_request()
            number = self._number(label)
            checksums = await self.engine.load_weights(source_from_folder(folder, self.engine.config), number)
            self._record(number, label)
            return f"loaded {len(checksums)} tensors from {folder} as weight version {self.label}"

    async def _from_delta(self, folder: Path, fields: _Update, label: str | None) -> str:
        """Apply a delta to the weights in use, tensor by tensor; each is verified before it is loaded."""
        delta = await asyncio.to_thread(Delta.open, folder)
        if str(delta.base_version) != self.label:
            raise RequestError(
                f"{folder} is a delta to weight version {delta.base_version}, but this engine has {self.label}; "
                "send all tensors"
            )
        if fields.abort_all_requests:
            await self.engine.abort_request()
        source = delta.source(lambda name: self.engine.model.table.view(name).clone())
        number = self._number(label)
        await self.engine.load_weights(source, number)
        self._record(number, label)
        return f"applied {folder} to weight version {delta.base_version}; it is now version {self.label}"

    async def from_tensors(self, body: Mapping[str, Any]) -> str:
        """Load base64 safetensors bytes, or a shared-memory buffer of this machine."""
        fields = convert(body, _FromTensors)
        label, parts = fields.label, fields.serialized_named_tensors
        if fields.load_format == "shared_memory":
            shared = fields.shared or {}
            return await self._bucket(open_shared(shared.get("name"), shared.get("tensors")), fields, label)
        if fields.load_format != "safetensors":
            raise RequestError(
                f"load_format is {quote(fields.load_format)}; this server supports 'safetensors' (base64 of a "
                "safetensors file in serialized_named_tensors) and 'shared_memory', because it never unpickles data"
            )
        if parts is None:
            raise RequestError("serialized_named_tensors is missing; send base64 of safetensors files")
        tensors = await asyncio.to_thread(lambda: [tensor for part in parts for tensor in _tensors_from(part)])
        return await self._bucket(tensors, fields, label)

    async def _bucket(self, tensors: list[NamedTensor], fields: _Update, label: str | None) -> str:
        if not tensors:
            raise RequestError("the request has no tensors; send at least one")
        convert([name for name, _ in tensors], list[Name], "names")
        async with self._lock:
            if fields.abort_all_requests:
                await self.engine.abort_request()
            number = self._number(label)
            is_complete = await self.engine.load_bucket(tensors, number)
            self._record(number, label)
        if is_complete:
            return f"weight version {self.label} is complete"
        return f"loaded {len(tensors)} tensors; others are still missing for weight version {label}"

    async def from_group(self, body: Mapping[str, Any]) -> str:
        """Receive the tensors that rank 0 broadcasts, in this order."""
        fields = convert(body, _FromGroup)
        label, group = fields.label, fields.group_name
        self.groups.joined(group)
        names, dtypes, shapes = fields.names, fields.dtypes, fields.shapes
        if not 0 < len(names) == len(dtypes) == len(shapes):
            raise RequestError(
                f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes; their numbers must be equal, and at "
                "least one"
            )
        try:
            torch_dtypes = [dtype_of(name) for name in dtypes]
        except ValueError as error:
            raise RequestError(str(error)) from error
        table = self.engine.model.table  # shapes are checked before memory for them is allocated
        shapes = [list(table.check_shape(name, shape).shape) for name, shape in zip(names, shapes, strict=True)]
        tensors = await self.groups.receive(group, names, torch_dtypes, shapes, self.engine.device)
        return await self._bucket(tensors, fields, label)

    async def rename(self, body: Mapping[str, Any]) -> str:
        """Change the version label of the weights in use."""
        fields = convert(body, _Rename)
        label = version_label("new_version", fields.new_version)
        if label is None:
            raise RequestError("new_version is missing; send the label of the weights")
        if fields.abort_all_requests is not False:
            await self.engine.abort_request()
        async with self._lock:
            number = self._number(label)
            await self.engine.set_version(number)
            self._record(number, label)
        return f"weight version is {label}"


def _tensors_from(part: Any) -> list[NamedTensor]:
    try:
        return list(safetensors.torch.load(binascii.a2b_base64(part, strict_mode=True)).items())
    except (SafetensorError, binascii.Error, TypeError, ValueError, KeyError) as error:
        raise RequestError(f"serialized_named_tensors is not a base64 safetensors file: {error}") from error


# -- process groups --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Group:
    """A group that was joined, or is being joined. `receiving` is held while it receives."""

    joining: asyncio.Task[dist.ProcessGroup]
    receiving: asyncio.Lock = field(default_factory=asyncio.Lock)


class WeightGroups:
    """The process groups of one server, by name, through which a trainer broadcasts weights.

    Joining waits for all members, in its own thread: neither the event loop nor other requests wait with it.
    was_used: a group was joined, or threads may be in torch.distributed; gloo then aborts the interpreter's exit.
    """

    was_used: ClassVar[bool] = False

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    async def join(self, body: Mapping[str, Any]) -> str:
        """Join a group of the trainer (rank 0) and engines, like SGLang. Raises EngineError if that fails."""
        fields = convert(body, _Join)
        name, rank, world = fields.group_name, fields.rank_offset, fields.world_size
        if name in self._groups:
            state = "already exists" if self._groups[name].joining.done() else "is being joined"
            raise RequestError(f"process group {quote(name)} {state}; destroy it first")
        if rank >= world:
            raise RequestError(f"rank_offset is {rank} in a group of {world}; engines have ranks 1 .. {world - 1}")
        if len(self._groups) >= MAX_GROUPS:
            raise RequestError(f"{len(self._groups)} process groups exist, the limit; destroy one first")
        WeightGroups.was_used = True
        joining = asyncio.create_task(_joined(fields))
        group = self._groups[name] = _Group(joining)
        try:
            await asyncio.wait({joining})
            if joining.cancelled():
                raise EngineError(f"process group {name!r} was destroyed before all its members had joined")
            joining.result()
        except BaseException as error:
            joining.cancel()  # if this request was
            if self._groups.get(name) is group:
                del self._groups[name]
            if isinstance(error, RuntimeError | ValueError | OSError):
                raise EngineError(f"cannot join process group {name!r}: {error}") from error
            raise
        return f"joined {name} as rank {rank} of {world}"

    async def receive(
        self, name: str, names: list[str], dtypes: list[torch.dtype], shapes: list[list[int]], device: torch.device
    ) -> list[NamedTensor]:
        """Receive the tensors that rank 0 broadcasts, in this order."""
        process_group = self.joined(name)
        group = self._groups[name]
        if group.receiving.locked():
            raise RequestError(f"process group {quote(name)} is receiving tensors; wait for the answer to that request")

        def receive() -> list[NamedTensor]:
            tensors = [
                torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            sent = map(wire_view, tensors)
            works = [dist.broadcast(tensor, src=0, group=process_group, async_op=True) for tensor in sent]
            for work in works:
                if work is not None:
                    work.wait()
            return list(zip(names, tensors, strict=True))

        async with group.receiving:
            return await in_thread(receive, GROUP_THREAD)

    async def leave(self, body: Mapping[str, Any]) -> str:
        """Leave a group, or give up joining it."""
        name = convert(body, _Leave).group_name
        group = self._groups.get(name)
        if group is not None and not group.joining.done():
            group.joining.cancel()
            del self._groups[name]
            return f"gave up joining {name}"
        process_group = self.joined(name)
        del self._groups[name]
        try:
            async with asyncio.timeout(LEAVE_S):
                await in_thread(lambda: _leave(process_group), GROUP_THREAD)
        except TimeoutError:
            logger.warning("leaving process group %s takes longer than %g s; not waiting for it", name, LEAVE_S)
        return f"left {name}"

    def close(self) -> None:
        """Leave all groups, without waiting for it: the server exits."""
        for name, group in list(self._groups.items()):
            if not group.joining.cancel():
                in_thread(partial(_leave, self.joined(name)), GROUP_THREAD)
        self._groups.clear()

    def joined(self, name: str) -> dist.ProcessGroup:
        """Return a group. Raises RequestError unless it was joined."""
        group = self._groups.get(name)
        if group is None or not group.joining.done() or group.joining.cancelled() or group.joining.exception():
            raise RequestError(
                f"there is no process group {quote(name)}; call /init_weights_update_group and wait for it first"
            )
        return group.joining.result()


async def _joined(fields: _Join) -> dist.ProcessGroup:
    """Join the process group of the trainer. If this is cancelled, the group is left as soon as it is joined."""
    host, port, timeout = fields.master_address.strip("[]"), fields.master_port, GROUP_TIMEOUT
    deadline = time.monotonic() + timeout.total_seconds()
    while True:  # here, not in torch's rendezvous, whose thread could not be stopped
        try:
            async with asyncio.timeout(DIAL_S):
                _, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError(f"{host_and_port(host, port)} does not answer: {error or 'no connection'}") from error
            await asyncio.sleep(REDIAL_S)
        else:
            writer.close()
            break

    def join() -> dist.ProcessGroup:
        url = f"tcp://{host_and_port(host, port)}"
        store, rank, world = next(rendezvous(url, fields.rank_offset, fields.world_size, timeout=timeout))
        store.set_timeout(timeout)
        name, backend = fields.group_name, fields.backend
        return join_group(store, rank=rank, world_size=world, name=name, backend=backend, timeout=timeout)

    def leave_late(late: asyncio.Future[dist.ProcessGroup]) -> None:
        if not late.cancelled() and late.exception() is None:
            in_thread(lambda: _leave(late.result()), GROUP_THREAD)

    thread = in_thread(join, GROUP_THREAD)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        thread.add_done_callback(leave_late)
        raise


def _leave(group: dist.ProcessGroup) -> None:
    """Leave a process group; a request that waits in it for a peer fails at once, not after `GROUP_TIMEOUT`."""
    with contextlib.suppress(RuntimeError):  # a peer is gone
        group.abort()
    dist.destroy_process_group(group)
