"""What a forward pass costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from furlong.core.batch import IntArray

Costs = NDArray[np.float64]


@dataclass(frozen=True)
class FlopsModel:
    """Forward cost of a sequence of L tokens: per_token * L + per_pair * L^2.

    For a dense decoder per_token is about 2 * (parameters without embeddings) + 2 * D * V and per_pair about
    2 * layers * heads * head_dim (causal). windows: layers in which a query sees W tokens, as (W, what such layers
    would add to per_pair); of L^2 these see W * (2 L - W) where L is larger.
    """

    per_token: float
    per_pair: float
    windows: tuple[tuple[int, float], ...] = ()

    def cost(self, lengths: IntArray) -> Costs:
        """FLOPs of each sequence."""
        lengths_f = lengths.astype(np.float64)
        found = self.per_token * lengths_f + self.per_pair * lengths_f**2
        for window, each in self.windows:
            seen = np.minimum(lengths_f, window)
            found = found + each * seen * (2 * lengths_f - seen)
        return found
