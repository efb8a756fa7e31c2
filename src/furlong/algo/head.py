"""Settings of the fused output layer, shared by its implementations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """Settings of the log-prob computation. Logits are computed for `chunk_size` rows at a time; -1 is all rows."""

    temperature: float
    softcap: float | None
    chunk_size: int
    entropy: bool
    entropy_grad: bool

    @property
    def is_plain(self) -> bool:
        """Whether the gradient w.r.t. logits is a row scale times (p - onehot)."""
        return self.softcap is None and not self.entropy_grad

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """Yield row ranges of at most `chunk_size` rows."""
        size = self.chunk_size if self.chunk_size > 0 else max(num_rows, 1)
        for start in range(0, num_rows, size):
            yield slice(start, min(start + size, num_rows))


def accumulator(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums over the vocabulary."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
