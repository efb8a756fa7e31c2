"""Reads the header of a safetensors file: the name, dtype, shape and place of each tensor.

A file has 8 bytes of header length (little-endian), a JSON header with each tensor's dtype, shape and offsets, and the
data, so its header determines the size of the file. Headers that furlong writes also have an entry `CHECKSUMS`: that of
the header's content, and one for each block of each tensor (`core.verified_tensors`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from furlong.core.file_kind import irregular_kind
from furlong.core.json_values import parse_json
from furlong.core.text import shortened
from furlong.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"  # start of a file from a clone without Git LFS
CHECKSUMS = "furlong_checksums"  # name of the entry
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# The format's dtypes, except for complex numbers, which no model has.
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64"), 64),
}


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a header. `dtype` as in the file (F32, BF16, I32, ...); `offset` from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int = 0


@dataclass(frozen=True)
class Shard:
    """A safetensors file: tensors and texts of its header, the size that follows from it, and its actual size."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    needed_bytes: int
    file_bytes: int
    header_bytes: int
    texts: Mapping[str, str]


def read_header(path: Path) -> Shard:
    """Read the header of a safetensors file. Raises CheckpointError if it is damaged or something else."""
    try:
        if (kind := irregular_kind(path)) is not None:
            raise CheckpointError(f"{path.name} is {kind}, not a file")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start + file.read(len(LFS_POINTER) - 8) == LFS_POINTER:
                raise CheckpointError(f"{path.name} is a Git LFS pointer of {size} bytes, not the file itself")
            length = header_length(path, start)
            file.seek(8)
            body = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from error
    return parse_header(path, body, length, size)


def header_length(path: Path, start: bytes) -> int:
    """Return the length of the JSON header from the first 8 bytes of a file. Raises CheckpointError."""
    if len(start) < 8:
        raise CheckpointError(f"{path.name} has {len(start)} bytes, too few for a header")
    (length,) = struct.unpack("<Q", start)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path.name} is not a safetensors file: its header would have {length} bytes")
    return length


def parse_header(path: Path, body: bytes, length: int, size: int) -> Shard:
    """Parse the JSON header of a file of `size` bytes. Raises CheckpointError if it is damaged or cut off."""
    if len(body) < length:
        raise CheckpointError(f"{path.name} is cut off: {size} bytes, but its header alone has {8 + length}")
    try:
        entries: dict[str, Any] = parse_json(body)
        texts = dict(entries.pop("__metadata__", None) or {})
        tensors = {name: _stored_tensor(name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path.name} has a damaged header ({type(error).__name__}: {error})") from error
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda each: (each[1].offset, each[1].num_bytes)):
        if tensor.offset != end:
            raise CheckpointError(
                f"{path.name} has a damaged header: tensor {name} begins at byte {tensor.offset}, but the "
                f"one before it ends at {end}"
            )
        end += tensor.num_bytes
    content = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    if CHECKSUMS in texts and not str(texts[CHECKSUMS]).startswith(header_checksum(content, texts)):
        raise CheckpointError(f"{path.name} has another header than when it was saved: its checksum differs")
    return Shard(path, tensors, end, size, 8 + length, texts)


def header_checksum(tensors: Mapping[str, tuple[str, tuple[int, ...]]], texts: Mapping[str, str]) -> str:
    """Return the xxh3-128 checksum of what a header contains: dtype and shape of each tensor, and other entries."""
    entries = sorted((name, text) for name, text in texts.items() if name != CHECKSUMS)
    return xxhash.xxh3_128_hexdigest(repr((sorted(tensors.items()), entries)).encode("utf-8", "surrogatepass"))


def _stored_tensor(name: str, entry: dict[str, Any], start: int) -> StoredTensor:
    """Read one entry. Raises ValueError, KeyError or TypeError if it contradicts itself or has an unknown dtype."""
    dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in BITS:
        raise ValueError(f"tensor {name} has the dtype {shortened(dtype)}, which models are not loaded from")
    if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
        raise ValueError(f"tensor {name} has the shape {shortened(shape)} and the offsets {first} to {last}")
    if (last - first) * 8 != math.prod(shape) * BITS[dtype]:
        raise ValueError(f"tensor {name}, {dtype} of shape {shortened(shape)}, has {last - first} bytes")
    return StoredTensor(dtype, tuple(shape), last - first, start + first)
