"""Weight updates over HTTP: from a folder, safetensors bytes, shared memory, or a torch.distributed broadcast.

A model may be sent in several requests with one `weight_version`; the engine generates again once it is complete.
Nothing is unpickled: `/update_weights_from_tensor` supports `load_format: "safetensors"`, where each element of
`serialized_named_tensors` is a base64 safetensors file, and `load_format: "shared_memory"`, where `shared` describes a
buffer on this machine (`core.shared_memory`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.rendezvous import rendezvous

from furlong.core.delta import Delta
from furlong.core.shared_memory import open_shared
from furlong.core.weights import NamedTensor, dtype_of
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.embedded.model_loading import source_from_folder
from furlong.inference.embedded.request import RequestError
from furlong.process_group import join_group

GROUP_TIMEOUT = timedelta(seconds=300)
INCOMPLETE = "incomplete"  # label of released or partially replaced weights, which cannot be the base of a delta


class WeightEndpoints:
    """Weight endpoints of one server, with its version labels and process groups."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self._labels: dict[int, str] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}

    @property
    def label(self) -> str:
        """The version label that the client assigned; `INCOMPLETE` while weights are missing."""
        if not self.engine.has_weights:
            return INCOMPLETE
        return self._labels.get(self.engine.version, str(self.engine.version))

    def _number(self, label: Any) -> int:
        """The version number of a label: the label itself if it is an integer, else the next number."""
        if label is None:
            return self.engine.version + 1
        for number, known in self._labels.items():
            if known == str(label):
                return number
        number = int(label) if str(label).isdigit() else max([self.engine.version, *self._labels]) + 1
        self._labels[number] = str(label)
        return number

    async def _prepare(self, body: Mapping[str, Any]) -> None:
        if body.get("abort_all_requests"):
            await self.engine.abort_request()

    async def from_disk(self, body: Mapping[str, Any]) -> str:
        """Load a folder of safetensors files; returns a message."""
        folder = Path(required(body, "model_path", str))
        if not folder.is_dir():
            raise RequestError(f"model_path {str(folder)!r} is not a folder on the server")
        if body.get("load_format") not in (None, "auto", "safetensors", "delta"):
            raise RequestError(
                f"load_format is {body['load_format']!r}; only safetensors folders and deltas are supported"
            )
        if body.get("load_format") == "delta":
            return await self._from_delta(folder, body)
        await self._prepare(body)
        version = self._number(body.get("weight_version"))
        checksums = await self.engine.load_weights(source_from_folder(folder), version)
        return f"loaded {len(checksums)} tensors from {folder} as weight version {self.label}"

    async def _from_delta(self, folder: Path, body: Mapping[str, Any]) -> str:
        """Apply a delta to the weights in use, tensor by tensor; each is verified before it is loaded."""
        delta = await asyncio.to_thread(Delta.open, folder)
        if str(delta.base_version) != self.label:
            raise RequestError(
                f"{folder} is a delta to weight version {delta.base_version}, but this engine has {self.label}; "
                "send all tensors"
            )
        await self._prepare(body)
        source = delta.source(lambda name: self.engine.model.table.view(name).clone())
        await self.engine.load_weights(source, self._number(body.get("weight_version")))
        return f"applied {folder} to weight version {delta.base_version}; it is now version {self.label}"

    async def from_tensors(self, body: Mapping[str, Any]) -> str:
        """Load base64 safetensors bytes, or a shared-memory buffer of this machine."""
        if body.get("load_format") == "shared_memory":
            shared = required(body, "shared", dict)
            await self._prepare(body)
            return await self._bucket(open_shared(shared.get("name"), shared.get("tensors")), body)
        if body.get("load_format") != "safetensors":
            raise RequestError(
                f"load_format is {body.get('load_format')!r}; this server supports 'safetensors' (base64 of a "
                "safetensors file in serialized_named_tensors) and 'shared_memory', because it never unpickles data"
            )
        tensors: list[NamedTensor] = []
        for part in required(body, "serialized_named_tensors", list):
            try:
                tensors += safetensors.torch.load(base64.b64decode(part, validate=True)).items()
            except (SafetensorError, binascii.Error, TypeError, ValueError) as error:
                raise RequestError(f"serialized_named_tensors is not a base64 safetensors file: {error}") from error
        await self._prepare(body)
        return await self._bucket(tensors, body)

    async def _bucket(self, tensors: list[NamedTensor], body: Mapping[str, Any]) -> str:
        version = self._number(body.get("weight_version"))
        if await self.engine.load_bucket(tensors, version):
            return f"weight version {self.label} is complete"
        return (
            f"loaded {len(tensors)} tensors; others are still missing for weight version {body.get('weight_version')}"
        )

    async def init_group(self, body: Mapping[str, Any]) -> str:
        """Join a process group of the trainer (rank 0) and engines, like SGLang."""
        name = str(body.get("group_name", "weight_update_group"))
        backend = body.get("backend", "gloo")
        if name in self._groups:
            raise RequestError(f"process group {name!r} already exists; destroy it first")
        if backend not in ("gloo", "nccl"):
            raise RequestError(f"backend is {backend!r}, must be gloo or nccl")
        address, port = required(body, "master_address", str), required(body, "master_port", int)
        rank, world = required(body, "rank_offset", int), required(body, "world_size", int)
        if not 0 < rank < world:
            raise RequestError(f"rank_offset is {rank} in a group of {world}; engines have ranks 1 .. {world - 1}")
        url = f"tcp://{address}:{port}"
        self._groups[name] = await asyncio.to_thread(_join, url, rank, world, name, backend)
        return f"joined {name} as rank {rank} of {world}"

    async def from_group(self, body: Mapping[str, Any]) -> str:
        """Receive the tensors that rank 0 broadcasts, in this order."""
        group = self._group(body)
        names, dtypes, shapes = (required(body, key, list) for key in ("names", "dtypes", "shapes"))
        if not len(names) == len(dtypes) == len(shapes):
            raise RequestError(
                f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes; their numbers must be equal"
            )
        try:
            torch_dtypes = [dtype_of(name) for name in dtypes]
        except ValueError as error:
            raise RequestError(str(error)) from error
        await self._prepare(body)
        device = self.engine.device

        def receive() -> list[NamedTensor]:
            tensors = [
                torch.empty(shape, dtype=dtype, device=device)
                for shape, dtype in zip(shapes, torch_dtypes, strict=True)
            ]
            works = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors]
            for work in works:
                if work is not None:
                    work.wait()
            return list(zip(names, tensors, strict=True))

        return await self._bucket(await asyncio.to_thread(receive), body)

    async def destroy_group(self, body: Mapping[str, Any]) -> str:
        """Leave a process group."""
        group = self._group(body)
        name = str(body.get("group_name", "weight_update_group"))
        await asyncio.to_thread(dist.destroy_process_group, group)
        del self._groups[name]
        return f"left {name}"

    async def close(self) -> None:
        """Leave all process groups."""
        for name in list(self._groups):
            await self.destroy_group({"group_name": name})

    def _group(self, body: Mapping[str, Any]) -> dist.ProcessGroup:
        name = str(body.get("group_name", "weight_update_group"))
        if name not in self._groups:
            raise RequestError(f"there is no process group {name!r}; call /init_weights_update_group first")
        return self._groups[name]

    async def rename(self, body: Mapping[str, Any]) -> str:
        """Change the version label of the weights in use."""
        label = required(body, "new_version", str)
        if body.get("abort_all_requests", True):
            await self.engine.abort_request()
        await self.engine.set_version(self._number(label))
        return f"weight version is {label}"


def required(body: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """A field that must have this type. Raises RequestError otherwise."""
    if not isinstance(body.get(name), kind):
        raise RequestError(f"{name} is {body.get(name)!r}, must be {kind.__name__}")
    return body[name]


def _join(url: str, rank: int, world: int, name: str, backend: str) -> dist.ProcessGroup:
    """Join the process group of the trainer."""
    store, rank, world = next(rendezvous(url, rank, world, timeout=GROUP_TIMEOUT))
    store.set_timeout(GROUP_TIMEOUT)
    return join_group(store, rank=rank, world_size=world, name=name, backend=backend, timeout=GROUP_TIMEOUT)
