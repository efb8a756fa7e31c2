"""Pinned host memory for offloaded tensors, allocated fast and reused.

CUDA's allocator touches and pins one 4 KiB page after another. Here pages are huge where the system supports it, and
threads touch and pin blocks of memory in parallel.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from furlong.errors import TrainerError
from furlong.machine import available_memory

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2 << 30  # allocated by a thread at a time; a larger tensor gets its own block
ALIGN_BYTES = 512
HUGE_PAGE, PAGE = 2 << 20, 4096
MAX_THREADS = 16


class HostMemory:
    """Blocks of host memory, reassigned at each `place`.

    device: where the tensors live; memory for CPU tensors is not pinned. left: returns the free bytes of the machine.
    """

    def __init__(self, device: torch.device, *, left: Callable[[], int | None] = available_memory) -> None:
        self._device, self._left = device, left
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
        """Add blocks."""
        left = self._left()
        if left is not None and sum(sizes) > left:
            raise TrainerError(
                f"offloading needs {sum(sizes) / 2**30:.1f} GiB of host memory in addition to "
                f"{self.num_bytes / 2**30:.1f} GiB, but {left / 2**30:.1f} GiB are free; give the machine (or the "
                "container) more memory, use more GPUs, or do not offload: --no-offload-train, without "
                "--offload-optimizer-states and --optimizer-cpu-offload"
            )
        if self._device.type != "cuda":
            self._blocks += [torch.empty(size, dtype=torch.uint8) for size in sizes]
            return
        with ThreadPoolExecutor(min(len(sizes), os.cpu_count() or 1, MAX_THREADS)) as pool:
            self._blocks += pool.map(self._pinned, sizes)

    def _pinned(self, size: int) -> Tensor:
        """Allocate one pinned block. Called in threads."""
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
