"""Attention of several prompts packed into one sequence on CUDA, and their places in the slot cache.

Axes: T packed prompt tokens, H query heads, K key/value heads, D head width, S slots of the cache, L cached positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from furlong.inference.embedded.decode_steps import SlotCache
from furlong.models.varlen_attention import varlen_attention


class PackedPrompts:
    """Prompts of `lengths` in one sequence with the rows of `rows_TE`; further rows are padding.

    Their keys and values are stored in `slots` of `cache`.
    """

    def __init__(self, lengths: Sequence[int], slots: Sequence[int], cache: SlotCache, rows_TE: Tensor) -> None:
        device = rows_TE.device
        self._num_tokens = sum(lengths)
        padding = len(rows_TE) - self._num_tokens
        sequences = [*lengths, padding] if padding else list(lengths)
        self._ends = torch.tensor([0, *sequences], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._ends_on_device = self._ends.to(device)
        self._longest = max(sequences)
        kv_heads = cache.layers[0][0].shape[1]
        first_T = torch.cat(
            [slot * kv_heads * cache.length + torch.arange(n) for slot, n in zip(slots, lengths, strict=True)]
        )
        heads_K = torch.arange(kv_heads) * cache.length
        self._cells = (first_T[:, None] + heads_K).flatten().to(device)

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: tuple[Tensor, Tensor], scale: float) -> Tensor:
        """Store keys and values in `layer`; returns the attention of each prompt over itself [T, H D]."""
        for cached, new in zip(layer, (k_TKD, v_TKD), strict=True):
            width = cached.shape[3]
            cached.view(-1, width).index_copy_(0, self._cells, new[: self._num_tokens].reshape(-1, width))
        out_THD = varlen_attention(
            q_THD.contiguous(), k_TKD.contiguous(), v_TKD.contiguous(), self._ends_on_device, self._ends,
            self._longest, scale=scale,
        )  # fmt: skip
        return out_THD.flatten(1)
