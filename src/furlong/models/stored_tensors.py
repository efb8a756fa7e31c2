"""Tensors of a Hugging Face folder, read one at a time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from furlong.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Stored(Protocol):
    """Named tensors that are read one at a time, wherever they are."""

    @property
    def names(self) -> frozenset[str]:
        """What there is."""
        ...

    def read(self, name: str) -> Tensor:
        """Read one, whole, onto the CPU. Raises CheckpointError if that cannot be done."""
        ...


class StoredTensors:
    """The tensors of a folder that is open (`open_tensors`)."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._opened: dict[str, Any] = {}
        if (folder / INDEX).exists():
            self._files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        else:
            self._files = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    @property
    def names(self) -> frozenset[str]:
        """What there is."""
        return frozenset(self._files)

    def read(self, name: str) -> Tensor:
        """Read a tensor onto the CPU, in the precision of the file. Raises CheckpointError if that cannot be done."""
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self._folder} has no tensor {name}; it is of another model, or incomplete")
        try:
            return self._open(file).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {name} from {self._folder / file}: {error}") from error

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            try:
                self._opened[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot read {self._folder / file}: {error}") from error
        return self._opened[file]


@contextlib.contextmanager
def open_tensors(folder: Path) -> Generator[StoredTensors]:
    """Open a folder for as long as its tensors are read. Raises CheckpointError if it holds none."""
    with contextlib.ExitStack() as stack:
        yield StoredTensors(folder, stack)
