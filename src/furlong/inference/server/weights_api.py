"""Weight updates over HTTP: from a folder, safetensors bytes, shared memory, or a torch.distributed broadcast.

A model may be sent in several requests with one `weight_version`; the engine generates again once it is complete.
Nothing is unpickled: `/update_weights_from_tensor` supports `load_format: "safetensors"`, where each element of
`serialized_named_tensors` is a base64 safetensors file, and `load_format: "shared_memory"`, where `shared` describes a
buffer on this machine (`core.shared_memory`). A request that is refused changes nothing.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
from safetensors import SafetensorError

from furlong.core.weights import NamedTensor, dtype_of
from furlong.files.delta import Delta
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.embedded.model_loading import check_weight_files, source_from_folder
from furlong.inference.request_error import RequestError
from furlong.inference.server.schemas import MAX_INT64, Name, convert, quote, version_label
from furlong.inference.server.weight_groups import DEFAULT_NAME, WeightGroups
from furlong.transfer.shared_memory import open_shared

logger = logging.getLogger(__name__)

INCOMPLETE = "incomplete"  # label of released or partially replaced weights, which cannot be the base of a delta
BUCKET_S = 300.0  # for the next tensors of an incomplete version; after that, waiting requests fail


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
        self._abandonment: asyncio.TimerHandle | None = None
        self._abandoning: asyncio.Task[None] | None = None

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
            self._expect_more(None if is_complete else number)
        if is_complete:
            return f"weight version {self.label} is complete"
        return f"loaded {len(tensors)} tensors; others are still missing for weight version {label}"

    def _expect_more(self, number: int | None) -> None:
        """Abandon version `number` unless more of it arrives in time; None if nothing is missing."""
        if self._abandonment is not None:
            self._abandonment.cancel()
            self._abandonment = None

        def abandon() -> None:
            assert number is not None
            logger.warning("weight version %s is incomplete, and nothing of it arrived for %g s", number, BUCKET_S)
            self._abandoning = asyncio.create_task(self.engine.abandon_load(number))

        if number is not None:
            self._abandonment = asyncio.get_running_loop().call_later(BUCKET_S, abandon)

    async def from_group(self, body: Mapping[str, Any]) -> str:
        """Receive the tensors that rank 0 broadcasts, in this order."""
        fields = convert(body, _FromGroup)
        label, group = fields.label, fields.group_name
        self.groups.check_joined(group)
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

    def close(self) -> None:
        """Leave all process groups, in the background."""
        self._expect_more(None)
        self.groups.abandon()

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
    """Decode one base64 safetensors file. Raises RequestError if it is not one."""
    try:
        return list(safetensors.torch.load(binascii.a2b_base64(part, strict_mode=True)).items())
    except (SafetensorError, binascii.Error, TypeError, ValueError, KeyError) as error:
        raise RequestError(f"serialized_named_tensors is not a base64 safetensors file: {error}") from error
