"""Read the tensors of a Hugging Face folder one at a time."""

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
    """The tensors of a folder opened by `open_tensors`."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._opened: dict[str, Any] = {}
        if (folder / INDEX).exists():
            self._files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        else:
            self._files = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files)

    def read(self, name: str) -> Tensor:
        """Read a tensor onto the CPU in the stored dtype. Raises CheckpointError if it cannot be read."""
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(
                f"{self._folder} has no tensor {name}; it is incomplete or of another model, use another folder"
            )
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
    """Open a folder to read its tensors. Raises CheckpointError if it has none."""
    with contextlib.ExitStack() as stack:
        yield StoredTensors(folder, stack)
