"""Arrays and text in one safetensors file that contains the checksum of both.

Any change of a value, name, shape, dtype or text is refused; other changes are in padding that is not read. Files of
older versions have no checksum and are read with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors.numpy import save_file

from furlong.errors import CheckpointError
from furlong.files.verified_tensors import TensorFile

CHECKSUM = "xxh3_128"
DTYPES = {
    **{f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)},
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BOOL": "?",
}

logger = logging.getLogger(__name__)


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, str]) -> None:
    """Write a file. `texts` are the entries of its header. Raises OSError or SafetensorError."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(contiguous, path, {**texts, CHECKSUM: _checksum(contiguous, texts)})


def load_arrays(path: Path, keys: frozenset[str]) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read a file written by `save_arrays`: its arrays and the entries of its header, which may be those of `keys`.

    Raises ValueError if it is no safetensors file or does not have its checksum, and OSError if it cannot be read.
    """
    try:
        with TensorFile(path, None) as file:
            texts = file.texts
            arrays = {name: read_array(file, name) for name in file.tensors}
    except CheckpointError as error:
        raise ValueError(f"it is no safetensors file, or a damaged one ({error})") from error
    expected = texts.pop(CHECKSUM, None)
    if expected is None and not keys.issuperset(texts):
        raise ValueError(f"its header has the entries {sorted(texts)}, expected {sorted(keys)} and {CHECKSUM}")
    if expected is None:
        logger.warning(
            "%s has no checksum (an older version wrote it): changes of its content cannot be detected", path
        )
    elif (actual := _checksum(arrays, texts)) != expected:
        raise ValueError(f"it was changed after it was written: its checksum is {actual}, expected {expected}")
    return arrays, texts


def read_array(file: TensorFile, name: str) -> NDArray[Any]:
    """Read a tensor into an array. Raises CheckpointError if it cannot be read."""
    stored = file.tensors[name]
    if stored.dtype not in DTYPES:
        raise CheckpointError(f"tensor {name} has the dtype {stored.dtype}, which arrays do not have")
    array: NDArray[Any] = np.empty(stored.shape, DTYPES[stored.dtype])
    file.read(stored.offset, array.reshape(-1).view(np.uint8).data)
    return array


def _checksum(arrays: Mapping[str, NDArray[Any]], texts: Mapping[str, str]) -> str:
    digest = xxhash.xxh3_128()
    for name, text in sorted(texts.items()):
        digest.update(f"{len(name)} {name} {len(text)} {text}".encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{len(name)} {name} {array.dtype} {array.shape}".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()
