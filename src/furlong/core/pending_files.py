"""Files whose content is kept in host memory and written later, while training continues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


class PendingFiles:
    """A queue of file writes. One thread adds to it; then one thread, possibly another, writes."""

    def __init__(self) -> None:
        self._writes = deque[Callable[[], object]]()

    def add_tensors(self, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        """Queue a safetensors file. The tensors are not copied: pass copies made by `host_copy`."""
        self._writes.append(partial(save_file, dict(tensors), path, metadata))

    def add_text(self, path: Path, text: str) -> None:
        """Queue a text file."""
        self._writes.append(partial(path.write_text, text))

    def add(self, write: Callable[[], object]) -> None:
        """Queue a function that writes files; it returns once they are written, or raises."""
        self._writes.append(write)

    def write(self) -> None:
        """Write all files, and release each one once it is written. Raises OSError or SafetensorError."""
        while self._writes:
            self._writes.popleft()()


def host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in host memory that never shares storage with `tensor`."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
