"""Safetensors files with a checksum for each block, so that any part of a tensor is verified as it is read.

The checksums are those of a manifest or, in model folders that furlong writes, those of the file's own header.

Blocks begin at the start of the file, at the end of the header, at each tensor, and every MiB within these. So a reader
of whole tensors, or of some of their rows, needs only the blocks that it reads, in any order. What is compared is the
memory that the reader uses, not the file, which may change between two reads.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Self

import xxhash

from furlong.core.file_kind import require_file
from furlong.errors import CheckpointError
from furlong.files.checksums import changed_file
from furlong.files.safetensors_header import (
    CHECKSUMS,
    Shard,
    StoredTensor,
    header_checksum,
    header_length,
    parse_header,
    read_header,
)

BLOCK_BYTES = 1 << 20
DIGITS = 32  # of a checksum


def block_places(shard: Shard) -> list[int]:
    """Return where the blocks of a file begin, in order, and its end."""
    starts = {0, shard.header_bytes, shard.needed_bytes, *(tensor.offset for tensor in shard.tensors.values())}
    places = [place for start, end in pairwise(sorted(starts)) for place in range(start, end, BLOCK_BYTES)]
    return [*places, shard.needed_bytes]


def stored_places(path: Path) -> list[int]:
    """Return `block_places` of a file. Raises CheckpointError if it is no safetensors file."""
    return block_places(read_header(path))


def own_checksums(tensors: Mapping[str, tuple[str, tuple[int, ...], memoryview]], texts: Mapping[str, str]) -> str:
    """Return the entry `CHECKSUMS` of the header of a file with these tensors (dtype, shape, bytes) and other entries.

    It has the checksum of the header, then those of all blocks of each tensor, in the order of their names.
    """
    header = header_checksum({name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}, texts)
    contents = [tensors[name][2] for name in sorted(tensors)]
    starts = [(content, start) for content in contents for start in range(0, len(content), BLOCK_BYTES)]
    return header + "".join(xxhash.xxh3_128_hexdigest(content[at : at + BLOCK_BYTES]) for content, at in starts)


def _own_blocks(shard: Shard) -> str | None:
    """Return the checksums of a file's own header, in the order of its blocks; None if it has none."""
    if CHECKSUMS not in shard.texts:
        return None
    listed, at = shard.texts[CHECKSUMS], DIGITS
    by_name: dict[str, str] = {}
    for name in sorted(shard.tensors):
        end = at + DIGITS * -(-shard.tensors[name].num_bytes // BLOCK_BYTES)
        by_name[name], at = listed[at:end], end
    if len(listed) != at:
        raise CheckpointError(f"its header has {len(listed) // DIGITS} checksums, expected {at // DIGITS}")
    in_order = sorted(shard.tensors, key=lambda name: shard.tensors[name].offset)
    num_header = -(-shard.header_bytes // BLOCK_BYTES)  # blocks that are compared as a whole, when they are parsed
    return "".join(["-" * DIGITS * num_header, *(by_name[name] for name in in_order)])


class ChangedBlockError(CheckpointError):
    """A block does not have its checksum."""


def open_tensor_file(path: Path) -> TensorFile:
    """Open a safetensors file that no manifest lists. Raises CheckpointError, naming it, if it cannot be read."""
    try:
        return TensorFile(path, None)
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


class TensorFile:
    """An open safetensors file. Blocks that are read are compared with `checksums`, those of all blocks, joined.

    With None they are compared with those of the file's own header, if it has any.

    Raises ChangedBlockError for one that differs, and CheckpointError if the file cannot be read, if its header is
    damaged, or if its size is not the one in the header.
    """

    def __init__(self, path: Path, checksums: str | None) -> None:
        self.path = path
        self._checksums = checksums
        try:
            require_file(path)
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"it cannot be read: {error.strerror or error}") from error
        try:
            self._header = self._read_header()
            if checksums is None:
                self._checksums = _own_blocks(self._header)
        except BaseException:
            self._file.close()
            raise
        self._places = block_places(self._header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def has_checksums(self) -> bool:
        """Whether what is read is compared."""
        return self._checksums is not None

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors by name."""
        return dict(self._header.tensors)

    @property
    def texts(self) -> dict[str, str]:
        """Return the texts of the header, except for checksums."""
        return {name: text for name, text in self._header.texts.items() if name != CHECKSUMS}

    def read(self, start: int, into: memoryview) -> None:
        """Read the bytes from `start` of the file into memory.

        Of blocks at the ends, the rest is read into memory of its own. Raises as the class does.
        """
        stop = start + len(into)
        if self._checksums is None or start == stop:
            self._fill(into, start)
            return
        index = bisect_right(self._places, start) - 1
        while (begin := self._places[index]) < stop:
            end = self._places[index + 1]
            first, last = max(begin, start), min(end, stop)
            part = into[first - start : last - start]
            block = part if (first, last) == (begin, end) else memoryview(bytearray(end - begin))
            self._fill(block, begin)
            self._compare(index, begin, block)
            if block is not part:
                part[:] = block[first - begin : last - begin]
            index += 1

    def _compare(self, index: int, place: int, block: memoryview) -> None:
        """Compare a block that was just read, while it is in the processor's cache."""
        expected = (self._checksums or "")[index * DIGITS : (index + 1) * DIGITS]
        actual = xxhash.xxh3_128_hexdigest(block)
        if actual != expected:
            where = f" from byte {place} to {place + len(block)}"
            raise ChangedBlockError(changed_file(self.path, actual, expected, where))

    def _fill(self, block: memoryview, place: int) -> None:
        done = 0
        try:
            while done < len(block):
                size = os.preadv(self._file.fileno(), [block[done : done + BLOCK_BYTES]], place + done)
                if not size:
                    raise CheckpointError(f"{self.path} was cut off at byte {place + done} while it was read")
                done += size
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _bytes(self, size: int) -> bytes:
        content = bytearray(size)
        self._fill(memoryview(content), 0)
        return bytes(content)

    def _read_header(self) -> Shard:
        """Read the header and compare its blocks, which are the first ones, before it is parsed."""
        size = os.fstat(self._file.fileno()).st_size
        end = min(8 + header_length(self.path, self._bytes(min(8, size))), size)
        header = self._bytes(end)
        if self._checksums is not None:
            for index, place in enumerate(range(0, end, BLOCK_BYTES)):
                self._compare(index, place, memoryview(header)[place : place + BLOCK_BYTES])
        shard = parse_header(self.path, header[8:], header_length(self.path, header[:8]), size)
        if shard.needed_bytes != size:
            raise CheckpointError(f"it has {size} bytes, but its header requires {shard.needed_bytes}")
        if self._checksums is not None and len(self._checksums) != DIGITS * (len(block_places(shard)) - 1):
            raise CheckpointError(f"the manifest has {len(self._checksums) // DIGITS} checksums of its blocks")
        return shard
