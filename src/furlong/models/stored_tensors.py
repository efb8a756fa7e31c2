"""Read the tensors of a model folder one at a time: in one file or several, quantized or not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from furlong.errors import CheckpointError
from furlong.files.tensor_file import TensorFile
from furlong.models.hf_folder import WEIGHT_FILES, read_weight_map
from furlong.models.quantized_folder import folder_scheme
from furlong.models.untrained_tensors import is_untrained, is_with_vision, stored_name, text_name
from furlong.quantization.weight_format import QuantizationError


class TensorSource(Protocol):
    """A source of named tensors that are read one at a time."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        ...

    def read(self, name: str) -> Tensor:
        """Read a whole tensor onto the CPU. Raises CheckpointError if it cannot be read."""
        ...


class StoredTensors:
    """The tensors of a folder opened by `open_tensors`; those of a language model have the names of a text model.

    Quantized weights have their whole names and values.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._opened: dict[str, TensorFile] = {}
        self._opening = threading.Lock()
        single, index = WEIGHT_FILES
        if (folder / index).exists():
            self._files = read_weight_map(folder / index)
        else:
            self._files = dict.fromkeys(self._open(single).tensors, single)
        self._stored = {text_name(name): name for name in self._files}
        self._scheme = folder_scheme(folder)
        self._names = frozenset(self._stored) if self._scheme is None else self._scheme.whole_names(self._stored)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return self._names

    def read(self, name: str) -> Tensor:
        """Read a tensor onto the CPU in the stored dtype. Raises CheckpointError if it cannot be read."""
        scheme = self._scheme
        if scheme is not None and name in scheme.names:
            try:
                return scheme.dequantize(name, {part: self._read(part) for part in scheme.part_names(name)})
            except QuantizationError as error:
                raise CheckpointError(f"{self._folder}: {error}") from error
        return self._read(name)

    def _read(self, name: str) -> Tensor:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(
                f"{self._folder} has no tensor {name}; it is incomplete or of another model, use another folder"
            )
        file = self._open(self._files[stored])
        if stored not in file.tensors:
            raise CheckpointError(f"{file.path} has no tensor {stored}, which the index names there; download it again")
        return file.read(stored)

    def _open(self, file: str) -> TensorFile:
        with self._opening:
            if file not in self._opened:
                self._opened[file] = self._stack.enter_context(TensorFile(self._folder / file))
            return self._opened[file]


@contextlib.contextmanager
def open_tensors(folder: Path) -> Generator[StoredTensors]:
    """Open a folder to read its tensors. Raises CheckpointError if it has none."""
    with contextlib.ExitStack() as stack:
        yield StoredTensors(folder, stack)


def with_untrained(tensors: Iterable[tuple[str, Tensor]], folder: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors`, which have a text model's names, under the names of `folder`; then its other untrained ones."""
    has_vision, written = is_with_vision(folder), set[str]()
    for name, tensor in tensors:
        written.add(name)
        yield stored_name(name) if has_vision else name, tensor
    with open_tensors(folder) as stored:
        for name in sorted(stored.names - written):
            if is_untrained(name, config):
                yield name, stored.read(name)
