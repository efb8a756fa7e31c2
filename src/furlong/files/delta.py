"""The difference between two versions of a model's weights, as files.

`delta.json` has the version, the base version, and for each tensor: dtype, shape, position of its bytes in `delta.bin`,
and the checksum of the resulting tensor. The bytes are zstd-compressed, in one of two encodings:

xor: the exclusive or of the bits of both tensors. A small step changes the low bits of few elements, so most bytes are
zero.
overwrite: the positions of the changed elements, as differences, and their new values.

An unchanged tensor has no bytes. Applying a delta to the wrong base gives a wrong checksum.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.weights import NamedTensor, WeightSource, dtype_of
from furlong.errors import SyncError

Encoding = Literal["xor", "overwrite"]
Checksum = Literal["xxh3-128", "adler32"]
Bytes = NDArray[np.uint8]

MANIFEST, DATA = "delta.json", "delta.bin"
FORMAT = "furlong-delta-1"
REMEDY = "the next weight update after a restart with --load writes all tensors"
ZSTD_LEVEL = 1


@dataclass(frozen=True)
class Entry:
    """One tensor: `size` bytes at `offset` in `delta.bin`; 0 if it did not change."""

    dtype: str
    shape: list[int]
    offset: int
    size: int
    checksum: str


@dataclass(frozen=True)
class Delta:
    """A delta in a folder. `source` applies it."""

    folder: Path
    version: int
    base_version: int
    encoding: Encoding
    checksum: Checksum
    tensors: Mapping[str, Entry]

    @staticmethod
    def open(folder: Path) -> Delta:
        """Read the manifest. Raises SyncError if it is missing or invalid."""
        path = folder / MANIFEST
        try:
            data: dict[str, Any] = json.loads(path.read_bytes())
            for name, known in (
                ("format", (FORMAT,)),
                ("encoding", get_args(Encoding)),
                ("checksum", get_args(Checksum)),
            ):
                if data[name] not in known:
                    raise ValueError(f"its {name} is {data[name]!r}, expected {' or '.join(known)}")
            entries = {name: Entry(**fields) for name, fields in data["tensors"].items()}
            for entry in entries.values():
                dtype_of(entry.dtype)
            return Delta(folder, data["version"], data["base_version"], data["encoding"], data["checksum"], entries)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise SyncError(f"{path} is not a valid delta manifest: {error}; {REMEDY}") from error

    def source(self, base: Callable[[str], Tensor]) -> WeightSource:
        """Return the tensors of `version`, computed from those of `base_version` and verified one by one.

        Raises SyncError for a base with another dtype or shape, and for a result with another checksum.
        """

        def read() -> Iterator[NamedTensor]:
            try:
                with (self.folder / DATA).open("rb") as file:
                    for name, entry in self.tensors.items():
                        file.seek(entry.offset)
                        yield name, self._applied(name, base(name), file.read(entry.size))
            except OSError as error:
                raise SyncError(f"{self.folder / DATA} cannot be read: {error}; {REMEDY}") from error

        return WeightSource(read)

    def _applied(self, name: str, base: Tensor, data: bytes) -> Tensor:
        entry = self.tensors[name]
        if base.dtype != dtype_of(entry.dtype) or list(base.shape) != entry.shape:
            raise SyncError(
                f"{name} is {base.dtype} {list(base.shape)} here, the delta has {entry.dtype} {entry.shape}; a delta "
                "applies to weights as they were sent, so trainer and engine need the same dtype"
            )
        if len(data) != entry.size:
            raise SyncError(
                f"{self.folder / DATA} ends within {name}: it was not written or copied completely; {REMEDY}"
            )
        try:
            result = decoded(data, bytes_of(base), base.element_size(), self.encoding)
        except (zstandard.ZstdError, ValueError, IndexError, TypeError, MemoryError) as error:
            raise SyncError(f"the delta of {name} in {self.folder / DATA} is corrupt: {error!r}; {REMEDY}") from error
        if digest(result, self.checksum) != entry.checksum:
            raise SyncError(
                f"{name} has a wrong checksum after the delta to version {self.version}: {self.folder / DATA} is "
                f"corrupt, or the weights that it was applied to are not version {self.base_version}; {REMEDY}"
            )
        if not len(result):
            return torch.empty(base.shape, dtype=base.dtype)
        return torch.from_numpy(result).view(base.dtype).view(base.shape)


class DeltaWriter:
    """Writes one delta, encoding several tensors in parallel.

    `base` has the tensors of the last update and is overwritten with the new ones.
    """

    def __init__(self, folder: Path, base: dict[str, Tensor], *, encoding: Encoding, checksum: Checksum) -> None:
        self._folder, self._base = folder, base
        self._encoding: Encoding = encoding
        self._checksum: Checksum = checksum
        self.num_bytes = 0

    def write(self, tensors: Iterable[NamedTensor], *, version: int, base_version: int) -> None:
        """Write `delta.bin` and `delta.json`. Raises SyncError if the set of tensors differs from the base."""
        entries: dict[str, Entry] = {}
        threads = max(1, min(8, (os.cpu_count() or 1)))
        with (self._folder / DATA).open("wb") as out, ThreadPoolExecutor(threads) as pool:
            for name, data, entry in _in_order(pool, self._encode, tensors, ahead=threads):
                out.write(data)
                entries[name] = Entry(entry.dtype, entry.shape, self.num_bytes, len(data), entry.checksum)
                self.num_bytes += len(data)
        if missing := self._base.keys() - entries.keys():
            raise SyncError(f"{len(missing)} tensors of version {base_version} are missing: {min(missing)}, ...")
        manifest = {
            "format": FORMAT,
            "version": version,
            "base_version": base_version,
            "encoding": self._encoding,
            "checksum": self._checksum,
            "tensors": {name: asdict(entry) for name, entry in entries.items()},
        }
        (self._folder / MANIFEST).write_text(json.dumps(manifest))

    def _encode(self, item: NamedTensor) -> tuple[str, bytes, Entry]:
        name, tensor = item
        if name not in self._base:
            raise SyncError(f"{name} was not in the previous weight update; a delta needs the same tensors")
        base = self._base[name]
        new, old = bytes_of(tensor), bytes_of(base)
        data = encoded(new, old, tensor.element_size(), self._encoding)
        entry = Entry(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), 0, 0, digest(new, self._checksum))
        base.copy_(tensor)
        return name, data, entry


def bytes_of(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor on the host; a view if it is contiguous there."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)


def digest(data: Bytes, kind: Checksum) -> str:
    """Return a checksum in hex. Raises SyncError for an unknown kind."""
    if kind == "xxh3-128":
        return xxhash.xxh3_128_hexdigest(data)  # pyright: ignore[reportArgumentType]  numpy arrays are buffers
    if kind == "adler32":
        return f"{zlib.adler32(data.data):08x}"
    raise SyncError(f"unknown delta checksum {kind!r}, expected xxh3-128 or adler32")


def encoded(new: Bytes, old: Bytes, width: int, encoding: Encoding) -> bytes:
    """Encode what turns `old` into `new`, for elements of `width` bytes; empty if they are equal."""
    changed = np.bitwise_xor(_words(new), _words(old))
    if not changed.any():
        return b""
    if encoding == "xor":
        return zstandard.ZstdCompressor(ZSTD_LEVEL).compress(changed.data)
    positions = np.flatnonzero(changed.view(f"u{width}"))
    steps = np.diff(positions, prepend=0)
    kind = "u2" if steps.max() < 2**16 else "u4" if steps.max() < 2**32 else "u8"
    values = new.view(f"u{width}")[positions]
    plain = np.int64(len(positions)).tobytes() + kind.encode() + steps.astype(kind).tobytes() + values.tobytes()
    return zstandard.ZstdCompressor(ZSTD_LEVEL).compress(plain)


def decoded(data: bytes, old: Bytes, width: int, encoding: Encoding) -> Bytes:
    """Decode into a copy of `old`. Raises ZstdError, ValueError, IndexError or TypeError for invalid data."""
    if not data:
        return old.copy()
    most = 10 + len(old) + 8 * (len(old) // width)  # a step and a value for each element
    if (size := zstandard.frame_content_size(data)) > most:
        raise ValueError(f"it claims {size} bytes, at most {most} are possible")
    plain = zstandard.ZstdDecompressor().decompress(data, max_output_size=most)
    if encoding == "xor":
        return np.bitwise_xor(_words(np.frombuffer(plain, np.uint8)), _words(old)).view(np.uint8)
    count = int(np.frombuffer(plain, np.int64, 1)[0])
    steps = np.frombuffer(plain, plain[8:10].decode(), count, 10)
    values = np.frombuffer(plain, f"u{width}", count, 10 + steps.nbytes)
    result = old.copy()
    result.view(f"u{width}")[np.cumsum(steps.astype(np.int64))] = values
    return result


def _words(data: Bytes) -> NDArray[Any]:
    """View bytes as the widest words that divide them."""
    return data.view(np.uint64) if len(data) % 8 == 0 else data


def _in_order(
    pool: ThreadPoolExecutor,
    work: Callable[[NamedTensor], tuple[str, bytes, Entry]],
    items: Iterable[NamedTensor],
    *,
    ahead: int,
) -> Iterator[tuple[str, bytes, Entry]]:
    """Map with at most `ahead` items running, to bound the number of tensors in memory."""
    running: list[Any] = []
    for item in items:
        running.append(pool.submit(work, item))
        if len(running) >= ahead:
            yield running.pop(0).result()
    for future in running:
        yield future.result()
