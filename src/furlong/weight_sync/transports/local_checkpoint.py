"""A Hugging Face folder on the machine of SGLang servers, kept up to date by deltas.

Its safetensors files are patched in place, so only what changed is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from furlong.core.delta import Delta, bytes_of
from furlong.core.file_kind import require_file
from furlong.core.json_values import parse_json
from furlong.core.text import shortened
from furlong.core.weights import dtype_of, host_bytes
from furlong.errors import CheckpointError, SyncError
from furlong.files.atomic import write_atomically
from furlong.files.safetensors_header import Shard, StoredTensor, read_header

STATE = "furlong_version.json"
INDEX = "model.safetensors.index.json"


class LocalCheckpoint:
    """The folder. `furlong_version.json` contains its version, or null while a patch is applied.

    A folder without that file is never overwritten. Every method raises SyncError for a damaged file, naming it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    @property
    def version(self) -> int | None:
        """The complete version in the folder; None if there is none."""
        path = self.folder / STATE
        if not os.path.lexists(path):
            return None
        version = self._json(path).get("version")
        if version is not None and type(version) is not int:
            raise self._damaged(path, f"its version is {shortened(version)}, expected an integer or null")
        return version

    def seed(self, whole: Path, version: int) -> None:
        """Replace the folder by a copy of a complete one. Raises SyncError if furlong did not write the old one."""
        is_empty = self.folder.is_dir() and not any(self.folder.iterdir())
        if self.folder.exists() and not is_empty and not (self.folder / STATE).is_file():
            raise SyncError(
                f"--update-weight-local-checkpoint-dir {self.folder} contains other files (it has no {STATE}) that "
                "a copy of the weights would replace; use a folder that does not exist yet, or empty it"
            )
        partial = self.folder.with_name(f".{self.folder.name}.partial")
        with self._writing():
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(whole, partial)
            (partial / STATE).write_text(json.dumps({"version": version}))
            shutil.rmtree(self.folder, ignore_errors=True)
            os.replace(partial, self.folder)

    def apply(self, folder: Path) -> None:
        """Apply a delta. Raises SyncError if it is corrupt or applies to another version."""
        delta = Delta.open(folder)
        if self.version != delta.base_version:
            raise SyncError(
                f"{self.folder} contains version {self.version}, but {folder} applies to version {delta.base_version}"
            )
        places = self._places(delta)
        self._write_version(None)
        for path, names in places.items():
            self._patch(path, names, delta)
        self._write_version(delta.version)

    def catch_up(self, folder: Path) -> bool:
        """Apply a delta unless it has been; False if it has another base version."""
        delta = Delta.open(folder)
        if self.version not in (delta.version, delta.base_version):
            return False
        if self.version == delta.base_version:
            self.apply(folder)
        return True

    def _places(self, delta: Delta) -> dict[Path, dict[str, StoredTensor]]:
        """Return where the tensors of a delta are, by file. Nothing is written before every file was checked."""
        path = self.folder / INDEX
        index = self._json(path).get("weight_map")
        weight_map = cast("dict[str, Any]", index) if isinstance(index, dict) else {}
        by_file: dict[str, list[str]] = {}
        for name in delta.tensors:
            file = weight_map.get(name)
            if not isinstance(file, str) or Path(file).name != file:
                raise self._damaged(path, f"its weight_map gives {name} the file {shortened(file)}")
            by_file.setdefault(file, []).append(name)
        return {self.folder / file: self._stored(self.folder / file, names, delta) for file, names in by_file.items()}

    def _stored(self, path: Path, names: Sequence[str], delta: Delta) -> dict[str, StoredTensor]:
        try:
            shard: Shard = read_header(path)
        except CheckpointError as error:
            raise self._damaged(path, str(error)) from error
        if shard.file_bytes != shard.needed_bytes:
            raise self._damaged(path, f"it has {shard.file_bytes} bytes, but its header describes {shard.needed_bytes}")
        for name in names:
            stored, entry = shard.tensors.get(name), delta.tensors[name]
            num_bytes = int(np.prod(entry.shape, dtype=np.int64)) * dtype_of(entry.dtype).itemsize
            if stored is None:
                raise self._damaged(path, f"it has no tensor {name}, which {INDEX} says it has")
            if list(stored.shape) != entry.shape or stored.num_bytes != num_bytes:
                raise self._damaged(
                    path,
                    f"{name} is {stored.dtype} {list(stored.shape)}, but {delta.folder} changes {entry.dtype} "
                    f"{entry.shape}",
                )
        return {name: shard.tensors[name] for name in names}

    def _patch(self, path: Path, places: Mapping[str, StoredTensor], delta: Delta) -> None:
        with self._writing(), path.open("r+b") as file:
            for name, place in places.items():
                entry = delta.tensors[name]
                base = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
                file.seek(place.offset)
                if file.readinto(host_bytes(base)) != place.num_bytes:
                    raise self._damaged(path, f"it was cut off before byte {place.offset + place.num_bytes}")
                result = delta.applied(name, base, delta.stored(entry))
                if entry.size:
                    file.seek(place.offset)
                    file.write(bytes_of(result).tobytes())
            file.flush()
            os.fsync(file.fileno())

    def _write_version(self, version: int | None) -> None:
        with self._writing():
            write_atomically(self.folder / STATE, json.dumps({"version": version}))

    def _json(self, path: Path) -> dict[str, Any]:
        try:
            require_file(path)
            value = parse_json(path.read_bytes())
        except OSError as error:
            raise self._damaged(path, f"it cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise self._damaged(path, f"it is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise self._damaged(path, f"it contains {shortened(value)}, expected an object")
        return cast("dict[str, Any]", value)

    def _damaged(self, path: Path, what: str) -> SyncError:
        return SyncError(
            f"{path} is damaged: {what}; delete the folder {self.folder} (--update-weight-local-checkpoint-dir), which "
            "the next run with --load writes anew"
        )

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise SyncError(
                f"cannot write into --update-weight-local-checkpoint-dir {self.folder}: {error}; free some space, or "
                "use another folder; the same command with --load resumes the run"
            ) from error
