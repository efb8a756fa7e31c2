"""Read safetensors files with the library's reader; errors name the file.

`read_header` imports no torch; `TensorFile` does. Files are memory-mapped and read lazily.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError, safe_open

from furlong.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

LFS_POINTER = b"version https://git-lfs"  # start of a file from a clone without Git LFS
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a header. `dtype` as in the file: F32, BF16, I32, ..."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its values in the file."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Shard:
    """A safetensors file: the tensors and the texts of its header."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    texts: Mapping[str, str]


@contextmanager
def _named_errors(path: Path) -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"cannot read {path}: it does not exist") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                why = f"it is a Git LFS pointer of {size} bytes, not the file itself"
            else:
                why = f"its {size} bytes are not a safetensors file, or it was cut off ({error})"
        raise CheckpointError(f"cannot read {path}: {why}") from error


def read_header(path: Path) -> Shard:
    """Read the header of a safetensors file, without torch. Raises CheckpointError, naming the file."""
    with _named_errors(path), safe_open(path, "np") as file:
        return Shard(path, _stored(path, file), file.metadata() or {})


def _stored(path: Path, file: Any) -> dict[str, StoredTensor]:
    slices = {name: file.get_slice(name) for name in file.offset_keys()}
    tensors = {name: StoredTensor(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    if unknown := next((name for name, tensor in tensors.items() if tensor.dtype not in BITS), None):
        raise CheckpointError(f"{path}: tensor {unknown} has the dtype {tensors[unknown].dtype}, which is not loaded")
    return tensors


def read_arrays(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read a whole file as numpy arrays, with the texts of its header. Raises CheckpointError, naming the file."""
    with _named_errors(path), safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.offset_keys()}, file.metadata() or {}


class TensorFile:
    """An open safetensors file of torch tensors. Every method raises CheckpointError, naming the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _named_errors(path):
            self._file: Any = safe_open(path, "pt").__enter__()
            self.tensors: Mapping[str, StoredTensor] = _stored(path, self._file)  # in the order of the file
            self.texts: Mapping[str, str] = self._file.metadata() or {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._file.__exit__(*details)

    def mapped(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a tensor, or rows of its first dimension, whose memory is the mapped file: copy it at once."""
        with _named_errors(self.path):
            return self._file.get_tensor(name) if rows is None else self._file.get_slice(name)[rows]

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a tensor, or rows of its first dimension, into new memory."""
        return self.mapped(name, rows).clone()


def read_file(path: Path, select: Callable[[str], bool] = lambda _: True) -> Iterator[tuple[str, Tensor]]:
    """Yield the selected tensors of a file in the order of their bytes. Raises CheckpointError, naming the file."""
    with TensorFile(path) as file:
        for name in filter(select, file.tensors):
            yield name, file.read(name)
