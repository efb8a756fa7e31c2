"""The KV cache of the embedded engine, with one slot per sequence, and attention of one new position per slot over it.

Axes: N decoding slots, S slots of the cache, L cached positions, K key/value heads, G query heads of each, D head
width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from furlong.inference.embedded.decode_linear import has_bfloat16_matmul


class SlotCache:
    """Keys and values of every slot. `layers` are pairs (keys, values), each [S, K, L, D].

    Unwritten positions are zero, so that masked positions are never NaN. `prepared` caches what a model derives from
    these tensors for decoding; it is dropped when they change.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.prepared: object | None = None
        self._spare: torch.UntypedStorage | None = None  # of the tensor that was resized before
        self.num_slots = 0
        self.length = 0

    def resize(self, num_slots: int, length: int) -> None:
        """Resize to `num_slots` slots of `length` positions, keeping what fits."""
        self.num_slots, self.length = num_slots, length
        self.prepared = None
        self.layers = [(self._resized(keys), self._resized(values)) for keys, values in self.layers]

    def _resized(self, old: Tensor) -> Tensor:
        new = self._allocate(old, (self.num_slots, old.shape[1], self.length, old.shape[3]))
        slots, length = min(self.num_slots, old.shape[0]), min(self.length, old.shape[2])
        new[:slots, :, :length] = old[:slots, :, :length]
        new[:slots, :, length:] = 0
        new[slots:] = 0
        return new

    def _allocate(self, old: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Uninitialized memory for the resized `old`.

        On the CPU each tensor moves into the memory of the previous one, because pages that the process has never
        touched cost more than copying. Spare memory is not touched until it is used.
        """
        if old.device.type != "cpu":
            return old.new_empty(shape)
        size = math.prod(shape)
        spare, self._spare = self._spare, old.untyped_storage()
        if spare is None or not size <= spare.nbytes() // old.itemsize <= 4 * size:
            spare = old.new_empty(size + size // 2).untyped_storage()
        return old.new_empty(0).set_(spare, 0, shape)  # pyright: ignore[reportCallIssue]  torch lists no such overload

    def layer(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of layer `index`, created on first use with K and D of `keys`, `values` [_, K, _, D]."""
        while len(self.layers) <= index:
            self.prepared = None
            shapes = [(self.num_slots, t.shape[1], self.length, t.shape[3]) for t in (keys, values)]
            self.layers.append((keys.new_zeros(shapes[0]), values.new_zeros(shapes[1])))
        return self.layers[index]

    def places(self, positions_N: Tensor, num_kv_heads: int) -> Tensor:
        """Row numbers [N * K] of each slot's `positions_N` in keys or values viewed as [S * K * L, D]."""
        end = len(positions_N) * num_kv_heads * self.length
        rows = torch.arange(0, end, self.length, device=positions_N.device).view(-1, num_kv_heads)
        return (rows + positions_N[:, None]).view(-1)

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy the first `length` positions of slot `source` to every slot of `targets`."""
        for pair in self.layers:
            for tensor in pair:
                tensor[targets, :, :length] = tensor[source, :, :length]

    def export(self, slot: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """A copy of the first `length` positions of `slot`."""
        return [(keys[slot, :, :length].clone(), values[slot, :, :length].clone()) for keys, values in self.layers]

    def insert(self, exported: Sequence[tuple[Tensor, Tensor]], targets: slice) -> None:
        """Write what `export` returned into every slot of `targets`."""
        for pair, stored in zip(self.layers, exported, strict=True):
            for tensor, part in zip(pair, stored, strict=True):
                tensor[targets, :, : part.shape[1]] = part


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
