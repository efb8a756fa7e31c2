"""Weight transports through a folder that trainer and engines see under the same path.

`DiskTransport` writes a complete folder for every version. `DeltaTransport` does so for the first one only: afterwards
rank 0 keeps a copy of what it sent last and writes the difference to it (`files.delta`). `furlong serve` applies the
difference to its own weights. SGLang loads complete folders only, and so does an engine whose version is not the
previous one, or whose weights have another dtype.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from furlong.core.weights import NamedTensor, WeightSource
from furlong.errors import SyncError
from furlong.files.delta import DeltaWriter
from furlong.inference.sglang.server import SglangServer
from furlong.quantization.scheme import is_stored_part
from furlong.transfer.threads import in_thread
from furlong.weight_sync.transports.transport import Connect, Transport, TransportContext
from furlong.weight_sync.weight_record import WeightRecord

logger = logging.getLogger(__name__)


class VersionFolders:
    """The folder --update-weight-disk-dir, or weights/ in the run's folder; used by one run at a time.

    It has one subfolder `version_000012` per weight version, which appears only when it is complete.
    """

    def __init__(self, context: TransportContext) -> None:
        self._flags, self._model_dir = context.flags, context.model_dir
        self.folder = Path(self._flags.update_weight_disk_dir or context.run_dir / "weights").absolute()
        self._written: list[Path] = []
        self._lock: IO[str] | None = None

    def write(self, source: WeightSource, version: int) -> Path:
        """Write all tensors of a version as a Hugging Face folder."""
        return self.make(version, lambda folder: self._fill(source, folder))

    def make(self, version: int, fill: Callable[[Path], None], *, suffix: str = "") -> Path:
        """Write the folder of a version with `fill` and move it into place. Raises SyncError if that fails."""
        self._lock_folder()
        target = self.folder / f"version_{version:06d}{suffix}"
        partial = self.folder / f".{target.name}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            fill(partial)
            if target.exists():  # left by the run that is resumed
                shutil.rmtree(target)
            os.replace(partial, target)
        except (OSError, SafetensorError) as error:
            raise SyncError(
                f"weight_sync version {version}: cannot write into {self.folder}: {error}; free some space, or use "
                "another folder with --update-weight-disk-dir; the same command with --load resumes the run"
            ) from error
        self._written.append(target)
        return target

    def remove_others(self, current: Sequence[Path | None]) -> None:
        """Delete this run's folders except these, unless --update-weight-disk-keep-files is set."""
        if self._flags.update_weight_disk_keep_files:
            return
        for path in self._written:
            if path not in current:
                shutil.rmtree(path, ignore_errors=True)
        self._written = [path for path in self._written if path in current]

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _fill(self, source: WeightSource, folder: Path) -> None:
        for path in self._model_dir.iterdir():
            is_replaced = "safetensors" in path.name
            if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and not is_replaced:
                shutil.copyfile(path, folder / path.name)
        weight_map: dict[str, str] = {}
        total = 0
        for bucket in source.buckets(self._flags.update_weight_buffer_size):
            file = f"model-{bucket.index + 1:05d}.safetensors"
            tensors: dict[str, Tensor] = {name: tensor.detach().contiguous() for name, tensor in bucket.tensors}
            safetensors.torch.save_file(tensors, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

    def _lock_folder(self) -> None:
        if self._lock is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise SyncError(
                f"--update-weight-disk-dir {self.folder} is used by another run, and their weights would mix; use "
                "another folder"
            ) from error
        self._lock = lock


class DiskTransport(Transport):
    """Writes all tensors of each version to a folder, which the engines load."""

    name = "disk"

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._folders = VersionFolders(context)
        self._after_write = context.after_write
        self._last: tuple[int, Path] | None = None

    async def send(
        self, source: WeightSource, servers: Sequence[SglangServer], version: int, sent: WeightRecord
    ) -> None:
        """Write the folder of `version` and load it into all servers. Raises SyncError naming those that failed."""
        del sent
        started = time.perf_counter()
        folder = await in_thread(lambda: self._folders.write(source, version))
        self._last = version, folder
        logger.info("weight_sync version %d: written to %s in %.3f s", version, folder, time.perf_counter() - started)
        await self._publish(servers, folder)
        await self._load(servers, folder, version)
        await in_thread(lambda: self._folders.remove_others([folder]))

    async def resend(self, servers: Sequence[SglangServer], version: int) -> bool:
        """Load the folder of `version`, if it is the latest."""
        if self._last is None or self._last[0] != version:
            return False
        await self._load(servers, self._last[1], version)
        return True

    async def close(self, connect: Connect) -> None:
        """Unlock the folder."""
        del connect
        self._folders.close()

    async def _publish(self, servers: Sequence[SglangServer], folder: Path) -> None:
        if (after_write := self._after_write) is not None:
            await in_thread(lambda: after_write(str(folder), [server.url for server in servers]))

    async def _load(self, servers: Sequence[SglangServer], folder: Path, version: int) -> None:
        calls = {server.url: server.update_from_disk(str(folder), version) for server in servers}
        await self.call_servers(version, f"load {folder}", calls)


class DeltaTransport(DiskTransport):
    """Writes a complete folder for the first version and deltas for later ones."""

    name = "disk delta"

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self._base: dict[str, Tensor] = {}  # the weights sent as `_version`
        self._version: int | None = None
        self._whole: Path | None = None  # a complete folder of `_version`

    async def send(
        self, source: WeightSource, servers: Sequence[SglangServer], version: int, sent: WeightRecord
    ) -> None:
        """Write what changed and have every engine apply it. Raises SyncError naming the engines that failed."""
        base_version, self._version = self._version, None  # no base for another delta until this one is written
        if base_version is None:
            self._base = {}
            written = await in_thread(lambda: self._write_whole(source, version, seed=True))
            self._whole, self._version = written, version
            await self._publish(servers, written)
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
        await self._publish(servers, folder)
        appliers, others = await self._split(servers, base_version)
        calls = {server.url: server.update_from_delta(str(folder), version) for server in appliers}
        await self.call_servers(version, f"apply {folder}", calls)
        if others:
            await self._load_whole(others, version)
        await in_thread(lambda: self._folders.remove_others([folder, self._whole]))

    async def resend(self, servers: Sequence[SglangServer], version: int) -> bool:
        """Load all tensors of `version`, if it is the latest."""
        if self._version != version:
            return False
        await self._load_whole(servers, version)
        return True

    async def _split(
        self, servers: Sequence[SglangServer], base_version: int
    ) -> tuple[list[SglangServer], list[SglangServer]]:
        dtypes = {tensor.dtype for name, tensor in self._base.items() if not is_stored_part(name, tensor.dtype)}
        appliers: list[SglangServer] = []
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

    async def _load_whole(self, servers: Sequence[SglangServer], version: int) -> None:
        whole = self._whole
        if whole is None:
            base = WeightSource(self._base.items)
            written = await in_thread(lambda: self._write_whole(base, version, seed=False))
            whole = self._whole = written
            await self._publish(servers, whole)
        await self._load(servers, whole, version)

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
            flags = self.flags
            writer = DeltaWriter(
                folder,
                self._base,
                encoding=flags.update_weight_delta_encoding,
                checksum=flags.update_weight_delta_checksum,
            )
            writer.write(source.open(), version=version, base_version=base_version)

        folder = self._folders.make(version, fill, suffix="_delta")
        assert writer is not None
        return folder, writer.num_bytes
