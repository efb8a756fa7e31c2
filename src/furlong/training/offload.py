"""Tensors that leave the device for a while and come back to where they were.

Only the memory behind a tensor goes: the storage is copied to pinned host memory and made empty, and later made as
large again and filled. Everything that refers to it (parameters, their shards, optimizer states, views) stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from furlong.interfaces import MemoryTransfer
from furlong.training.device_memory import empty_cache
from furlong.training.host_memory import HostMemory


class Parking:
    """Moves tensors to the host and back. Host memory is kept for the next time, since pinning it is slow."""

    def __init__(self) -> None:
        self._parked: list[tuple[Tensor, Tensor]] = []  # the bytes behind a tensor, and their copy
        self._last: list[tuple[Tensor, Tensor]] = []  # those that need not be there when `unpark` returns
        self._dropped: list[tuple[Tensor, int]] = []  # those of which only the size is kept
        self._host: dict[torch.device, HostMemory] = {}
        self._arriving: torch.cuda.Event | None = None

    def park(
        self,
        tensors: Iterable[Tensor],
        *,
        last: Iterable[Tensor] = (),
        dropped: Iterable[Tensor] = (),
        later: Sequence[int] = (),
    ) -> MemoryTransfer:
        """Copy the memory behind `tensors` and `last` to the host, once where they share it, and release it.

        That behind `dropped` is released too, and comes back as zeros. `later`: sizes of tensors that will be there the
        next time, for which host memory is taken now.
        """
        started = time.perf_counter()
        self._wait_for_arrival()
        seen = set[int]()
        parked, at_last = list(_memory(tensors, seen)), list(_memory(last, seen))
        copies = self._copies([*parked, *at_last], later)
        self._parked += copies[: len(parked)]
        self._last += copies[len(parked) :]
        for there, here in copies:
            here.copy_(there, non_blocking=True)
        if any(there.is_cuda for there, _ in copies):
            torch.cuda.synchronize()
        self._dropped += [(there, there.numel()) for there in _memory(dropped, seen)]
        for there, _ in (*self._parked, *self._last, *self._dropped):
            there.untyped_storage().resize_(0)
        empty_cache()
        return self._moved(started)

    def unpark(self) -> MemoryTransfer:
        """Bring everything back. On a GPU what was parked as `last` is on its way then: `arrive` waits for it."""
        started = time.perf_counter()
        for there, here in (*self._parked, *self._last):
            there.untyped_storage().resize_(here.numel())
        for there, size in self._dropped:
            there.untyped_storage().resize_(size)
            there.zero_()
        for there, here in self._parked:
            there.copy_(here, non_blocking=True)
        if device := next((there.device for there, _ in (*self._parked, *self._last) if there.is_cuda), None):
            if self._last:
                self._send_last(device)
            torch.cuda.current_stream(device).synchronize()
        else:
            for there, here in self._last:
                there.copy_(here)
        moved = self._moved(started)
        for kept in (self._dropped, self._parked, self._last):
            kept.clear()
        return moved

    def _send_last(self, device: torch.device) -> None:
        """Copy `_last` behind the others, on a stream of its own."""
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            for there, copy in self._last:
                there.copy_(copy, non_blocking=True)
            self._arriving = torch.cuda.Event()
            self._arriving.record(beside)

    def arrive(self) -> None:
        """Have what is asked of the device from now on wait for what `unpark` left on its way."""
        if self._arriving is not None:
            torch.cuda.current_stream().wait_event(self._arriving)

    def _wait_for_arrival(self) -> None:
        """Have it there: its host memory will be written to."""
        if self._arriving is not None:
            self._arriving.synchronize()
            self._arriving = None

    def _copies(self, there: Sequence[Tensor], later: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Memory behind tensors of one device, each with as much of the host's."""
        if not there:
            return []
        host = self._host.setdefault(there[0].device, HostMemory(there[0].device))
        return list(zip(there, host.place([each.numel() for each in there], later=later), strict=True))

    def _moved(self, started: float) -> MemoryTransfer:
        num_bytes = sum(here.numel() for _, here in (*self._parked, *self._last))
        return MemoryTransfer(num_bytes, time.perf_counter() - started)


class OnHost:
    """What an optimizer keeps on the host between its steps, and has on the device while it is at hand.

    kept: those tensors, asked for whenever they leave; none where everything stays. arrive: called first, to wait for
    what else of the optimizer is on its way.
    """

    def __init__(self, kept: Callable[[], Iterable[Tensor]], arrive: Callable[[], None]) -> None:
        self._kept, self._arrive = kept, arrive
        self._parking, self._is_at_hand = Parking(), False
        self._leave()

    @contextmanager
    def at_hand(self) -> Generator[None]:
        """Have it on the device inside; also within another such context."""
        self._arrive()
        if self._is_at_hand:
            yield
            return
        self._parking.unpark()
        self._parking.arrive()
        self._is_at_hand = True
        yield
        self._leave()

    def _leave(self) -> None:
        self._is_at_hand = False
        if kept := list(self._kept()):
            self._parking.park(kept)


def _memory(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[Tensor]:
    """The bytes behind tensors, once where they share them. `seen`: where they begin."""
    for tensor in tensors:
        storage = tensor.detach().untyped_storage()
        if storage.size() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
