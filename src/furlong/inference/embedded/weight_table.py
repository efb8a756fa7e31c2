"""Storage of an engine's weights by checkpoint name: loading and checksums.

A load is complete (`WeightTable.load`) or tensor by tensor (`WeightLoad`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from furlong.core.device_checksum import LocalChecksums
from furlong.core.text import abbreviate
from furlong.core.weights import NamedTensor, WeightSource, checksum
from furlong.errors import SyncError


@dataclass
class WeightTable:
    """The storage of each Hugging Face name.

    views: Tensor to write by name.
    tied: Names that are optional in a load.
    parts: For a fused tensor, the names of the pieces that may be loaded instead (the experts of a checkpoint).
    num_writes: Number of tensors written, to detect changes.
    """

    views: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    tied: set[str] = field(default_factory=set[str])
    parts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    num_writes: int = 0
    _released: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list[tuple[torch.UntypedStorage, int]])

    def release(self) -> int:
        """Release the memory of all weights; returns the number of bytes. No access until `restore`."""
        freed = 0
        for view in self.views.values():
            storage = view.untyped_storage()
            if (size := storage.nbytes()) and storage.resizable():
                self._released.append((storage, size))
                storage.resize_(0)
                freed += size
        return freed

    def restore(self) -> None:
        """Allocate the released memory again, without contents."""
        for storage, size in self._released:
            storage.resize_(size)
        self._released = []
        self.num_writes += 1

    @property
    def is_released(self) -> bool:
        """Whether the memory is released."""
        return bool(self._released)

    def required(self) -> list[str]:
        """Names that a complete load must contain."""
        pieces = {name for names in self.parts.values() for name in names}
        return [name for name in self.views if name not in self.tied and name not in pieces]

    def checkpoint_names(self) -> list[str]:
        """Names of all weights as in checkpoints: the pieces of a fused tensor instead of its own name."""
        return [piece for name in self.required() for piece in self.parts.get(name, [name])]

    def view(self, name: str) -> Tensor:
        """Storage of `name`. Raises SyncError if the model has no such tensor."""
        self._check_resident()
        if name not in self.views:
            raise SyncError(f"the engine's model has no tensor {name!r}; it has {abbreviate(sorted(self.views))}")
        return self.views[name]

    def load(self, source: WeightSource) -> dict[str, str]:
        """Copy every tensor of `source` into place; return checksums of the stored tensors.

        Raises SyncError naming tensors that are unexpected, mis-shaped, repeated or missing.
        """
        load = WeightLoad(self)
        for name, tensor in source.open():
            load.put(name, tensor)
        if missing := load.missing():
            raise SyncError(
                f"{len(missing)} of {len(self.required())} tensors did not arrive: {abbreviate(missing)}; "
                "a weight load must contain the whole model"
            )
        return load.checksums()

    def checksums(self) -> dict[str, str]:
        """`core.weights.checksum` of each stored tensor, which other processes can compute."""
        self._check_resident()
        return {name: checksum(self.views[name]) for name in self.checkpoint_names()}

    def resident_checksums(self) -> dict[str, str]:
        """Checksum of each stored tensor, as returned by `load`."""
        self._check_resident()
        return _resident({name: self.views[name] for name in self.checkpoint_names()})

    def _check_resident(self) -> None:
        if self._released:
            raise SyncError("the memory of the weights is released; call /resume_memory_occupation first")


class ExpectedChecksums:
    """Computes the checksums that `WeightTable.load` will return, in the dtype of the storage."""

    def __init__(self, table: WeightTable) -> None:
        self._table, self._sums = table, LocalChecksums()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, which must not change until `digests`. Raises SyncError for an unknown name."""
        view = self._table.view(name)
        self._sums.add(name, tensor.detach().to(view.device, view.dtype))

    def digests(self) -> dict[str, str]:
        """Checksums of all added tensors."""
        return self._sums.digests()


def _resident(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    sums = LocalChecksums()
    for name, tensor in tensors.items():
        sums.add(name, tensor)
    return sums.digests()


class WeightLoad:
    """A load of all weights, tensor by tensor."""

    def __init__(self, table: WeightTable) -> None:
        self._table = table
        self._loaded: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor into place. Raises SyncError if it is unexpected, mis-shaped or repeated."""
        view = self._table.view(name)
        if name in self._loaded:
            raise SyncError(f"tensor {name!r} was sent twice in one weight load; send every name once")
        if view.shape != tensor.shape:
            raise SyncError(
                f"tensor {name!r} has shape {list(tensor.shape)}, but {list(view.shape)} in the engine's model; "
                "trainer and engine must use the same config"
            )
        view.copy_(tensor.detach())
        self._table.num_writes += 1
        self._loaded[name] = view

    def has_any(self, tensors: Iterable[NamedTensor]) -> bool:
        """Whether one of these tensors was loaded before."""
        return any(name in self._loaded for name, _ in tensors)

    def missing(self) -> list[str]:
        """Required names that were loaded neither whole nor in parts."""
        return [n for n in self._table.required() if n not in self._loaded and not self._by_parts(n)]

    def checksums(self) -> dict[str, str]:
        """Checksum of each loaded tensor as it is stored."""
        return _resident(self._loaded)

    def _by_parts(self, name: str) -> bool:
        parts = self._table.parts.get(name)
        return parts is not None and all(part in self._loaded for part in parts)
