"""Tensors that leave the device for a while and come back to where they were.

Only the memory behind a tensor goes: the storage is copied to pinned host memory and made empty, and later made as
large again and filled. Everything that refers to it (parameters, their shards, optimizer states, views) stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from furlong.ports import Moved


class Parking:
    """Moves tensors to the host and back. Host memory is kept for the next time, since pinning it is slow."""

    def __init__(self) -> None:
        self._parked: list[tuple[Tensor, Tensor]] = []  # the bytes behind a tensor, and their copy
        self._dropped: list[tuple[Tensor, int]] = []  # those of which only the size is kept
        self._host: dict[int, list[Tensor]] = {}

    def park(self, tensors: Iterable[Tensor], *, dropped: Iterable[Tensor] = ()) -> Moved:
        """Copy the memory behind `tensors` to the host, once where they share it, and release it.

        That behind `dropped` is released too, and comes back as zeros.
        """
        started = time.perf_counter()
        seen = set[int]()
        for there in _memory(tensors, seen):
            storage = there.untyped_storage()
            free = self._host.get(storage.size())
            here = free.pop() if free else torch.empty(storage.size(), dtype=torch.uint8, pin_memory=there.is_cuda)
            here.copy_(there, non_blocking=True)
            self._parked.append((there, here))
        self._wait()
        self._dropped += [(there, there.numel()) for there in _memory(dropped, seen)]
        for there, _ in (*self._parked, *self._dropped):
            there.untyped_storage().resize_(0)
        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()  # buffers of a publication, which the engines have read
            torch.cuda.empty_cache()
        return self._moved(started)

    def unpark(self) -> Moved:
        """Bring everything back."""
        started = time.perf_counter()
        for there, here in self._parked:
            there.untyped_storage().resize_(here.numel())
            there.copy_(here, non_blocking=True)
        for there, size in self._dropped:
            there.untyped_storage().resize_(size)
            there.zero_()
        self._dropped.clear()
        self._wait()
        moved = self._moved(started)
        for _, here in self._parked:
            self._host.setdefault(here.numel(), []).append(here)
        self._parked.clear()
        return moved

    def _wait(self) -> None:
        if any(there.is_cuda for there, _ in self._parked):
            torch.cuda.synchronize()

    def _moved(self, started: float) -> Moved:
        return Moved(sum(here.numel() for _, here in self._parked), time.perf_counter() - started)


def _memory(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[Tensor]:
    """The bytes behind tensors, once where they share them. `seen`: where they begin."""
    for tensor in tensors:
        storage = tensor.detach().untyped_storage()
        if storage.size() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
