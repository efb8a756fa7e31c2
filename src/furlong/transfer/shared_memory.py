"""Share tensors between processes of one machine through a file in POSIX shared memory.

The layout is sent as JSON: the file's name, and the name, dtype, shape and offset of each tensor. Nothing is pickled,
and only a file of the same user in one folder can be opened.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furlong.core.weights import NamedTensor, dtype_of
from furlong.errors import SyncError

ALIGNMENT = 256  # bytes; suits every dtype
_NAME = re.compile(r"furlong-weights-[0-9a-f]{32}")


def folder() -> Path:
    """Return the folder of shared files: in memory on Linux, otherwise the folder for temporary files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def offsets(tensors: Sequence[NamedTensor]) -> tuple[list[int], int]:
    """Return the byte offset of each tensor in a buffer, and the buffer's size."""
    starts: list[int] = []
    end = 0
    for _, tensor in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + tensor.nbytes
    return starts, end


class SharedBuffer:
    """A shared file that this process fills and removes. `name` identifies it for `open_shared`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes, 1)
        self.name = f"furlong-weights-{secrets.token_hex(16)}"
        self._path = folder() / self.name
        try:
            handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise SyncError(
                f"shared memory cannot be created in {folder()}: {error.strerror}; make it writable, or use "
                "--update-weight-transport disk"
            ) from error
        try:
            os.posix_fallocate(handle, 0, self.num_bytes)  # raises if /dev/shm is full, instead of a SIGBUS later
            self._memory = mmap.mmap(handle, self.num_bytes)
        except OSError as error:
            self._path.unlink()
            free = shutil.disk_usage(folder())
            raise SyncError(
                f"{folder()} cannot provide {self.num_bytes:,} bytes of shared memory ({free.free:,} of "
                f"{free.total:,} bytes are free; error {errno.errorcode.get(error.errno or 0, 'unknown')}); enlarge it "
                "(`docker run --shm-size 8g`), lower --update-weight-buffer-size, or use --update-weight-transport disk"
            ) from None
        finally:
            os.close(handle)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def fill(self, tensors: Sequence[NamedTensor]) -> list[dict[str, Any]]:
        """Copy tensors into the buffer and return their layout for `open_shared`."""
        starts, _ = offsets(tensors)
        layout: list[dict[str, Any]] = []
        for (name, tensor), start in zip(tensors, starts, strict=True):
            if tensor.numel():
                target = self._bytes[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor.detach())
            dtype = str(tensor.dtype).removeprefix("torch.")
            layout.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": start})
        return layout

    def close(self) -> None:
        """Remove the file; its memory is freed when the last process has closed it."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


def open_shared(name: Any, layout: Any) -> list[NamedTensor]:
    """Return views of the tensors in another process's `SharedBuffer`; copy them before that process refills it.

    Raises SyncError for an invalid name or layout, and for a file of another user.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SyncError(f"{name!r} is not the name of a shared buffer")
    try:
        handle = os.open(folder() / name, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise SyncError(
            f"the shared buffer {name} cannot be opened ({error}); trainer and engine must run on one machine, in "
            "one container and as one user"
        ) from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise SyncError(f"the shared buffer {name} belongs to another user")
        if not status.st_size:
            raise SyncError(f"the shared buffer {name} is empty; fill it before it is loaded")
        memory = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(handle)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if not isinstance(layout, list):
        raise SyncError(f"the layout of a shared buffer is {layout!r}, expected a list")
    return [_tensor(whole, entry) for entry in layout]


def _tensor(whole: Tensor, entry: Any) -> NamedTensor:
    try:
        name, shape, offset = str(entry["name"]), [int(n) for n in entry["shape"]], int(entry["offset"])
        dtype = dtype_of(entry["dtype"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SyncError(f"invalid tensor in the layout of a shared buffer: {entry!r}: {error!r}") from error
    count = 1
    for size in shape:
        count *= size
    end = offset + count * dtype.itemsize
    if min([offset, *shape]) < 0 or offset % ALIGNMENT or end > len(whole):
        raise SyncError(f"tensor {name!r} at byte {offset} with shape {shape} is not within {len(whole)} bytes")
    return name, whole[offset:end].view(dtype).view(shape)
