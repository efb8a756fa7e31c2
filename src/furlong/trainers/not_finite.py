"""Losses and gradients that are nan or infinite: where they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from furlong.core.batch import IntArray
from furlong.errors import TrainerError
from furlong.trainers.ranks import Ranks


class NotFiniteLossError(TrainerError):
    """A micro-batch whose loss is not finite; `rows` are its samples' rows in the batch, `what` says which value."""

    def __init__(self, what: str, rows: IntArray) -> None:
        super().__init__(what, rows)
        self.what, self.rows = what, rows

    def __str__(self) -> str:
        return f"{self.what} in the micro-batch of rows {self.rows.tolist()}"


def first_not_finite(gradients: Iterable[tuple[str, Tensor | None]], ranks: Ranks) -> str:
    """Name the first parameter whose gradient is not finite, on the lowest rank that has one. A collective."""
    bad = (name for name, grad in gradients if grad is not None and not bool(torch.isfinite(grad).all()))
    return ranks.first(next(bad, "")) or "the sum over all parameters (each is finite)"
