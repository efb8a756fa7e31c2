"""Offload of device tensors to pinned host memory, and device memory statistics.

Only storage moves: it is copied to the host and resized to 0 bytes, and later resized back and filled. Tensor objects
(parameters, shards, optimizer states, views) stay valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from furlong.interfaces import DeviceMemory, MemoryTransfer
from furlong.training.host_memory import HostMemory


def empty_cache() -> None:
    """Release cached CUDA memory that no tensor uses, including IPC buffers that the engines have read."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory use of a CUDA device and reset its peak; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return DeviceMemory(used=total - free, total=total, own=torch.cuda.memory_reserved(device), peak=peak)


class HostOffload:
    """Moves tensors to the host and back. Keeps the host memory between uses, because pinning is slow."""

    def __init__(self) -> None:
        self._offloaded: list[tuple[Tensor, Tensor]] = []  # device bytes and their host copy
        self._deferred: list[tuple[Tensor, Tensor]] = []  # same, but `reload` does not wait for these
        self._discarded: list[tuple[Tensor, int]] = []  # only the size is kept
        self._host: dict[torch.device, HostMemory] = {}
        self._deferred_done: torch.cuda.Event | None = None

    def offload(
        self,
        tensors: Iterable[Tensor],
        *,
        deferred: Iterable[Tensor] = (),
        discarded: Iterable[Tensor] = (),
        reserve: Sequence[int] = (),
    ) -> MemoryTransfer:
        """Copy the storage of `tensors` and `deferred` to the host, shared storage once, and release it.

        Storage of `discarded` is released without a copy and comes back as zeros. `reserve`: sizes in bytes of tensors
        that the next call will add; their host memory is allocated now.
        """
        started = time.perf_counter()
        self._synchronize_deferred()
        seen = set[int]()
        now, later = list(_storage_bytes(tensors, seen)), list(_storage_bytes(deferred, seen))
        copies = self._host_copies([*now, *later], reserve)
        self._offloaded += copies[: len(now)]
        self._deferred += copies[len(now) :]
        for on_device, on_host in copies:
            on_host.copy_(on_device, non_blocking=True)
        if any(on_device.is_cuda for on_device, _ in copies):
            torch.cuda.synchronize()
        self._discarded += [(on_device, on_device.numel()) for on_device in _storage_bytes(discarded, seen)]
        for on_device, _ in (*self._offloaded, *self._deferred, *self._discarded):
            on_device.untyped_storage().resize_(0)
        empty_cache()
        return self._moved(started)

    def reload(self) -> MemoryTransfer:
        """Restore all tensors. On a GPU the `deferred` ones may still be copied on return; see `wait_for_deferred`."""
        started = time.perf_counter()
        for on_device, on_host in (*self._offloaded, *self._deferred):
            on_device.untyped_storage().resize_(on_host.numel())
        for on_device, size in self._discarded:
            on_device.untyped_storage().resize_(size)
            on_device.zero_()
        for on_device, on_host in self._offloaded:
            on_device.copy_(on_host, non_blocking=True)
        if device := next((t.device for t, _ in (*self._offloaded, *self._deferred) if t.is_cuda), None):
            if self._deferred:
                self._copy_deferred(device)
            torch.cuda.current_stream(device).synchronize()
        else:
            for on_device, on_host in self._deferred:
                on_device.copy_(on_host)
        moved = self._moved(started)
        for entries in (self._discarded, self._offloaded, self._deferred):
            entries.clear()
        return moved

    def _copy_deferred(self, device: torch.device) -> None:
        """Start copying the deferred tensors on a separate stream, after the others."""
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for on_device, on_host in self._deferred:
                on_device.copy_(on_host, non_blocking=True)
            self._deferred_done = torch.cuda.Event()
            self._deferred_done.record(stream)

    def wait_for_deferred(self) -> None:
        """Make the current stream wait for the deferred tensors of the last `reload`."""
        if self._deferred_done is not None:
            torch.cuda.current_stream().wait_event(self._deferred_done)

    def _synchronize_deferred(self) -> None:
        """Block until the deferred copies are done, because their host memory is about to be overwritten."""
        if self._deferred_done is not None:
            self._deferred_done.synchronize()
            self._deferred_done = None

    def _host_copies(self, on_device: Sequence[Tensor], reserve: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Pair byte tensors of one device with host memory of the same size."""
        if not on_device:
            return []
        host = self._host.setdefault(on_device[0].device, HostMemory(on_device[0].device))
        return list(zip(on_device, host.place([each.numel() for each in on_device], reserve=reserve), strict=True))

    def _moved(self, started: float) -> MemoryTransfer:
        num_bytes = sum(on_host.numel() for _, on_host in (*self._offloaded, *self._deferred))
        return MemoryTransfer(num_bytes, time.perf_counter() - started)


class OptimizerOffload:
    """Keeps optimizer tensors on the host, and loads them to the device for each step.

    tensors: returns the tensors to offload, called each time they leave the device; may be empty. wait: called before
    use, waits for optimizer tensors that another offload is still reloading.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], wait: Callable[[], None]) -> None:
        self._tensors, self._wait = tensors, wait
        self._host, self._is_loaded = HostOffload(), False
        self._offload()

    @contextmanager
    def loaded(self) -> Generator[None]:
        """Keep the tensors on the device inside the block. Reentrant."""
        self._wait()
        if self._is_loaded:
            yield
            return
        self._host.reload()
        self._host.wait_for_deferred()
        self._is_loaded = True
        yield
        self._offload()

    def _offload(self) -> None:
        self._is_loaded = False
        if tensors := list(self._tensors()):
            self._host.offload(tensors)


def _storage_bytes(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[Tensor]:
    """Yield the storage of tensors as uint8, each storage once. `seen` holds the addresses of earlier ones."""
    for tensor in tensors:
        storage = tensor.detach().untyped_storage()
        if storage.size() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
