"""Attention of one new position per slot over a slot cache.

Axes: N decoding slots, K key/value heads, G query heads of each, D head width, L cached positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from furlong.inference.embedded.decode_linear import has_bfloat16_matmul

FLOAT_ROWS = 2


def decode_mask(
    positions_N: Tensor, length: int, dtype: torch.dtype, num_kv_heads: int, window: int | None = None
) -> Tensor:
    """Additive mask [N * K, 1, L]: 0 up to and including each slot's position, -inf beyond.

    With `window`, only the last `window` positions are visible.
    """
    device = positions_N.device
    at_L, slot_N11 = torch.arange(length, device=device), positions_N[:, None, None]
    hidden = at_L > slot_N11
    if window is not None:
        hidden |= at_L <= slot_N11 - window
    mask = torch.zeros(len(positions_N), num_kv_heads, length, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf")).view(-1, 1, length)


def attend_slots(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of one position per slot over cached keys [N, K, L, D]; returns [N * K, G, Dv].

    `q` [N * K, G, D] has the heads of a KV group as rows, so that they share one matmul. On CPU, plain batched matmuls
    are three times as fast as the fused kernel at these shapes. In float32 at most two rows are multiplied together:
    for four or more MKL splits long sums, so that they depend on the number of cached positions. In half precision a
    single row is duplicated if oneDNN does not support it: PyTorch's matrix-vector kernel splits sums as well.
    """
    k, v = keys.flatten(0, 1), values.flatten(0, 1)
    if q.device.type != "cpu":
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    keys_t = k.transpose(1, 2)
    sizes = row_parts(q, q.shape[1])
    if sizes is None:
        return attend_rows(q.repeat(1, 2, 1), keys_t, v, mask, scale)[:, :1]
    if len(sizes) == 1:
        return attend_rows(q, keys_t, v, mask, scale)
    return torch.cat([attend_rows(part, keys_t, v, mask, scale) for part in q.split(sizes, 1)], 1)


def row_parts(q: Tensor, rows: int) -> list[int] | None:
    """Split of the `rows` queries of a KV group into matmuls on the CPU; None to duplicate a single one."""
    if q.device.type != "cpu":
        return None
    if q.dtype == torch.float32 and rows > FLOAT_ROWS:
        return [min(FLOAT_ROWS, rows - i) for i in range(0, rows, FLOAT_ROWS)]
    has_kernel = q.dtype.itemsize > 2 or (q.dtype == torch.bfloat16 and has_bfloat16_matmul())
    return [rows] if has_kernel or rows > 1 else None


def attend_rows(
    q: Tensor, keys_t: Tensor, values: Tensor, mask: Tensor, scale: float, into: Sequence[Tensor | None] = (None,) * 3
) -> Tensor:
    """softmax(scale q k + mask) v as batched matmuls; `into` are output buffers for scores, weights and result."""
    scores = torch.bmm(q, keys_t, out=into[0])
    torch.add(mask, scores, alpha=scale, out=scores)
    return torch.bmm(torch.softmax(scores, -1, out=into[1]), values, out=into[2])
