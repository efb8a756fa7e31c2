"""Folders in the layout of torch.distributed.checkpoint, which Megatron-core calls torch_dist: read, and written.

    .metadata            which tensors there are, and which file holds which part of each (a pickle)
    __0_0.distcp ...     the parts, one after the other, each as torch.save writes it
    metadata.json, common.pt   Megatron-core's: the version of the layout; arguments and counters (a pickle)

Nothing is unpickled: the index and common.pt, which holds whatever its writer liked, are read by `inert_pickle`, which
makes no objects, and the parts by PyTorch's loader for weights, which makes tensors only.
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

from furlong.core.checkpoint_folder import DIST_INDEX as INDEX
from furlong.core.text import abbreviate
from furlong.errors import CheckpointError
from furlong.training.checkpoint.inert_pickle import read_inert

VERSION = "metadata.json"
COMMON = "common.pt"
FILE_BYTES = 4 * 2**30
OPTIMIZER = re.compile(r"(^|\.)optimizer\.")  # in names of its states
ITERATION = re.compile(r"iter_(\d+)")  # names of Megatron-LM's folders
SHOWN = 3
# Classes of the index by the end of their names.
TENSOR, INDEX_KEY = "metadata.TensorStorageMetadata", "metadata.MetadataIndex"
Place = tuple[str, int, int]  # a file, where in it, how many bytes


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: where it begins, how large it is, and which bytes of which file hold it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int
    is_plain: bool


@dataclass(frozen=True)
class Entry:
    """A tensor of the index."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def near(self, offset: Sequence[int], shape: Sequence[int]) -> Iterable[Chunk]:
        """The chunks that a box may overlap: where layers and experts are stored one by one, those of its own only.

        A buffer of many parameters has a chunk of each, of which only a few are wanted at a time.
        """
        if len(self.shape) == 1:
            first = bisect_right(self._ordered, offset[0], key=lambda chunk: chunk.offset[0]) - 1
            end = bisect_left(self._ordered, offset[0] + shape[0], key=lambda chunk: chunk.offset[0])
            return self._ordered[max(first, 0) : end]
        num_axes, places = self._places
        spans = [range(start, start + size) for start, size in zip(offset[:num_axes], shape[:num_axes], strict=True)]
        if math.prod(map(len, spans)) >= len(places):
            return self.chunks
        return chain.from_iterable(places.get(where, ()) for where in product(*spans))

    @cached_property
    def _ordered(self) -> list[Chunk]:
        return sorted((chunk for chunk in self.chunks if chunk.shape[0]), key=lambda chunk: chunk.offset[0])

    @cached_property
    def _places(self) -> tuple[int, dict[tuple[int, ...], list[Chunk]]]:
        """Along how many of the first axes all chunks have one row, and the chunks by where that is."""
        num_axes = 0
        while num_axes < len(self.shape) and all(chunk.shape[num_axes] == 1 for chunk in self.chunks):
            num_axes += 1
        places: dict[tuple[int, ...], list[Chunk]] = {}
        for chunk in self.chunks:
            places.setdefault(chunk.offset[:num_axes], []).append(chunk)
        return num_axes, places


def is_dist_folder(folder: Path) -> bool:
    """Whether a folder is in this layout."""
    return (folder / INDEX).is_file()


def common_of(folder: Path) -> Mapping[str, Any]:
    """What Megatron-LM noted beside the tensors, as `read_inert` gives it: arguments, counters; {} without any.

    Raises CheckpointError if it is damaged.
    """
    path = folder / COMMON
    if not path.is_file():
        return {}
    found = _inert_object(path, path)
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def _inert_object(source: Path | BinaryIO, path: Path) -> Any:
    """What torch.save wrote, without making it. `path` is named where it is damaged."""
    try:
        with zipfile.ZipFile(source) as archive:
            (name,) = (entry for entry in archive.namelist() if entry.endswith("/data.pkl"))
            return read_inert(archive.read(name))
    except (zipfile.BadZipFile, ValueError, CheckpointError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


class DistFiles:
    """Reads tensors, or parts of them, from such a folder. Raises CheckpointError for a damaged or a foreign one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / INDEX
        try:
            found = path.stat()
            self._tensors, self._objects = _index(path, found.st_mtime_ns, found.st_size)
        except (OSError, CheckpointError, AttributeError, TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"cannot read {folder / INDEX}: {error}; give another checkpoint") from error

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors, those of the optimizer too."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """What it is stored in."""
        return self._tensors[name].dtype

    def files(self) -> dict[str, int]:
        """The files that hold parts and objects, and the bytes that each must have at least."""
        needed: dict[str, int] = {}
        parts = ((part.file, part.start, part.length) for entry in self._tensors.values() for part in entry.chunks)
        for file, start, length in chain(parts, self._objects.values()):
            needed[file] = max(needed.get(file, 0), start + length)
        return needed

    @property
    def has_optimizer(self) -> bool:
        """Whether there are states of an optimizer beside the weights, as tensors or as pickled objects."""
        return any(OPTIMIZER.search(name) for name in (*self._tensors, *self._objects))

    def objects(self, ending: str) -> dict[str, Any]:
        """What the objects hold whose names end so, up to the number of their part; nothing of it is made."""
        found: dict[str, Any] = {}
        for name, (file, start, length) in self._objects.items():
            if name.partition("/shard_")[0].endswith(ending):
                path = self._path(file)
                found[name] = _inert_object(io.BytesIO(_bytes(path, start, length)), path)
        return found

    def problems(self) -> list[str]:
        """What is missing: files, their ends, parts of tensors. Nothing but the index is read."""
        found: list[str] = []
        if not (self.folder / VERSION).is_file():
            found.append(f"{VERSION} is missing, which Megatron-core writes last: the save was cut off")
        for file, needed in sorted(self.files().items()):
            path = self.folder / file
            if not path.is_file():
                lost = sum(any(chunk.file == file for chunk in entry.chunks) for entry in self._tensors.values())
                found.append(f"{file} is missing, with parts of {lost} tensors")
            elif (size := path.stat().st_size) < needed:
                found.append(f"{file} is cut off: it has {size} bytes, {INDEX} names parts up to {needed}")
        for name, entry in sorted(self._tensors.items()):
            held, wanted = sum(math.prod(chunk.shape) for chunk in entry.chunks), math.prod(entry.shape)
            if held != wanted:
                found.append(f"{name}: its parts hold {held} of {wanted} values")
        return found

    def check(self) -> None:
        """Raise CheckpointError if `problems` finds some."""
        if found := self.problems():
            what = abbreviate(found, SHOWN, separator="; ")
            raise CheckpointError(f"{self.folder} is not complete: {what}; copy it again, or take another")

    def parts(self, name: str) -> Iterator[Tensor]:
        """Read the parts of a tensor as they are stored, one at a time."""
        for chunk in self._tensors[name].chunks:
            yield self._part(name, chunk)

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read the box of `shape` that begins at `offset`, from the parts that it overlaps."""
        entry = self._tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} has no tensor {name}; it is of another model, or incomplete")
        found = torch.empty(tuple(shape), dtype=entry.dtype)
        num_filled = 0
        for chunk in entry.near(offset, shape):
            low = [max(a, b) for a, b in zip(offset, chunk.offset, strict=True)]
            ends = zip(offset, shape, chunk.offset, chunk.shape, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if any(first >= last for first, last in zip(low, high, strict=True)):
                continue
            part = self._part(name, chunk)
            there, here = (
                tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
                for origin in (chunk.offset, offset)
            )
            found[here] = part[there]
            num_filled += math.prod(b - a for a, b in zip(low, high, strict=True))
        if num_filled != found.numel():
            raise CheckpointError(f"{self.folder} holds {num_filled} of {found.numel()} wanted values of {name}")
        return found

    def _part(self, name: str, chunk: Chunk) -> Tensor:
        path = self._path(chunk.file)
        if not chunk.is_plain:
            raise CheckpointError(f"{path}: {name} is compressed, which is not read; save the checkpoint without that")
        try:
            data = _bytes(path, chunk.start, chunk.length)
            part = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a short or damaged file makes of it
            # torch's own text of that advises to run what is in the file
            why = "its bytes are no tensor" if type(error).__name__ == "UnpicklingError" else error
            raise CheckpointError(f"cannot read {name} from {path}: {why}; the checkpoint is damaged") from error
        if not isinstance(part, Tensor) or tuple(part.shape) != chunk.shape:
            raise CheckpointError(f"{path} does not hold {name} where {self.folder / INDEX} says")
        return part

    def _path(self, file: str) -> Path:
        path = self.folder / file
        if path.parent != self.folder:
            raise CheckpointError(f"{self.folder / INDEX} names a file outside of its folder: {file}")
        return path


def _bytes(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


@lru_cache(maxsize=1)
def _index(path: Path, _mtime_ns: int, _size: int) -> tuple[dict[str, Entry], dict[str, Place]]:
    """The tensors of an index and where its other objects are: kept, as to read a large one takes seconds."""
    index = read_inert(path.read_bytes())
    places = {
        (key.get("fqn"), _numbers(key.get("offset"))): place
        for key, place in index.get("storage_data").items()
        if key.name.endswith(INDEX_KEY)
    }
    tensors = _entries(index, places)
    others = frozenset(index.get("state_dict_metadata")) - tensors.keys()
    return tensors, {name: _place(places[name, ()]) for name in others}


def _place(place: Any) -> Place:
    return str(place.get("relative_path")), int(place.get("offset")), int(place.get("length"))


def _entries(index: Any, places: Mapping[Any, Any]) -> dict[str, Entry]:
    """The tensors of an index. Raises one of several errors if it is none."""
    found: dict[str, Entry] = {}
    for name, entry in index.get("state_dict_metadata").items():
        if not entry.name.endswith(TENSOR):
            continue
        chunks: list[Chunk] = []
        for chunk in entry.get("chunks"):
            offset = _numbers(chunk.get("offsets"))
            place = places[name, offset]
            is_plain = not place.get("transform_descriptors")
            chunks.append(Chunk(offset, _numbers(chunk.get("sizes")), *_place(place), is_plain))
        dtype = getattr(torch, entry.get("properties").state[0].name.removeprefix("torch."))
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{name} has no dtype")
        found[name] = Entry(_numbers(entry.get("size")), dtype, tuple(chunks))
    return found


def _numbers(size: Any) -> tuple[int, ...]:
    """A torch.Size that was not made; an object that is no tensor has none."""
    return () if size is None else tuple(int(number) for number in size.args[0])


class DistWriter:
    """Writes such a folder, part by part; only what is added is held. Files are forced to the disk by `close`."""

    def __init__(self, folder: Path, *, max_bytes: int = FILE_BYTES) -> None:
        self.folder, self._max_bytes = folder, max_bytes
        self._entries: dict[str, dcp.STORAGE_TYPES] = {}
        self._results: list[WriteResult] = []
        self._count, self._file = 0, cast("BinaryIO | None", None)

    def add(self, name: str, part: Tensor, *, offset: Sequence[int], shape: Sequence[int]) -> None:
        """Write the part of tensor `name`, of the whole `shape`, that begins at `offset`."""
        chunk = dcp.ChunkStorageMetadata(torch.Size(offset), part.shape)
        entry = self._entries.get(name)
        if not isinstance(entry, dcp.TensorStorageMetadata):
            properties = dcp.TensorProperties(dtype=part.dtype)
            entry = self._entries[name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), [])
        entry.chunks.append(chunk)
        self._write(dcp.MetadataIndex(name, chunk.offsets), part.detach().cpu().clone(), part.nbytes)

    def add_nothing(self, name: str) -> None:
        """Write an object without content; Megatron-core stores objects in lists."""
        self._entries[name] = dcp.BytesStorageMetadata()
        self._write(dcp.MetadataIndex(name), [None], 0)

    def _write(self, index: dcp.MetadataIndex, value: Any, num_bytes: int) -> None:
        if self._file is not None and self._file.tell() and self._file.tell() + num_bytes > self._max_bytes:
            self._end_file()
        if self._file is None:
            self._file = (self.folder / f"__0_{self._count}.distcp").open("wb")
        start = self._file.tell()
        torch.save(value, self._file)
        place = _StorageInfo(f"__0_{self._count}.distcp", start, self._file.tell() - start)
        self._results.append(WriteResult(index, place.length, place))

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self._count = None, self._count + 1

    def close(self, common: Mapping[str, Any]) -> None:
        """Write the index, and what Megatron-core calls the common state; without these the folder is none."""
        self._end_file()
        torch.save(dict(common), self.folder / COMMON)
        FileSystemWriter(self.folder).finish(dcp.Metadata(self._entries), [self._results])
        versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        versions |= {"common_backend": "torch", "common_backend_version": 1}
        (self.folder / VERSION).write_text(json.dumps(versions))
