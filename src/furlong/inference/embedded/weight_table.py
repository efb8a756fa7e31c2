"""Where an engine's model keeps each tensor of a checkpoint: written by name, read back as checksums.

One load may come whole (`WeightTable.load`) or tensor by tensor (`WeightLoad`).
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
    """Where each Hugging Face name lives in a model's storage.

    `views` name -> tensor to write; `tied` names may come but need not; `parts` gives, for a fused tensor, the names
    of the pieces that may come in its place (the experts of a checkpoint); `num_writes` counts tensors written, for
    whoever derives something from them.
    """

    views: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    tied: set[str] = field(default_factory=set[str])
    parts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    num_writes: int = 0
    _released: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list[tuple[torch.UntypedStorage, int]])

    def release(self) -> int:
        """Give the memory of all weights back; returns its bytes. Until `restore` nothing may be read or written."""
        freed = 0
        for view in self.views.values():
            storage = view.untyped_storage()
            if (size := storage.nbytes()) and storage.resizable():
                self._released.append((storage, size))
                storage.resize_(0)
                freed += size
        return freed

    def restore(self) -> None:
        """Take that memory again, without contents."""
        for storage, size in self._released:
            storage.resize_(size)
        self._released = []
        self.num_writes += 1

    @property
    def is_released(self) -> bool:
        """Whether `release` was called and `restore` was not."""
        return bool(self._released)

    def required(self) -> list[str]:
        """Names without which a load is not complete."""
        pieces = {name for names in self.parts.values() for name in names}
        return [name for name in self.views if name not in self.tied and name not in pieces]

    def published(self) -> list[str]:
        """Names of all weights as trainers send them and checkpoints have them: pieces, where a tensor has some."""
        return [piece for name in self.required() for piece in self.parts.get(name, [name])]

    def view(self, name: str) -> Tensor:
        """Storage of `name`. Raises SyncError if the model has none."""
        self._check_resident()
        if name not in self.views:
            raise SyncError(f"the engine's model has no tensor {name!r}; it has {abbreviate(sorted(self.views))}")
        return self.views[name]

    def load(self, source: WeightSource) -> dict[str, str]:
        """Copy every tensor of `source` into place and return checksums read back from the model's storage.

        Raises SyncError naming tensors that are unexpected, mis-shaped, given twice or missing.
        """
        load = WeightLoad(self)
        for name, tensor in source.open():
            load.put(name, tensor)
        if missing := load.missing():
            raise SyncError(
                f"{len(missing)} of {len(self.required())} tensors did not come: {abbreviate(missing)}; "
                "a weight load carries the whole model"
            )
        return load.checksums()

    def checksums(self) -> dict[str, str]:
        """`core.weights.checksum` of every tensor of `published` as it is stored: other processes can compute it."""
        self._check_resident()
        return {name: checksum(self.views[name]) for name in self.published()}

    def resident_checksums(self) -> dict[str, str]:
        """Checksum of every tensor of `published` as it is stored, as `load` returns it."""
        self._check_resident()
        return _resident({name: self.views[name] for name in self.published()})

    def _check_resident(self) -> None:
        if self._released:
            raise SyncError("the memory of the weights was released; call /resume_memory_occupation first")


class ExpectedChecksums:
    """What `WeightTable.load` returns for tensors: checksums of their bytes as the model stores them."""

    def __init__(self, table: WeightTable) -> None:
        self._table, self._sums = table, LocalChecksums()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, which stays as it is until `digests`. Raises SyncError if the model has no such name."""
        view = self._table.view(name)
        self._sums.add(name, tensor.detach().to(view.device, view.dtype))

    def digests(self) -> dict[str, str]:
        """The checksums of all tensors added."""
        return self._sums.digests()


def _resident(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    sums = LocalChecksums()
    for name, tensor in tensors.items():
        sums.add(name, tensor)
    return sums.digests()


class WeightLoad:
    """One replacement of all weights, tensor by tensor; `missing` says what has not come yet."""

    def __init__(self, table: WeightTable) -> None:
        self._table = table
        self._loaded: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor into place. Raises SyncError if it is unexpected, mis-shaped, or came before."""
        view = self._table.view(name)
        if name in self._loaded:
            raise SyncError(f"tensor {name!r} came twice in one weight load; every name may come once")
        if view.shape != tensor.shape:
            raise SyncError(
                f"tensor {name!r} has shape {list(tensor.shape)}, the engine's model has {list(view.shape)}; "
                "trainer and engine must be built from the same config"
            )
        view.copy_(tensor.detach())
        self._table.num_writes += 1
        self._loaded[name] = view

    def has_any(self, tensors: Iterable[NamedTensor]) -> bool:
        """Whether one of these came before."""
        return any(name in self._loaded for name, _ in tensors)

    def missing(self) -> list[str]:
        """Required names that did not come, neither whole nor in parts."""
        return [n for n in self._table.required() if n not in self._loaded and not self._by_parts(n)]

    def checksums(self) -> dict[str, str]:
        """Checksum of each tensor that came, read back from the model's storage."""
        return _resident(self._loaded)

    def _by_parts(self, name: str) -> bool:
        parts = self._table.parts.get(name)
        return parts is not None and all(part in self._loaded for part in parts)
