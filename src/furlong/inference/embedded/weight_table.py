"""Weights of the embedded engine's models: where each Hugging Face name is stored, and loads of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from furlong.core.text import abbreviate
from furlong.core.weights import WeightSource, checksum
from furlong.errors import SyncError
from furlong.quantization.scheme import QuantizationScheme
from furlong.transfer.device_checksum import LocalChecksums


@dataclass
class WeightTable:
    """The storage of each Hugging Face name.

    views: Tensor to write by name.
    tied: Names that are optional in a load.
    parts: For a fused tensor, the names of the pieces that may be loaded instead (the experts of a checkpoint).
    num_writes: Number of tensors written, to detect changes.
    num_moves: How often the storage was allocated again.
    whole: By name, the storage of weights that are loaded quantized: `views` then has their stored tensors, and these
        are computed from them.
    """

    views: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    tied: set[str] = field(default_factory=set[str])
    parts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    num_writes: int = 0
    num_moves: int = 0
    whole: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    _scheme: QuantizationScheme | None = None
    _owners: dict[str, str] = field(default_factory=dict[str, str])  # stored tensor -> its weight
    _released: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list[tuple[torch.UntypedStorage, int]])

    def quantize(self, scheme: QuantizationScheme, names: Iterable[str]) -> None:
        """Store these weights as `scheme` does. Raises SyncError for one that the model does not have.

        Loads and checksums are of the stored tensors, and the model computes with the values that they stand for.
        """
        self._scheme = scheme
        for name in names:
            dense = self.whole[name] = self.view(name)
            for fused in [fused for fused, pieces in self.parts.items() if name in pieces]:
                del self.views[fused], self.parts[fused]  # its pieces are loaded one by one
            del self.views[name]
            for part, (shape, dtype) in scheme.parts(name, tuple(dense.shape)).items():
                self.views[part] = torch.zeros(shape, dtype=dtype, device=dense.device)
                self._owners[part] = name

    def refresh_whole(self, part: str, loaded: Collection[str]) -> None:
        """Compute the weight of a stored tensor if all stored tensors of that weight are in `loaded`."""
        if (name := self._owners.get(part)) is None:
            return
        assert self._scheme is not None
        if all(each in loaded for each in self._scheme.part_names(name)):
            self.whole[name].copy_(self._scheme.dequantize(name, self.views))

    def release(self) -> int:
        """Release the memory of all weights; returns the number of bytes. No access until `restore`."""
        freed = 0
        for view in (*self.views.values(), *self.whole.values()):
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
        self.num_moves += 1

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
        if name in self.whole and name not in self.views:
            raise SyncError(
                f"the engine stores {name} quantized; send its stored tensors, or start the engine from a folder in "
                "bfloat16"
            )
        if name not in self.views:
            raise SyncError(f"the engine's model has no tensor {name!r}; it has {abbreviate(sorted(self.views))}")
        return self.views[name]

    def check_shape(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the storage of `name`. Raises SyncError if the model has no such tensor, or one of another shape."""
        view = self.view(name)
        if list(view.shape) != list(shape):
            raise SyncError(
                f"tensor {name!r} has shape {list(shape)}, but {list(view.shape)} in the engine's model; "
                "trainer and engine must use the same config"
            )
        return view

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """Return `tensor` in the precision and on the device of the storage of `name`."""
        view = self.view(name)
        return tensor.detach().to(view.device, view.dtype)

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


def _resident(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    sums = LocalChecksums()
    for name, tensor in tensors.items():
        sums.add(name, tensor)
    return sums.digests()


class WeightLoad:
    """A load of all weights, tensor by tensor."""

    def __init__(self, table: WeightTable) -> None:
        self._table = table
        self.loaded: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor into place. Raises SyncError if it is unexpected, mis-shaped or repeated."""
        self.expect(name, tensor.shape).copy_(tensor.detach())
        self._table.refresh_whole(name, self.loaded)
        self._table.num_writes += 1

    def expect(self, name: str, shape: Sequence[int]) -> Tensor:
        """Count a tensor as loaded and return its storage, unchanged. Raises like `put`."""
        view = self._table.check_shape(name, shape)
        if name in self.loaded:
            raise SyncError(f"tensor {name!r} was sent twice in one weight load; send every name once")
        self.loaded[name] = view
        return view

    def missing(self) -> list[str]:
        """Required names that were loaded neither whole nor in parts."""
        return [n for n in self._table.required() if n not in self.loaded and not self._by_parts(n)]

    def checksums(self) -> dict[str, str]:
        """Checksum of each loaded tensor as it is stored."""
        return _resident(self.loaded)

    def _by_parts(self, name: str) -> bool:
        return name in self._table.parts and all(part in self.loaded for part in self._table.parts[name])
