"""Files whose content is held in memory, and which are written later: what trains meanwhile does not change them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


class PendingFiles:
    """What files will hold, on the host. One thread adds to it, then one writes, which may be another."""

    def __init__(self) -> None:
        self._writes = deque[Callable[[], object]]()

    def add_tensors(self, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        """Hold a safetensors file. The tensors are taken as they are: give copies, as `host_copy` makes them."""
        self._writes.append(partial(save_file, dict(tensors), path, metadata))

    def add_text(self, path: Path, text: str) -> None:
        """Hold a text file."""
        self._writes.append(partial(path.write_text, text))

    def add(self, write: Callable[[], object]) -> None:
        """Hold anything else that writes files; it returns when they are written, or raises."""
        self._writes.append(write)

    def write(self) -> None:
        """Write all files, and let go of each that is written. Raises OSError or SafetensorError."""
        while self._writes:
            self._writes.popleft()()


def host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the host, which shares no memory with `tensor` even if that is there already."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
