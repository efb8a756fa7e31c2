"""Offload of device tensors to pinned host memory, and device memory statistics.

Only storage moves: it is copied to the host and resized to 0 bytes, and later resized back and filled. Tensor objects
(parameters, shards, optimizer states, views) stay valid.

Host memory is allocated fast and reused. CUDA's allocator touches and pins one 4 KiB page after another; here pages are
huge where the system supports it, and threads touch and pin blocks of memory in parallel.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from furlong.core.device_memory import DeviceMemory, MemoryTransfer
from furlong.errors import TrainerError
from furlong.machine import available_memory

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2 << 30  # allocated by a thread at a time; a larger tensor gets its own block
ALIGN_BYTES = 512
HUGE_PAGE, PAGE = 2 << 20, 4096
MAX_THREADS = 16


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
    return DeviceMemory(used=total - free, total=total, reserved=torch.cuda.memory_reserved(device), peak=peak)


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
        if self._deferred_done is not None:  # the host memory that is read is about to be overwritten
            self._deferred_done.synchronize()
            self._deferred_done = None
        seen = set[int]()
        now, later = list(_storage_bytes(tensors, seen)), list(_storage_bytes(deferred, seen))
        copies: list[tuple[Tensor, Tensor]] = []
        if on_device := [*now, *later]:
            device = on_device[0].device
            host = self._host.setdefault(device, HostMemory(device))
            copies = list(zip(on_device, host.place([t.numel() for t in on_device], reserve=reserve), strict=True))
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
            if self._deferred:  # on a separate stream, after the others
                stream = torch.cuda.Stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    for on_device, on_host in self._deferred:
                        on_device.copy_(on_host, non_blocking=True)
                    self._deferred_done = torch.cuda.Event()
                    self._deferred_done.record(stream)
            torch.cuda.current_stream(device).synchronize()
        else:
            for on_device, on_host in self._deferred:
                on_device.copy_(on_host)
        moved = self._moved(started)
        for entries in (self._discarded, self._offloaded, self._deferred):
            entries.clear()
        return moved

    def wait_for_deferred(self) -> None:
        """Make the current stream wait for the deferred tensors of the last `reload`."""
        if self._deferred_done is not None:
            torch.cuda.current_stream().wait_event(self._deferred_done)

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

    @contextlib.contextmanager
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


class HostMemory:
    """Blocks of host memory, reassigned at each `place`.

    device: where the tensors live; memory for CPU tensors is not pinned. free_bytes: returns those of the machine.
    """

    def __init__(self, device: torch.device, *, free_bytes: Callable[[], int | None] = available_memory) -> None:
        self._device, self._free_bytes = device, free_bytes
        self._blocks: list[Tensor] = []
        self._registered: list[Tensor] = []  # blocks registered with CUDA
        weakref.finalize(self, _unregister, self._registered).atexit = False

    @property
    def num_bytes(self) -> int:
        """Bytes allocated so far."""
        return sum(block.numel() for block in self._blocks)

    def place(self, sizes: Sequence[int], *, reserve: Sequence[int] = ()) -> list[Tensor]:
        """Return memory of these sizes in bytes. It may overlap with what earlier calls returned.

        Memory for `reserve` is allocated for a later call. Raises TrainerError if the machine has too little.
        """
        places, blocks = packed([*sizes, *reserve], [block.numel() for block in self._blocks])
        if new := blocks[len(self._blocks) :]:
            self._allocate(new)
        return [self._blocks[block][start : start + size] for size, (block, start) in zip(sizes, places, strict=False)]

    def _allocate(self, sizes: Sequence[int]) -> None:
        free = self._free_bytes()
        if free is not None and sum(sizes) > free:
            raise TrainerError(
                f"offloading needs {sum(sizes) / 2**30:.1f} GiB of host memory in addition to "
                f"{self.num_bytes / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free; give the machine (or the "
                "container) more memory, use more GPUs, or do not offload: --no-offload-train, without "
                "--offload-optimizer-states and --optimizer-cpu-offload"
            )
        if self._device.type != "cuda":
            self._blocks += [torch.empty(size, dtype=torch.uint8) for size in sizes]
            return
        with ThreadPoolExecutor(min(len(sizes), os.cpu_count() or 1, MAX_THREADS)) as pool:
            self._blocks += pool.map(self._pinned, sizes)

    def _pinned(self, size: int) -> Tensor:
        block = _filled(size)
        with torch.cuda.device(self._device):
            code = int(_cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0))
        if code == 0:
            self._registered.append(block)
            return block
        logger.warning(
            "cudaHostRegister of %.2f GiB failed with code %d; falling back to the slower CUDA allocator",
            size / 2**30, code,
        )  # fmt: skip
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def packed(sizes: Sequence[int], blocks: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the place of each size, as (block, first byte), and the sizes of all blocks, existing and new.

    First fit decreasing, so the same sizes get the same places again.
    """
    all_blocks, used = list(blocks), [0] * len(blocks)
    places: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    rest = sum(_aligned(size) for size in sizes)
    first: dict[int, int] = {}  # first block that may have room for this size
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = _aligned(sizes[i])
        block = first.get(size, 0)
        while block < len(all_blocks) and used[block] + size > all_blocks[block]:
            block += 1
        if block == len(all_blocks):
            all_blocks.append(max(size, min(rest, BLOCK_BYTES)))
            used.append(0)
        first[size] = block
        places[i] = block, used[block]
        used[block] += size
        rest -= size
    return places, all_blocks


def _filled(num_bytes: int) -> Tensor:
    """Return memory whose pages are already mapped, huge ones if the system supports them."""
    size = math.ceil(num_bytes / HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    # After a fork, copy-on-write would give this process other pages than those registered with the GPU.
    memory.madvise(mmap.MADV_DONTFORK)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor[::PAGE].zero_()
    return tensor


def _unregister(blocks: list[Tensor]) -> None:
    """Unregister memory before it is unmapped; otherwise its addresses could not be pinned again."""
    for block in blocks:
        _cudart().cudaHostUnregister(block.data_ptr())
    blocks.clear()


def _cudart() -> Any:
    return torch.cuda.cudart()


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGN_BYTES) * ALIGN_BYTES
