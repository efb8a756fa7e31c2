"""Pinned host memory for what leaves the GPU, taken quickly the first time and kept for the next.

CUDA's own way to get such memory fills and pins one page of 4 KiB after the other. Here the pages are huge where the
system has such, threads fill and pin pieces of it at a time, and what will be wanted later is taken with the rest.
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

PIECE_BYTES = 2 << 30  # that a thread takes at a time; a larger tensor has a piece of its own
ALIGN_BYTES = 512
HUGE_PAGE, PAGE = 2 << 20, 4096
MAX_THREADS = 16


class HostMemory:
    """Pieces of host memory, handed out anew at each `place`.

    device: whose copies it is for; memory for a CPU's tensors is not pinned. left: bytes that the machine has to give.
    """

    def __init__(self, device: torch.device, *, left: Callable[[], int | None] = available_memory) -> None:
        self._device, self._left = device, left
        self._pieces: list[Tensor] = []
        self._registered: list[Tensor] = []  # those of them that CUDA was told of
        weakref.finalize(self, _unregister, self._registered).atexit = False

    @property
    def num_bytes(self) -> int:
        """What was taken so far."""
        return sum(piece.numel() for piece in self._pieces)

    def place(self, sizes: Sequence[int], *, later: Sequence[int] = ()) -> list[Tensor]:
        """Memory of these sizes, in bytes; what was given before may be given again.

        Memory for `later` is taken, too, so that it is there. Raises TrainerError if the machine has less.
        """
        wanted = [*sizes, *later]
        spans, pieces = packed(wanted, [piece.numel() for piece in self._pieces])
        if new := pieces[len(self._pieces) :]:
            self._take(new)
        found = [self._pieces[piece][start : start + wanted[i]] for i, (piece, start) in enumerate(spans)]
        return found[: len(sizes)]

    def _take(self, sizes: Sequence[int]) -> None:
        """Add pieces."""
        left = self._left()
        if left is not None and sum(sizes) > left:
            raise TrainerError(
                f"what leaves the GPU needs {sum(sizes) / 2**30:.1f} GiB more of host memory beside "
                f"{self.num_bytes / 2**30:.1f} GiB, and {left / 2**30:.1f} GiB are left; give the machine (or the "
                "container) more, use more GPUs, or let it stay: --no-offload-train, and no --offload-optimizer-states "
                "or --optimizer-cpu-offload"
            )
        if self._device.type != "cuda":
            self._pieces += [torch.empty(size, dtype=torch.uint8) for size in sizes]
            return
        with ThreadPoolExecutor(min(len(sizes), os.cpu_count() or 1, MAX_THREADS)) as pool:
            self._pieces += pool.map(self._pinned, sizes)

    def _pinned(self, size: int) -> Tensor:
        """One piece that the device copies from and to at full speed. Called in threads."""
        piece = _filled(size)
        with torch.cuda.device(self._device):
            code = int(_cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
        if code == 0:
            self._registered.append(piece)
            return piece
        logger.warning(
            "cudaHostRegister of %.2f GiB failed with code %d; CUDA allocates the memory, which takes longer",
            size / 2**30, code,
        )  # fmt: skip
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def packed(sizes: Sequence[int], pieces: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Where each of `sizes` goes, as (piece, first byte), and the pieces, those that are there and new ones.

    The largest first, each into the first piece that has room: the same sizes get the same places again.
    """
    all_pieces, used = list(pieces), [0] * len(pieces)
    places: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    rest = sum(_aligned(size) for size in sizes)
    first: dict[int, int] = {}  # where a tensor of this size can be: those before have no room for it
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = _aligned(sizes[i])
        piece = first.get(size, 0)
        while piece < len(all_pieces) and used[piece] + size > all_pieces[piece]:
            piece += 1
        if piece == len(all_pieces):
            all_pieces.append(max(size, min(rest, PIECE_BYTES)))
            used.append(0)
        first[size] = piece
        places[i] = piece, used[piece]
        used[piece] += size
        rest -= size
    return places, all_pieces


def _filled(num_bytes: int) -> Tensor:
    """Memory whose pages are there, huge ones where the system has such."""
    size = math.ceil(num_bytes / HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    # After a fork the pages that this process writes to would be others than those that the GPU was told of.
    memory.madvise(mmap.MADV_DONTFORK)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor[::PAGE].zero_()
    return tensor


def _unregister(pieces: list[Tensor]) -> None:
    """Before the memory is unmapped, as whatever gets its address next could not be pinned else."""
    for piece in pieces:
        _cudart().cudaHostUnregister(piece.data_ptr())
    pieces.clear()


def _cudart() -> Any:
    return torch.cuda.cudart()


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGN_BYTES) * ALIGN_BYTES
