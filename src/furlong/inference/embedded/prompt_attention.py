"""Attention of prompts over the slot cache, in chunks on a fixed grid.

A prompt may begin with cached positions, and its log-probs must not depend on how many. On a CPU, the sums of an
attention kernel depend on the number of keys. So queries are attended in chunks of `CHUNK` positions that begin at
multiples of `CHUNK`, over all positions up to the end of the chunk: a query always has the same number of keys. The
number of queries in a call changes nothing if it is a multiple of `ROW_MULTIPLE`, so only the new ones are computed.
On a GPU there is one call, and the last bits may depend on the number of cached positions.
Axes: B = 1 prompt, H query heads, K key/value heads, T new positions, C positions of a chunk, L cached positions,
S slots of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from furlong.inference.embedded.decode_steps import SlotCache
from furlong.models.varlen_attention import varlen_attention

CHUNK = 32
ROW_MULTIPLE = 4


class PromptMask:
    """Additive masks of the last positions, views of one buffer. `window` is that of the layers; None without one."""

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self._buffer: Tensor | None = None

    def __call__(self, rows: int, length: int, like: Tensor, *, hidden: int = 0) -> Tensor:
        """The mask [rows, length] of `rows` queries, `hidden` positions before the last of `length` positions."""
        mask, needed = self._buffer, max(CHUNK, rows + hidden)
        is_alike = mask is not None and (mask.dtype, mask.device) == (like.dtype, like.device)
        if mask is None or not is_alike or mask.shape[0] < needed or mask.shape[1] < length:
            columns = max(length, needed, 0 if mask is None else 2 * mask.shape[1])
            at_rows = torch.arange(columns - needed, columns, device=like.device)[:, None]
            at_columns = torch.arange(columns, device=like.device)
            is_hidden = at_columns > at_rows
            if self.window is not None:
                is_hidden |= at_columns <= at_rows - self.window
            mask = torch.zeros(needed, columns, dtype=like.dtype, device=like.device)
            self._buffer = mask = mask.masked_fill_(is_hidden, float("-inf"))
        end = mask.shape[0] - hidden
        return mask[end - rows : end, -length:]


def attend_prompt(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    mask: PromptMask,
    scale: float,
    *,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of queries [1, H, T, D] at positions from `start` on; returns [1, H, T, Dv].

    `keys` and `values` [1, K, L, _] have all positions of the prompt, and finite numbers up to the next multiple of
    `CHUNK`. `sinks` [H] are logits without a value (gpt-oss); `softcap` limits scores (Gemma 2).
    """
    end = start + query.shape[2]
    attend = partial(_attend, mask=mask, scale=scale, sinks=sinks, softcap=softcap)
    if query.device.type != "cpu":
        return attend(query, keys[:, :, :end], values[:, :, :end], hidden=0)
    parts: list[Tensor] = []
    multiple = ROW_MULTIPLE if sinks is None and softcap is None else CHUNK
    for first in range(start - start % CHUNK, end, CHUNK):
        begin, stop = max(first, start), min(first + CHUNK, end)
        before, after = begin % multiple, -stop % multiple
        part = query[:, :, begin - start : stop - start]
        if before or after:
            part = functional.pad(part, (0, 0, before, after))
        length, hidden = first + CHUNK, first + CHUNK - (stop + after)
        out = attend(part, keys[:, :, :length], values[:, :, :length], hidden=hidden)
        parts.append(out[:, :, before : before + stop - begin])
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    mask: PromptMask,
    scale: float,
    sinks: Tensor | None,
    softcap: float | None,
    hidden: int,
) -> Tensor:
    """Attention of queries that end `hidden` positions before the last key."""
    rows, length = query.shape[2], keys.shape[2]
    if sinks is None and softcap is None:
        is_causal = query.device.type != "cpu" and rows == length and mask.window is None
        masked: dict[str, Any] = {"is_causal": True}
        if not is_causal:
            masked = {"attn_mask": mask(rows, length, query, hidden=hidden)}
        return functional.scaled_dot_product_attention(query, keys, values, **masked, scale=scale, enable_gqa=True)
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    row_sinks = None if sinks is None else sinks.view(1, -1, 1, 1)
    row_mask = mask(rows, length, query, hidden=hidden)
    return attend_explicitly(query, keys, values, row_mask, scale, row_sinks, softcap)


def attend_explicitly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    """Attention with a sink logit per head (gpt-oss) or capped scores (Gemma 2), float32 inside."""
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask.float()
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        sinks = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)


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
