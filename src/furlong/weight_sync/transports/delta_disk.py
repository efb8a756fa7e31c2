"""Weight transport through a folder with only what changed since the previous version.

The first version is a complete folder. Afterwards rank 0 keeps a copy of what it sent last and writes the difference to
it (`core.delta`). `furlong serve` applies the difference to its own weights. SGLang loads complete folders only, so a
local checkpoint on its machine is updated and loaded.

An engine whose version is not the previous one, or whose weights have another dtype, loads a complete folder.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from furlong.core.delta import Checksum, Delta, DeltaWriter, Encoding, bytes_of
from furlong.core.weights import NamedTensor, WeightSource, dtype_of
from furlong.errors import SyncError
from furlong.weight_sync.daemon_threads import in_thread
from furlong.weight_sync.transports.disk import TIMEOUT_S, VersionFolders
from furlong.weight_sync.transports.transport import Connect, Transport, TransportContext
from furlong.weight_sync.weight_record import WeightRecord
from furlong.weight_sync.weight_server import WeightServer, call_servers

logger = logging.getLogger(__name__)

STATE = "furlong_version.json"


class DeltaTransport(Transport):
    """Writes a complete folder for the first version and deltas for later ones.

    Args:
        folders: Where to write versions.
        encoding: Encoding of the deltas.
        checksum: Checksum of the resulting tensors.
        local_checkpoint: A folder on the machine of SGLang servers, kept up to date for them.
        timeout_s: For an engine to load or apply a folder.
    """

    name = "disk delta"

    def __init__(
        self,
        folders: VersionFolders,
        *,
        encoding: Encoding = "xor",
        checksum: Checksum = "xxh3-128",
        local_checkpoint: Path | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._folders, self._timeout_s = folders, timeout_s
        self._encoding: Encoding = encoding
        self._checksum: Checksum = checksum
        self._local = None if local_checkpoint is None else LocalCheckpoint(local_checkpoint)
        self._base: dict[str, Tensor] = {}  # the weights sent as `_version`
        self._version: int | None = None
        self._whole: Path | None = None  # a complete folder of `_version`

    @classmethod
    def build(cls, context: TransportContext) -> Self:
        """Make it from the flags."""
        flags = context.flags
        local = flags.update_weight_local_checkpoint_dir
        return cls(
            VersionFolders.build(context),
            encoding=flags.update_weight_delta_encoding,
            checksum=flags.update_weight_delta_checksum,
            local_checkpoint=None if local is None else Path(local),
            timeout_s=flags.update_weight_timeout,
        )

    async def send(
        self, source: WeightSource, servers: Sequence[WeightServer], version: int, sent: WeightRecord
    ) -> None:
        """Write what changed and have every engine apply it. Raises SyncError naming the engines that failed."""
        base_version, self._version = self._version, None  # no base for another delta until this one is written
        if base_version is None:
            self._base = {}
            self._whole = await in_thread(lambda: self._write_whole(source, version, seed=True))
            self._version = version
            await self._load_whole(servers, version)
            return
        started = time.perf_counter()
        folder, size = await in_thread(lambda: self._write_delta(source, version, base_version))
        sent.wire_bytes = size
        self._version, self._whole = version, None
        logger.info(
            "weight_sync version %d: %d of %d bytes changed, written to %s in %.3f s",
            version, size, sent.num_bytes, folder, time.perf_counter() - started,
        )  # fmt: skip
        appliers, others = await self._split(servers, base_version)
        calls = {server.url: server.update_from_delta(str(folder), version) for server in appliers}
        await call_servers(version, f"apply {folder}", calls, timeout_s=self._timeout_s, transport=self.name)
        local, patched = self._local, False
        if local is not None and any(server.checksum_dtype is None for server in others):
            patched = await in_thread(lambda: _update(local, folder))
            if patched:
                at_local = [server for server in others if server.checksum_dtype is None]
                await self._load(at_local, str(local.folder), version)
        if behind := [server for server in others if not patched or server.checksum_dtype is not None]:
            await self._load_whole(behind, version)
        await in_thread(lambda: self._folders.remove_others([folder, self._whole]))

    async def resend(self, servers: Sequence[WeightServer], version: int) -> bool:
        """Load all tensors of `version`, if it is the latest."""
        if self._version != version:
            return False
        await self._load_whole(servers, version)
        return True

    async def close(self, connect: Connect) -> None:
        """Unlock the folder."""
        del connect
        self._folders.close()

    async def _split(
        self, servers: Sequence[WeightServer], base_version: int
    ) -> tuple[list[WeightServer], list[WeightServer]]:
        """Split the servers into those that can apply a delta to `base_version`, and the others."""
        dtypes = {tensor.dtype for tensor in self._base.values()}
        appliers: list[WeightServer] = []
        for server in servers:
            if server.checksum_dtype is None:
                continue
            label = await server.served_version()
            if label == str(base_version) and dtypes == {server.checksum_dtype}:
                appliers.append(server)
            else:
                logger.info(
                    "%s has version %s in %s, but the delta applies to version %d in %s: it loads all tensors",
                    server.url, label, server.checksum_dtype, base_version, dtypes,
                )  # fmt: skip
        return appliers, [server for server in servers if server not in appliers]

    async def _load_whole(self, servers: Sequence[WeightServer], version: int) -> None:
        whole = self._whole
        if whole is None:
            base = WeightSource(self._base.items)
            written = await in_thread(lambda: self._write_whole(base, version, seed=False))
            whole = self._whole = written
        if self._local is not None and any(server.checksum_dtype is None for server in servers):
            local = self._local
            await in_thread(partial(local.seed, whole, version))
        await self._load(servers, str(whole), version)

    async def _load(self, servers: Sequence[WeightServer], folder: str, version: int) -> None:
        calls = {server.url: server.update_from_disk(folder, version) for server in servers}
        await call_servers(version, f"load {folder}", calls, timeout_s=self._timeout_s, transport=self.name)

    def _write_whole(self, source: WeightSource, version: int, *, seed: bool) -> Path:
        def read() -> list[NamedTensor] | Any:
            for name, tensor in source.open():
                if seed:
                    self._base[name] = tensor.detach().to("cpu", copy=True)
                yield name, tensor

        return self._folders.write(WeightSource(read), version)

    def _write_delta(self, source: WeightSource, version: int, base_version: int) -> tuple[Path, int]:
        writer: DeltaWriter | None = None

        def fill(folder: Path) -> None:
            nonlocal writer
            writer = DeltaWriter(folder, self._base, encoding=self._encoding, checksum=self._checksum)
            writer.write(source.open(), version=version, base_version=base_version)

        folder = self._folders.make(version, fill, suffix="_delta")
        assert writer is not None
        return folder, writer.num_bytes


class LocalCheckpoint:
    """A Hugging Face folder on a local disk, updated by deltas.

    Its safetensors files are patched in place, so only what changed is written. `furlong_version.json` contains the
    version, or null while a patch is applied; a folder without that file is never overwritten.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    @property
    def version(self) -> int | None:
        """The complete version in the folder; None if there is none."""
        path = self.folder / STATE
        return json.loads(path.read_text())["version"] if path.is_file() else None

    def seed(self, whole: Path, version: int) -> None:
        """Replace the folder by a copy of a complete one. Raises SyncError if furlong did not write the old one."""
        if self.folder.exists() and not (self.folder / STATE).is_file() and _has_files(self.folder):
            raise SyncError(
                f"--update-weight-local-checkpoint-dir {self.folder} contains other files (it has no {STATE}) that "
                "a copy of the weights would replace; use a folder that does not exist yet, or empty it"
            )
        partial = self.folder.with_name(f".{self.folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(whole, partial)
        _write_state(partial, version)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.replace(partial, self.folder)

    def apply(self, folder: Path) -> None:
        """Apply a delta. Raises SyncError if it is corrupt or applies to another version."""
        delta = Delta.open(folder)
        if self.version != delta.base_version:
            raise SyncError(
                f"{self.folder} contains version {self.version}, but {folder} applies to version {delta.base_version}"
            )
        _write_state(self.folder, None)
        index = json.loads((self.folder / "model.safetensors.index.json").read_text())["weight_map"]
        by_file: dict[str, list[str]] = {}
        for name in delta.tensors:
            by_file.setdefault(index[name], []).append(name)
        for file, names in by_file.items():
            self._patch(self.folder / file, names, delta)
        _write_state(self.folder, delta.version)

    def _patch(self, path: Path, names: Sequence[str], delta: Delta) -> None:
        with path.open("r+b") as file, (delta.folder / "delta.bin").open("rb") as data:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size))
            with mmap.mmap(file.fileno(), 0) as memory:
                for name in names:
                    entry = delta.tensors[name]
                    start, end = (8 + header_size + offset for offset in header[name]["data_offsets"])
                    base = torch.empty(header[name]["shape"], dtype=dtype_of(entry.dtype))
                    bytes_of(base)[:] = np.frombuffer(memory[start:end], np.uint8)
                    data.seek(entry.offset)
                    result = delta.applied(name, base, data.read(entry.size))
                    if entry.size:
                        memory[start:end] = bytes_of(result).tobytes()
                memory.flush()


def _write_state(folder: Path, version: int | None) -> None:
    """Store the version of a local checkpoint."""
    (folder / STATE).write_text(json.dumps({"version": version}))


def _has_files(folder: Path) -> bool:
    return not folder.is_dir() or any(folder.iterdir())


def _update(local: LocalCheckpoint, folder: Path) -> bool:
    """Apply a delta to a local checkpoint; False if it has another base version."""
    delta = Delta.open(folder)
    if local.version == delta.version:
        return True
    if local.version != delta.base_version:
        return False
    local.apply(folder)
    return True
