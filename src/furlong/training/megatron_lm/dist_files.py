"""Read and write checkpoints of torch.distributed.checkpoint, the format that Megatron-core calls torch_dist.

    .metadata                  index: the tensors, and the file, offset and length of each chunk (a pickle)
    __0_0.distcp ...           the chunks, one after another, each as torch.save writes it
    metadata.json, common.pt   Megatron-core's: format version; arguments and counters (a pickle)

No code in a checkpoint is run: see README.md.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import pickletools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import (
    _get_layout,  # pyright: ignore[reportPrivateUsage]
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

from furlong.core.text import abbreviate
from furlong.errors import CheckpointError
from furlong.files.checkpoint_folder import DIST_INDEX as INDEX

VERSION = "metadata.json"
COMMON = "common.pt"
FILE_BYTES = 4 * 2**30
OPTIMIZER = re.compile(r"(^|\.)optimizer\.")  # names of optimizer states
ITERATION = re.compile(r"iter_(\d+)")  # Megatron-LM's folder names
SHOWN = 3
_FORMATS = dcp._MEM_FORMAT_ENCODING  # pyright: ignore[reportPrivateUsage]
SAFE: dict[str, Any] = {
    f"{each.__module__}.{each.__qualname__}": each
    for each in (
        *(dcp.Metadata, dcp.MetadataIndex, dcp.StorageMeta, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata),
        *(dcp.ChunkStorageMetadata, dcp.TensorProperties, _FORMATS, _StorageInfo, _get_layout, torch.Size, PosixPath),
        *(set,),
    )
} | {
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": dcp.Metadata,
    "builtins.getattr": lambda _, name: _FORMATS.__members__.get(
        name
    ),  # how Python 3.11.0 to 3.11.3 pickle the member of an enum
    "pathlib.Path": PosixPath,
}
PLANNED = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")  # their plans are in the index, too


class Placeholder:
    """Stands for an object in a checkpoint that is not used."""

    def __new__(cls, *_: Any, **__: Any) -> Placeholder:
        """Ignore the arguments of a constructor or function."""
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(cast("dict[str, Any]", state))

    def get(self, key: str) -> Any:
        """Return an attribute of the pickled object, None without it."""
        return self.__dict__.get(key)


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles an index: `SAFE` and dtypes as they are, other classes of the two libraries as placeholders."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        dtype = getattr(torch, global_name, None) if module_name == "torch" else None
        found = dtype if isinstance(dtype, torch.dtype) else SAFE.get(f"{module_name}.{global_name}")
        if found is None and f"{module_name}.".startswith(PLANNED):
            return Placeholder
        if found is None:
            raise CheckpointError(f"it names {module_name}.{global_name}, which an index does not contain")
        return found


@lru_cache(maxsize=1)
def _index(path: Path, _mtime_ns: int, _size: int) -> dcp.Metadata:
    """Return the content of an index; cached, as a large one takes seconds. Raises one of many errors for others."""
    data = path.read_bytes()
    for opcode, argument, _ in pickletools.genops(data):  # Python allocates what a pickle announces
        if opcode.name == "LONG_BINPUT" and int(argument or 0) > len(data):
            raise CheckpointError("it is damaged: it refers to more objects than it can contain")
    index = _IndexUnpickler(io.BytesIO(data)).load()
    if not isinstance(index, dcp.Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError("it is no index")
    for info in cast("dict[dcp.MetadataIndex, _StorageInfo]", index.storage_data).values():
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(f"it names a file outside its folder: {info.relative_path}")
    return index


def is_dist_folder(folder: Path) -> bool:
    """Whether a folder is a torch_dist checkpoint."""
    return (folder / INDEX).is_file()


def common_of(folder: Path) -> Mapping[str, Any]:
    """Return the contents of common.pt (arguments, counters), objects as placeholders; {} without the file.

    Raises CheckpointError if it is damaged.
    """
    path = folder / COMMON
    if not path.is_file():
        return {}
    registered = get_safe_globals()  # Megatron-core registers argparse.Namespace, which would be read as itself
    clear_safe_globals()
    try:
        names = get_unsafe_globals_in_checkpoint(path)
        with safe_globals([(type("Placeholder", (Placeholder,), {}), name) for name in names]):
            common = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's message would suggest weights_only=False, which runs code from the file
        raise CheckpointError(
            f"cannot read {path} ({type(error).__name__}); copy the checkpoint again, or use another"
        ) from error
    finally:
        add_safe_globals(registered)
    return cast("Mapping[str, Any]", common) if isinstance(common, dict) else {}


class _BoxPlanner(DefaultLoadPlanner):
    """Lets torch's reader fill the parts of one tensor."""

    def __init__(self, box: Tensor) -> None:
        super().__init__()
        self._box = box

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        sizes = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._box[tuple(slice(start, start + size) for start, size in sizes)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...


class DistReader:
    """Reads whole tensors or boxes of them from a torch_dist checkpoint of any layout.

    Raises CheckpointError if the checkpoint is damaged or not in this format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / INDEX
        try:
            stat = path.stat()
            index = _index(path, stat.st_mtime_ns, stat.st_size)
            entries = index.state_dict_metadata.items()
            self._tensors = {name: each for name, each in entries if isinstance(each, dcp.TensorStorageMetadata)}
            self._all_names = frozenset(index.state_dict_metadata)
            self._storage = cast("dict[dcp.MetadataIndex, _StorageInfo]", index.storage_data)
        except Exception as error:  # a damaged pickle fails in many ways
            raise CheckpointError(f"cannot read {path}: {error}; use another checkpoint") from error
        self._files = FileSystemReader(folder)
        self._files.set_up_storage_reader(index, is_coordinator=True)
        self._boxes: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors, optimizer states included."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self._tensors[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor."""
        return self._tensors[name].properties.dtype

    def files(self) -> dict[str, int]:
        """Return the files that the index names, with the minimum size of each in bytes."""
        sizes: dict[str, int] = {}
        for info in self._storage.values():
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        return sizes

    @property
    def has_optimizer(self) -> bool:
        """Whether the checkpoint contains optimizer states, as tensors or as pickled objects."""
        return any(map(OPTIMIZER.search, self._all_names))

    def problems(self) -> list[str]:
        """Return missing and truncated files and tensors with missing chunks, from the index and file sizes alone."""
        problems: list[str] = []
        if not (self.folder / VERSION).is_file():
            problems.append(f"{VERSION} is missing, which Megatron-core writes last: the save was interrupted")
        for file, size in sorted(self.files().items()):
            path = self.folder / file
            if not path.is_file():
                names = {key.fqn for key, info in self._storage.items() if info.relative_path == file}
                problems.append(f"{file} is missing, with parts of {len(names & self.names)} tensors")
            elif (actual := path.stat().st_size) < size:
                problems.append(f"{file} is truncated: it has {actual} bytes, {INDEX} expects at least {size}")
        for name, entry in sorted(self._tensors.items()):
            stored, expected = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
            if stored != expected:
                problems.append(f"{name}: its chunks contain {stored} of {expected} values")
        return problems

    def check(self) -> None:
        """Raise CheckpointError if there are `problems`."""
        if problems := self.problems():
            shown = abbreviate(problems, SHOWN, separator="; ")
            raise CheckpointError(f"{self.folder} is incomplete: {shown}; copy it again, or use another checkpoint")

    def parts(self, name: str) -> Iterator[Tensor]:
        """Read the chunks of a tensor as stored, one at a time."""
        for chunk in self._tensors[name].chunks:
            yield self._read(name, [chunk], chunk)

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read the box of `shape` at `offset` from the chunks that it overlaps."""
        entry = self._tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.folder} has no tensor {name}; it is incomplete or of another model, use another checkpoint"
            )
        if name not in self._boxes:  # there may be a chunk for each layer and expert
            ranks = len(entry.chunks), len(entry.size)
            starts = np.array([chunk.offsets for chunk in entry.chunks], np.int64).reshape(ranks)
            self._boxes[name] = starts, starts + np.array([c.sizes for c in entry.chunks], np.int64).reshape(ranks)
        starts, ends = self._boxes[name]
        low = np.array(offset, np.int64)
        near = np.flatnonzero(((starts < low + np.array(shape, np.int64)) & (ends > low)).all(axis=1))
        box = dcp.ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
        return self._read(name, [entry.chunks[place] for place in near], box)

    def _read(self, name: str, chunks: list[dcp.ChunkStorageMetadata], wanted: dcp.ChunkStorageMetadata) -> Tensor:
        entry = self._tensors[name]
        box = torch.empty(wanted.sizes, dtype=entry.properties.dtype)
        some = dcp.TensorStorageMetadata(entry.properties, entry.size, chunks)
        items = create_read_items_for_chunk_list(name, some, [wanted])
        if (filled := sum(math.prod(item.lengths) for item in items)) != box.numel():
            raise CheckpointError(
                f"{self.folder} contains {filled} of {box.numel()} requested values of {name}; use another checkpoint"
            )
        try:
            self._files.read_data(LoadPlan(items), _BoxPlanner(box)).wait()
        except Exception as error:  # a short or damaged file fails in many ways
            files = {self._storage[item.storage_index].relative_path for item in items}
            paths = ", ".join(str(self.folder / file) for file in sorted(files))
            # torch's message would suggest weights_only=False, which runs code from the file
            reason = "its bytes are not a tensor" if isinstance(error, pickle.UnpicklingError) else error
            raise CheckpointError(f"cannot read {name} from {paths}: {reason}; the checkpoint is damaged") from error
        return box


class DistWriter:
    """Writes a torch_dist checkpoint part by part; memory use is one part. `close` syncs the files to disk."""

    def __init__(self, folder: Path, *, max_bytes: int = FILE_BYTES) -> None:
        self.folder, self._max_bytes = folder, max_bytes
        self._entries: dict[str, dcp.STORAGE_TYPES] = {}
        self._results: list[WriteResult] = []
        self._count, self._file = 0, cast("BinaryIO | None", None)

    def add(self, name: str, part: Tensor, *, offset: Sequence[int], shape: Sequence[int]) -> None:
        """Write a part of tensor `name` that begins at `offset`; `shape` is that of the whole tensor."""
        chunk = dcp.ChunkStorageMetadata(torch.Size(offset), part.shape)
        entry = self._entries.get(name)
        if not isinstance(entry, dcp.TensorStorageMetadata):
            properties = dcp.TensorProperties(dtype=part.dtype)
            entry = self._entries[name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), [])
        entry.chunks.append(chunk)
        self._write(dcp.MetadataIndex(name, chunk.offsets), part.detach().cpu().clone(), part.nbytes)

    def add_empty_object(self, name: str) -> None:
        """Write an object that is None; Megatron-core stores objects in lists."""
        self._entries[name] = dcp.BytesStorageMetadata()
        self._write(dcp.MetadataIndex(name), [None], 0)

    def _write(self, index: dcp.MetadataIndex, value: Any, num_bytes: int) -> None:
        if self._file is not None and self._file.tell() and self._file.tell() + num_bytes > self._max_bytes:
            self._end_file()
        if self._file is None:
            self._file = (self.folder / f"__0_{self._count}.distcp").open("wb")
        start = self._file.tell()
        torch.save(value, self._file)
        info = _StorageInfo(f"__0_{self._count}.distcp", start, self._file.tell() - start)
        self._results.append(WriteResult(index, info.length, info))

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self._count = None, self._count + 1

    def close(self, common: Mapping[str, Any]) -> None:
        """Write Megatron-core's common state and the index, without which the folder is not a checkpoint."""
        self._end_file()
        torch.save(dict(common), self.folder / COMMON)
        FileSystemWriter(self.folder).finish(dcp.Metadata(self._entries), [self._results])
        versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        versions |= {"common_backend": "torch", "common_backend_version": 1}
        (self.folder / VERSION).write_text(json.dumps(versions))
