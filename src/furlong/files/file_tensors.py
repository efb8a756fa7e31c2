"""Reads tensors of safetensors files into memory of their own.

A mapped file would save the copy, but its pages remain those of the file: another process that cuts the file ends this
one with SIGBUS, even hours later, and one that writes to it changes the tensors.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from furlong.core.weights import NamedTensor, host_bytes
from furlong.errors import CheckpointError
from furlong.files.safetensors_header import CHECKSUMS
from furlong.files.verified_tensors import TensorFile, open_tensor_file, own_checksums

HUGE_BYTES = 4 << 20  # tensors from this size are read into huge pages
LIBC = ctypes.CDLL(None)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def save_verified(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write contiguous tensors on the CPU into a safetensors file whose header has their checksums.

    Other programs read it as any such file. Raises OSError or SafetensorError.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    contents = {
        name: (names[tensor.dtype], tuple(tensor.shape), host_bytes(tensor)) for name, tensor in tensors.items()
    }
    save_file(dict(tensors), path, {**texts, CHECKSUMS: own_checksums(contents, texts)})


def read_file(path: Path, select: Callable[[str], bool] = lambda _: True) -> Iterator[NamedTensor]:
    """Yield the selected tensors of a file in the order of their bytes. Raises CheckpointError, naming the file."""
    with open_tensor_file(path) as file:
        for name in sorted(file.tensors, key=lambda name: file.tensors[name].offset):
            if select(name):
                yield name, read_tensor(file, name)


def read_tensor(file: TensorFile, name: str, rows: slice | None = None) -> Tensor:
    """Read a tensor, or a slice of its first dimension. Raises CheckpointError, naming the file."""
    stored = file.tensors[name]
    dtype = stored_dtype(file, name)
    if rows is None:
        tensor, start = _empty(stored.shape, dtype), 0
    else:
        start, stop, _ = rows.indices(stored.shape[0])
        tensor = _empty((max(0, stop - start), *stored.shape[1:]), dtype)
    read_into(tensor, file, name, start)
    return tensor


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor without content, a large one in huge pages: the first use of small ones takes most of a read."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = tensor.data_ptr() + tensor.nbytes - start
        # only advice: without huge pages in the kernel it fails and the tensor is used as it is
        LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return tensor


def read_into(tensor: Tensor, file: TensorFile, name: str, start: int = 0) -> None:
    """Read the rows from `start` of a stored tensor into a contiguous one on the CPU, as many as it has."""
    row_bytes = math.prod(tensor.shape[1:]) * tensor.itemsize if start else 0
    file.read(file.tensors[name].offset + start * row_bytes, host_bytes(tensor))


def stored_dtype(file: TensorFile, name: str) -> torch.dtype:
    """Return the dtype of a stored tensor. Raises CheckpointError if torch has none for it."""
    dtype = DTYPES.get(file.tensors[name].dtype)
    if dtype is None:
        raise CheckpointError(
            f"{file.path}: tensor {name} has the dtype {file.tensors[name].dtype}, which is not loaded"
        )
    return dtype
