"""What trainer ranks tell each other during a publication: short messages, over gloo."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT_S = 600.0


class Peers:
    """The trainer ranks, or this process alone. With several ranks it is made on all of them at once."""

    def __init__(self, *, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self._group = None
        if world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))

    def exchange(self, message: bytes) -> list[bytes]:
        """Every rank's message, by rank; returns when all ranks have called."""
        if self.world_size == 1:
            return [message]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(message)]), group=self._group)
        longest = max(int(size) for size in sizes)
        own = torch.zeros(longest, dtype=torch.uint8)
        if message:
            own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        found: list[Tensor] = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(found, own, group=self._group)
        return [bytes(each[: int(size)].numpy()) for each, size in zip(found, sizes, strict=True)]
