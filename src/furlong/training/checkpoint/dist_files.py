"""Read and write checkpoints of torch.distributed.checkpoint, the format that Megatron-core calls torch_dist.

    .metadata                  index: the tensors, and the file, offset and length of each chunk (a pickle)
    __0_0.distcp ...           the chunks, one after another, each as torch.save writes it
    metadata.json, common.pt   Megatron-core's: format version; arguments and counters (a pickle)

No code in a checkpoint is run: `restricted_unpickler` reads the index and common.pt, and chunks are loaded with
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.storage import WriteResult

from furlong.core.text import abbreviate
from furlong.errors import CheckpointError
from furlong.files.checkpoint_folder import DIST_INDEX as INDEX
from furlong.training.checkpoint.restricted_unpickler import unpickle

VERSION = "metadata.json"
COMMON = "common.pt"
FILE_BYTES = 4 * 2**30
OPTIMIZER = re.compile(r"(^|\.)optimizer\.")  # names of optimizer states
ITERATION = re.compile(r"iter_(\d+)")  # Megatron-LM's folder names
SHOWN = 3
# Ends of class names in the index.
TENSOR, INDEX_KEY = "metadata.TensorStorageMetadata", "metadata.MetadataIndex"
Location = tuple[str, int, int]  # file, offset and length in bytes


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: its offset and shape in the tensor, and its bytes in a file."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int
    is_plain: bool


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the index."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def near(self, offset: Sequence[int], shape: Sequence[int]) -> Iterable[Chunk]:
        """Return the chunks that may overlap a box.

        Uses an index over the leading axes that are stored row by row (layers, experts), and a binary search for 1-D
        tensors, which may have thousands of chunks.
        """
        if len(self.shape) == 1:
            first = bisect_right(self._ordered, offset[0], key=lambda chunk: chunk.offset[0]) - 1
            end = bisect_left(self._ordered, offset[0] + shape[0], key=lambda chunk: chunk.offset[0])
            return self._ordered[max(first, 0) : end]
        num_axes, places = self._places
        spans = [range(start, start + size) for start, size in zip(offset[:num_axes], shape[:num_axes], strict=True)]
        if math.prod(map(len, spans)) >= len(places):
            return self.chunks
        return chain.from_iterable(places.get(index, ()) for index in product(*spans))

    @cached_property
    def _ordered(self) -> list[Chunk]:
        return sorted((chunk for chunk in self.chunks if chunk.shape[0]), key=lambda chunk: chunk.offset[0])

    @cached_property
    def _places(self) -> tuple[int, dict[tuple[int, ...], list[Chunk]]]:
        """Return how many leading axes have size 1 in every chunk, and the chunks by their offsets along these axes."""
        num_axes = 0
        while num_axes < len(self.shape) and all(chunk.shape[num_axes] == 1 for chunk in self.chunks):
            num_axes += 1
        places: dict[tuple[int, ...], list[Chunk]] = {}
        for chunk in self.chunks:
            places.setdefault(chunk.offset[:num_axes], []).append(chunk)
        return num_axes, places


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
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (entry for entry in archive.namelist() if entry.endswith("/data.pkl"))
            common = unpickle(archive.read(name), any_class=True)
    except (zipfile.BadZipFile, ValueError, CheckpointError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; copy the checkpoint again, or use another") from error
    return cast("Mapping[str, Any]", common) if isinstance(common, dict) else {}


class DistReader:
    """Reads whole tensors or boxes of them from a torch_dist checkpoint of any layout.

    Raises CheckpointError if the checkpoint is damaged or not in this format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / INDEX
        try:
            stat = path.stat()
            self._tensors, self._objects = _index(path, stat.st_mtime_ns, stat.st_size)
        except (OSError, CheckpointError, AttributeError, TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"cannot read {path}: {error}; use another checkpoint") from error

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors, optimizer states included."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor."""
        return self._tensors[name].dtype

    def files(self) -> dict[str, int]:
        """Return the files that the index names, with the minimum size of each in bytes."""
        sizes: dict[str, int] = {}
        chunks = ((chunk.file, chunk.start, chunk.length) for entry in self._tensors.values() for chunk in entry.chunks)
        for file, start, length in chain(chunks, self._objects.values()):
            sizes[file] = max(sizes.get(file, 0), start + length)
        return sizes

    @property
    def has_optimizer(self) -> bool:
        """Whether the checkpoint contains optimizer states, as tensors or as pickled objects."""
        return any(OPTIMIZER.search(name) for name in (*self._tensors, *self._objects))

    def problems(self) -> list[str]:
        """Return missing and truncated files and tensors with missing chunks, from the index and file sizes alone."""
        problems: list[str] = []
        if not (self.folder / VERSION).is_file():
            problems.append(f"{VERSION} is missing, which Megatron-core writes last: the save was interrupted")
        for file, size in sorted(self.files().items()):
            path = self.folder / file
            if not path.is_file():
                count = sum(any(chunk.file == file for chunk in entry.chunks) for entry in self._tensors.values())
                problems.append(f"{file} is missing, with parts of {count} tensors")
            elif (actual := path.stat().st_size) < size:
                problems.append(f"{file} is truncated: it has {actual} bytes, {INDEX} expects at least {size}")
        for name, entry in sorted(self._tensors.items()):
            stored, expected = sum(math.prod(chunk.shape) for chunk in entry.chunks), math.prod(entry.shape)
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
            yield self._read_chunk(name, chunk)

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read the box of `shape` at `offset` from the chunks that it overlaps."""
        entry = self._tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.folder} has no tensor {name}; it is incomplete or of another model, use another checkpoint"
            )
        box = torch.empty(tuple(shape), dtype=entry.dtype)
        num_filled = 0
        for chunk in entry.near(offset, shape):
            low = [max(a, b) for a, b in zip(offset, chunk.offset, strict=True)]
            ends = zip(offset, shape, chunk.offset, chunk.shape, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if any(first >= last for first, last in zip(low, high, strict=True)):
                continue
            source, target = (
                tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
                for origin in (chunk.offset, offset)
            )
            box[target] = self._read_chunk(name, chunk)[source]
            num_filled += math.prod(b - a for a, b in zip(low, high, strict=True))
        if num_filled != box.numel():
            raise CheckpointError(
                f"{self.folder} contains {num_filled} of {box.numel()} requested values of {name}; use another "
                "checkpoint"
            )
        return box

    def _read_chunk(self, name: str, chunk: Chunk) -> Tensor:
        path = self.folder / chunk.file
        if path.parent != self.folder:
            raise CheckpointError(f"{self.folder / INDEX} names a file outside its folder: {chunk.file}")
        if not chunk.is_plain:
            raise CheckpointError(f"{path}: {name} is compressed, which is not supported; save it uncompressed")
        try:
            with path.open("rb") as file:
                file.seek(chunk.start)
                data = file.read(chunk.length)
            part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # a short or damaged file fails in many ways
            # torch's message would suggest weights_only=False, which runs code from the file
            reason = "its bytes are not a tensor" if type(error).__name__ == "UnpicklingError" else error
            raise CheckpointError(f"cannot read {name} from {path}: {reason}; the checkpoint is damaged") from error
        if not isinstance(part, Tensor) or tuple(part.shape) != chunk.shape:
            raise CheckpointError(f"{path} does not contain {name} where {self.folder / INDEX} places it")
        return part


@lru_cache(maxsize=1)
def _index(path: Path, _mtime_ns: int, _size: int) -> tuple[dict[str, TensorEntry], dict[str, Location]]:
    """Return the tensors of an index and the locations of its other objects; cached, as a large one takes seconds."""
    index = unpickle(path.read_bytes())
    storage = {
        (key.get("fqn"), tuple(key.get("offset") or ())): info  # an object that is not a tensor has no offset
        for key, info in index.get("storage_data").items()
        if key.name.endswith(INDEX_KEY)
    }
    tensors = _entries(index, storage)
    others = frozenset(index.get("state_dict_metadata")) - tensors.keys()
    return tensors, {name: _location(storage[name, ()]) for name in others}


def _location(info: Any) -> Location:
    return str(info.get("relative_path")), int(info.get("offset")), int(info.get("length"))


def _entries(index: Any, storage: Mapping[Any, Any]) -> dict[str, TensorEntry]:
    """Return the tensors of an index. Raises one of several errors if it is malformed."""
    entries: dict[str, TensorEntry] = {}
    for name, entry in index.get("state_dict_metadata").items():
        if not entry.name.endswith(TENSOR):
            continue
        chunks: list[Chunk] = []
        for chunk in entry.get("chunks"):
            offset = tuple(chunk.get("offsets"))
            info = storage[name, offset]
            is_plain = not info.get("transform_descriptors")
            chunks.append(Chunk(offset, tuple(chunk.get("sizes")), *_location(info), is_plain))
        dtype = entry.get("properties").state[0]
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{name} has no dtype")
        entries[name] = TensorEntry(tuple(entry.get("size")), dtype, tuple(chunks))
    return entries


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
