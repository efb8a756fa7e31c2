"""Counts the rows of an Arrow stream file without reading its values, which may be hundreds of gigabytes.

pyarrow would need the file mapped into memory for that, and another process that cuts a mapped file ends this one with
SIGBUS. A stream is a sequence of messages: a marker of 4 bytes (absent in files from before Arrow 0.15), the size of
the metadata in 4, the metadata as a flatbuffer, and a body whose size the metadata has.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO

MARKER = b"\xff\xff\xff\xff"
RECORD_BATCH = 3  # the type of a message with rows
MAX_METADATA_BYTES = 1 << 28


def count_rows(file: BinaryIO) -> int:
    """Return the rows of a stream file that is open at its start.

    Raises ValueError if it is damaged or cut off.
    """
    size = os.fstat(file.fileno()).st_size
    rows = 0
    while True:
        start = file.read(4)
        if not start:  # a stream may end without an end marker
            return rows
        length = int.from_bytes(file.read(4) if start == MARKER else start, "little", signed=True)
        if length == 0:
            return rows
        if not 0 < length <= MAX_METADATA_BYTES:
            raise ValueError(f"a message at byte {file.tell()} has metadata of {length} bytes")
        metadata = file.read(length)
        message = _FlatTable(metadata, int.from_bytes(metadata[:4], "little"))
        body_bytes = message.number(3, "<q")
        end = file.tell() + body_bytes
        if body_bytes < 0 or end > size:
            raise ValueError(
                f"a message has {body_bytes} bytes from byte {file.tell()} on, but the file ends at {size}"
            )
        if message.number(1, "<B") == RECORD_BATCH:
            length = message.table(2).number(0, "<q")
            if length < 0:
                raise ValueError(f"a record batch before byte {file.tell()} has {length} rows")
            rows += length
        file.seek(end)


class _FlatTable:
    """A table of a flatbuffer: fields by number, at places that its vtable has. Absent fields are 0."""

    def __init__(self, content: bytes, place: int) -> None:
        self._content, self._place = content, place
        self._vtable = place - self._unpack("<i", place)
        self._vtable_bytes = self._unpack("<H", self._vtable)

    def number(self, field: int, form: str) -> int:
        place = self._field(field)
        return 0 if place is None else self._unpack(form, place)

    def table(self, field: int) -> _FlatTable:
        place = self._field(field)
        if place is None:
            raise ValueError("the metadata of a message is damaged: its header is missing")
        return _FlatTable(self._content, place + self._unpack("<I", place))

    def _field(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._vtable_bytes:
            return None
        offset = self._unpack("<H", self._vtable + entry)
        return self._place + offset if offset else None

    def _unpack(self, form: str, place: int) -> int:
        if not 0 <= place <= len(self._content) - struct.calcsize(form):
            raise ValueError(f"the metadata of a message is damaged: it refers to byte {place} of {len(self._content)}")
        return struct.unpack_from(form, self._content, place)[0]
