"""Weight transport through a folder that trainer and engines see under the same path."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Self

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from furlong.core.weights import WeightSource
from furlong.errors import SyncError
from furlong.weight_sync.daemon_threads import in_thread
from furlong.weight_sync.transports.transport import Connect, Transport, TransportContext
from furlong.weight_sync.weight_record import WeightRecord
from furlong.weight_sync.weight_server import WeightServer, call_servers

logger = logging.getLogger(__name__)

TIMEOUT_S = 600.0


class VersionFolders:
    """A folder with one subfolder per weight version, which appears only when it is complete.

    Args:
        folder: Parent of the `version_000012` folders; used by one run at a time.
        model_dir: Source of the config, tokenizer and similar files.
        file_bytes: Size of one safetensors file.
        keep_files: Whether to keep older versions.
    """

    def __init__(self, folder: Path, *, model_dir: Path, file_bytes: int, keep_files: bool = False) -> None:
        self.folder, self._model_dir = folder.absolute(), model_dir
        self._file_bytes, self._keep_files = file_bytes, keep_files
        self._written: list[Path] = []
        self._lock: IO[str] | None = None

    @classmethod
    def build(cls, context: TransportContext) -> Self:
        """Make it from the flags."""
        flags = context.flags
        return cls(
            Path(flags.update_weight_disk_dir or context.run_dir / "weights"),
            model_dir=context.model_dir,
            file_bytes=flags.update_weight_buffer_size,
            keep_files=flags.update_weight_disk_keep_files,
        )

    def write(self, source: WeightSource, version: int) -> Path:
        """Write all tensors of a version as a Hugging Face folder."""
        return self.make(version, lambda folder: self._fill(source, folder))

    def make(self, version: int, fill: Callable[[Path], None], *, suffix: str = "") -> Path:
        """Write the folder of a version with `fill` and move it into place. Raises SyncError if that fails."""
        self._lock_folder()
        try:
            return self._make(version, fill, suffix)
        except (OSError, SafetensorError) as error:
            raise SyncError(
                f"weight_sync version {version}: cannot write into {self.folder}: {error}; free some space, or use "
                "another folder with --update-weight-disk-dir; the same command with --load resumes the run"
            ) from error

    def _make(self, version: int, fill: Callable[[Path], None], suffix: str) -> Path:
        target = self.folder / f"version_{version:06d}{suffix}"
        partial = self.folder / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        fill(partial)
        if target.exists():  # left by the run that is resumed
            shutil.rmtree(target)
        os.replace(partial, target)
        self._written.append(target)
        return target

    def remove_others(self, current: Sequence[Path | None]) -> None:
        """Delete this run's folders except these, unless `keep_files`."""
        if self._keep_files:
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
            is_weights = "safetensors" in path.name
            if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and not is_weights:
                shutil.copyfile(path, folder / path.name)
        weight_map: dict[str, str] = {}
        total = 0
        for bucket in source.buckets(self._file_bytes):
            file = f"model-{bucket.index + 1:05d}.safetensors"
            tensors: dict[str, Tensor] = {name: tensor.detach().contiguous() for name, tensor in bucket.tensors}
            safetensors.torch.save_file(tensors, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

    def _lock_folder(self) -> None:
        """Lock the folder for this process. Raises SyncError if another run uses it."""
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
    """Writes all tensors of each version to a folder, which the engines load.

    Args:
        folders: Where to write versions.
        timeout_s: For an engine to load a folder.
    """

    name = "disk"

    def __init__(self, folders: VersionFolders, *, timeout_s: float = TIMEOUT_S) -> None:
        self._folders, self._timeout_s = folders, timeout_s
        self._last: tuple[int, Path] | None = None

    @classmethod
    def build(cls, context: TransportContext) -> Self:
        """Write to --update-weight-disk-dir, or to weights/ in the run's folder."""
        return cls(VersionFolders.build(context), timeout_s=context.flags.update_weight_timeout)

    async def send(
        self, source: WeightSource, servers: Sequence[WeightServer], version: int, sent: WeightRecord
    ) -> None:
        """Write the folder of `version` and load it into all servers. Raises SyncError naming those that failed."""
        del sent
        started = time.perf_counter()
        folder = await in_thread(lambda: self._folders.write(source, version))
        self._last = version, folder
        logger.info("weight_sync version %d: written to %s in %.3f s", version, folder, time.perf_counter() - started)
        await self._load(folder, servers, version)
        await in_thread(lambda: self._folders.remove_others([folder]))

    async def resend(self, servers: Sequence[WeightServer], version: int) -> bool:
        """Load the folder of `version`, if it is the latest."""
        if self._last is None or self._last[0] != version:
            return False
        await self._load(self._last[1], servers, version)
        return True

    async def close(self, connect: Connect) -> None:
        """Unlock the folder."""
        del connect
        self._folders.close()

    async def _load(self, folder: Path, servers: Sequence[WeightServer], version: int) -> None:
        calls = {server.url: server.update_from_disk(str(folder), version) for server in servers}
        await call_servers(version, f"load {folder}", calls, timeout_s=self._timeout_s, transport=self.name)
