"""Decode steps of fused models, and what they compute with: the slot cache, linear layers, attention and norms.

`DecodeSteps` prepares buffers for a CPU; `CudaSteps` captures one CUDA graph for each number of slots, at its first
use. A graph contains addresses: weight loads write in place, so they do not affect it, and the graphs of a cache are
dropped when its tensors move, and when released weights are allocated again.

Axes: N decoding slots, S slots of the cache, H query heads, K key/value heads, G = H / K, D head width, E model width,
L cached positions, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import platform
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

MIN_GROWN_LENGTH = 256  # positions of a cache that grows by doubling
MAX_BLOCKED_BYTES = 4 * 2**30  # larger weights have no blocked copy

FLOAT_ROWS = 2
MIN_CAPABILITY = (8, 0)
STEP_ROWS = [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
NORM_PADDING = 16  # columns that keep rows aligned

_torch: Any = torch  # undeclared: operators with `out`, and a fused one
_silu = _torch._C._nn.silu
_scaled_to_length = _torch._weight_norm_interface
_onednn: Any = torch.ops.mkldnn
_plain, _added = _onednn._linear_pointwise.default, _onednn._linear_pointwise.binary


class DecodeLinear:
    """x @ weight.T + bias, with `weight` [out, in] and `bias` [out] in checkpoint layout.

    `order` [out] permutes the columns of the result; None: no permutation.

    On x86 CPUs a plain matmul converts the weight to oneDNN's blocked layout in every call, which costs more than the
    matmul itself for a few dozen rows. So a blocked copy is kept and renewed after each write, at twice the memory. A
    row of the result does not depend on the number of rows if there are at least two, except in bfloat16 on CPUs with
    AMX, where the summation order of oneDNN does depend on it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, order: Tensor | None = None) -> None:
        self.weight, self.bias, self._order = weight, bias, order
        self._blocked: Tensor | None = None
        self._blocked_bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply at least two rows [T, in]."""
        if self._blocked is None:
            out = functional.linear(x, self.weight, self.bias)
            return out if self._order is None else out.index_select(-1, self._order)
        return _plain(x, self._blocked, self._blocked_bias, "none", [], "")

    def added_to(self, rest: Tensor, x: Tensor) -> Tensor:
        """Return `rest` [T, out] plus the result, rounded once. Not supported with an `order`."""
        if self._blocked is None:
            out = torch.addmm(rest, x, self.weight.t())
            return out if self.bias is None else out.add_(self.bias)
        return _added(x, rest, self._blocked, self._blocked_bias, "add")

    def block(self) -> None:
        """Renew the blocked copy of the weight."""
        weight, self._blocked_bias = self.weight, self.bias
        if self._order is not None:
            weight = weight.index_select(0, self._order)
            self._blocked_bias = None if self.bias is None else self.bias.index_select(0, self._order)
        self._blocked = _onednn._reorder_linear_weight(weight, None)


@dataclass
class DenseLayer:
    """Weights of a decoder layer."""

    input_norm_E: Tensor
    qkv: DecodeLinear
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    out: DecodeLinear
    post_norm_E: Tensor
    gate_up: DecodeLinear
    down: DecodeLinear


def supports_blocks(weights: Iterable[Tensor]) -> bool:
    """Whether blocked copies of these weights, all of one dtype and device, pay off."""
    weights = list(weights)
    first = weights[0]
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    if first.device.type != "cpu" or not is_x86 or not torch.backends.mkldnn.is_available():
        return False
    has_kernels = first.dtype == torch.float32 or (first.dtype == torch.bfloat16 and has_bfloat16_matmul())
    return has_kernels and sum(weight.nbytes for weight in weights) <= MAX_BLOCKED_BYTES


@cache
def has_bfloat16_matmul() -> bool:
    """Whether oneDNN supports bfloat16 matmuls on this CPU."""
    return torch.backends.mkldnn.is_available() and bool(_onednn._is_mkldnn_bf16_supported())


@dataclass
class SlotContent:
    """A copy of one slot: keys and values of its first positions by layer, and its recurrent states."""

    layers: list[tuple[Tensor, Tensor]]
    states: dict[str, Tensor]


class SlotCache:
    """Keys and values of every slot. `layers` are pairs (keys, values), each [S, K, L, D].

    `states` are those of recurrent layers by name, each [S, ...], after the last token of each slot.

    Unwritten positions are zero, so that masked positions are never NaN. `prepared` caches what a model derives from
    these tensors for decoding; it is dropped when they change. With `allocate_block` the tensors of all layers
    are views of one, so that copying a slot is one operation.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.states: dict[str, Tensor] = {}
        self.prepared: object | None = None
        self._block: Tensor | None = None  # [2 layers, S, K, L, D]
        self.num_slots = 0
        self.length = 0

    def allocate_block(self, num_layers: int, kv_heads: int, head_dim: int, like: Tensor) -> None:
        """Create the layers as views of one tensor, with the dtype and device of `like`, if there are none."""
        if not self.layers:
            self._set_block(like.new_zeros(2 * num_layers, self.num_slots, kv_heads, self.length, head_dim))

    def _set_block(self, block: Tensor) -> None:
        self._block = block
        self.layers = [(block[i], block[i + 1]) for i in range(0, len(block), 2)]

    def resize(self, num_slots: int, length: int) -> None:
        """Resize to `num_slots` slots of `length` positions, keeping what fits."""
        self.num_slots, self.length = num_slots, length
        self.prepared = None
        if self._block is not None:
            self._set_block(self._resized(self._block))
        else:
            self.layers = [(self._resized(keys), self._resized(values)) for keys, values in self.layers]
        for name, old in self.states.items():
            self.states[name] = old.new_zeros(num_slots, *old.shape[1:])
            self.states[name][: len(old)] = old[:num_slots]

    def grow(self, slots: int, length: int, final_length: int, max_tokens: int) -> None:
        """Resize to at least `slots` and `length`, at most `max_tokens` in all unless these need more.

        For captured steps, which depend on the layout: the length is the `final_length` of all requests if that fits,
        else it doubles. It shrinks only for more slots.
        """
        if slots <= self.num_slots and length <= self.length:
            return
        slots = max(slots, self.num_slots if self.num_slots * length <= max_tokens else 0)
        roomy = max(MIN_GROWN_LENGTH, 1 << (length - 1).bit_length(), self.length)
        if slots * final_length <= max_tokens:
            roomy = max(MIN_GROWN_LENGTH, final_length)
        self.resize(slots, max(length, min(roomy, max_tokens // slots)))

    def _resized(self, old: Tensor) -> Tensor:
        """A copy of `old` [..., S, K, L, D] with the new numbers of slots and positions; what it did not have is 0."""
        new = old.new_zeros(*old.shape[:-4], self.num_slots, old.shape[-3], self.length, old.shape[-1])
        slots, length = min(self.num_slots, old.shape[-4]), min(self.length, old.shape[-2])
        new[..., :slots, :, :length, :] = old[..., :slots, :, :length, :]
        return new

    def layer(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of layer `index`, created on first use with K and D of `keys`, `values` [_, K, _, D]."""
        while len(self.layers) <= index:
            self.prepared = None
            shapes = [(self.num_slots, t.shape[1], self.length, t.shape[3]) for t in (keys, values)]
            self.layers.append((keys.new_zeros(shapes[0]), values.new_zeros(shapes[1])))
        return self.layers[index]

    def state(self, name: str, like: Tensor) -> Tensor:
        """The recurrent state `name` of all slots, created on first use with the shape of a row of `like`."""
        if name not in self.states:
            self.states[name] = like.new_zeros(self.num_slots, *like.shape[1:])
        return self.states[name]

    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(
            each.nbytes for each in (*(tensor for pair in self.layers for tensor in pair), *self.states.values())
        )

    def places(self, positions_N: Tensor, num_kv_heads: int) -> Tensor:
        """Row numbers [N * K] of each slot's `positions_N` in keys or values viewed as [S * K * L, D]."""
        end = len(positions_N) * num_kv_heads * self.length
        rows = torch.arange(0, end, self.length, device=positions_N.device).view(-1, num_kv_heads)
        return (rows + positions_N[:, None]).view(-1)

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy slot `source`, of which `length` positions are in use, to every slot of `targets`."""
        if self._block is not None:
            self._block[:, targets, :, :length] = self._block[:, source : source + 1, :, :length]
            return
        for pair in self.layers:
            for tensor in pair:
                tensor[targets, :, :length] = tensor[source, :, :length]
        for state in self.states.values():
            state[targets] = state[source].clone()

    def export(self, slot: int, length: int) -> SlotContent:
        """A copy of `slot`, of which `length` positions are in use."""
        return SlotContent(
            [(keys[slot, :, :length].clone(), values[slot, :, :length].clone()) for keys, values in self.layers],
            {name: state[slot].clone() for name, state in self.states.items()},
        )

    def insert(self, content: SlotContent, targets: slice) -> None:
        """Write what `export` returned into every slot of `targets`."""
        for pair, stored in zip(self.layers, content.layers, strict=True):
            for tensor, part in zip(pair, stored, strict=True):
                tensor[targets, :, : part.shape[1]] = part
        for name, state in content.states.items():
            self.states[name][targets] = state


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


@dataclass(frozen=True)
class StepShape:
    """Sizes and dtypes of a model.

    `wide` is the dtype of sums and rotations, `eps` that of RMSNorm, `scale` that of attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int
    inner: int
    eps: float
    scale: float
    dtype: torch.dtype
    wide: torch.dtype
    device: torch.device


class DecodeSteps:
    """Decode steps of `n` slots over the first `length` positions of `cache` in its current layout.

    A step of a small model has a hundred small operations. Between matmuls, which evict the CPU caches, each takes 2-4
    times as long as alone, and so do allocations and views. So buffers and views are made once for all steps until the
    number of slots or the cache length changes. A returned tensor is valid until the same method is called again.
    """

    def __init__(self, shape: StepShape, cache: SlotCache, n: int, length: int) -> None:
        self.shape, self.n, self.length = shape, n, length
        self._norms = RowNorms(shape, n)
        self._gated = self._new(n, shape.inner)
        self._make_positions(cache.length)
        self._make_heads()
        self._make_attention(cache)

    def _new(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self.shape.dtype, device=self.shape.device)

    def _make_positions(self, cache_length: int) -> None:
        s, n = self.shape, self.n
        self._at = np.full(n, -2, np.int64)
        self._mask = torch.empty(n * s.num_kv_heads, 1, cache_length, dtype=s.dtype, device=s.device)
        self._mask_flat, self._seen = self._mask.view(-1), self._mask[:, :, : self.length]
        ends = torch.arange(n * s.num_kv_heads, device=s.device) * cache_length
        self._first_NK = ends.view(n, s.num_kv_heads)
        self._where_NK = torch.empty_like(self._first_NK)
        self._where = self._where_NK.view(-1)
        self._rotation = torch.empty(n, s.head_dim // 2, dtype=s.wide.to_complex(), device=s.device)
        self._rotation_N1 = self._rotation[:, None]

    def _make_heads(self) -> None:
        s, n = self.shape, self.n
        rotated, all_heads = s.num_heads + s.num_kv_heads, s.num_heads + 2 * s.num_kv_heads
        heads = torch.empty(n, all_heads, s.head_dim, dtype=s.wide, device=s.device)
        self._fused = heads.view(n, -1)
        self._normed_heads = heads[:, :rotated]
        self._pairs = torch.view_as_complex(heads.view(n, all_heads, -1, 2))[:, :rotated]
        self._wide_q = heads[:, : s.num_heads]
        self._wide_kv = heads[:, s.num_heads :].view(n, 2, s.num_kv_heads, s.head_dim).transpose(0, 1)
        self._q = self._new(n, s.num_heads, s.head_dim)
        self._kv = self._new(2, n, s.num_kv_heads, s.head_dim)
        self._new_keys, self._new_values = self._kv.view(2, -1, s.head_dim)

    def _make_attention(self, cache: SlotCache) -> None:
        s, n = self.shape, self.n
        self._rows = [(keys.view(-1, s.head_dim), values.view(-1, s.head_dim)) for keys, values in cache.layers]
        seen = (slice(n), slice(None), slice(self.length))
        self._cached = [(keys[seen], values[seen]) for keys, values in cache.layers]
        self._flat = [(keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)) for keys, values in self._cached]
        self._grouped_q = self._q.view(n * s.num_kv_heads, -1, s.head_dim)
        group = self._grouped_q.shape[1]
        self._out = self._new(n, s.num_heads * s.head_dim)
        out = self._out.view(n * s.num_kv_heads, group, s.head_dim)
        self._parts: list[_LayerPart] | None = None
        if (sizes := row_parts(self._q, group)) is not None:
            queries, outs = self._grouped_q.split(sizes, 1), out.split(sizes, 1)
            self._parts = [
                _LayerPart(
                    q,
                    self._new(len(q), q.shape[1], self.length),
                    self._new(len(q), q.shape[1], self.length),
                    part if len(sizes) == 1 else self._new(*part.shape),
                    part,
                )
                for q, part in zip(queries, outs, strict=True)
            ]

    def move_to(self, positions_N: NDArray[np.int64], rotations_LD: Tensor) -> None:
        """Move to the positions of the next step, for the mask and for writing keys and values."""
        moved = positions_N - self._at
        positions = torch.from_numpy(positions_N).to(self.shape.device)
        torch.add(self._first_NK, positions[:, None], out=self._where_NK)
        if moved.view(np.uint64).max() <= 1:  # each one stays or advances by one
            self._mask_flat.index_fill_(0, self._where, 0.0)
        else:
            kv_heads, length = self.shape.num_kv_heads, self._mask.shape[2]
            self._mask.copy_(decode_mask(positions, length, self.shape.dtype, kv_heads))
        torch.index_select(rotations_LD, 0, positions, out=self._rotation)
        self._at[:] = positions_N

    def norm(self, x: Tensor, gain_E: Tensor) -> Tensor:
        """RMSNorm of rows [N, E]; `gain_E` in the wide dtype."""
        return self._norms(x, gain_E)

    def write_heads(self, index: int, fused: Tensor, qk_gain: Tensor | None) -> None:
        """Rotate queries and keys of a layer's QKV [N, (H + 2K) D] and write keys and values to the cache."""
        self._fused.copy_(fused)
        if qk_gain is not None:
            normed = functional.rms_norm(self._normed_heads, (self.shape.head_dim,), None, self.shape.eps)
            torch.mul(normed, qk_gain, out=self._normed_heads)
        self._pairs.mul_(self._rotation_N1)
        self._q.copy_(self._wide_q)
        self._kv.copy_(self._wide_kv)
        keys, values = self._rows[index]
        keys.index_copy_(0, self._where, self._new_keys)
        values.index_copy_(0, self._where, self._new_values)

    def attend(self, index: int) -> Tensor:
        """Attention of the last written queries over a layer's cache, [N, H D]."""
        if self._parts is None:
            out = attend_slots(self._grouped_q, *self._cached[index], self._seen, self.shape.scale)
            return out.reshape(self._out.shape)
        keys, values = self._flat[index]
        for part in self._parts:
            attend_rows(part.q, keys, values, self._seen, self.shape.scale, (part.scores, part.weights, part.out))
            if part.out is not part.place:
                part.place.copy_(part.out)
        return self._out

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU of [N, inner] each."""
        _silu(gate, out=self._gated)
        return self._gated.mul_(up)


@dataclass(frozen=True)
class _LayerPart:
    """Queries of one matmul, with buffers for scores, weights and output, and the place of the output."""

    q: Tensor
    scores: Tensor
    weights: Tensor
    out: Tensor
    place: Tensor


class RowNorms:
    """RMSNorm of `n` rows.

    On the CPU, PyTorch's implementation takes nine operations. Normalizing rows takes one, the kernel of weight
    normalization, and equals RMSNorm if a row has one more column of sqrt(E eps).
    """

    def __init__(self, shape: StepShape, n: int) -> None:
        self._width, self._eps = shape.width, shape.eps
        self._is_fused = shape.device.type != "cpu"
        rows = torch.zeros(n, shape.width + NORM_PADDING, dtype=shape.wide, device=shape.device)
        rows[:, shape.width] = (shape.width * shape.eps) ** 0.5
        self._rows, self._inside = rows, rows[:, : shape.width]
        self._length = rows.new_full((n, 1), shape.width**0.5)
        self._product = rows.new_empty(n, shape.width)
        self._result = self._product if shape.dtype == shape.wide else self._product.to(shape.dtype)

    def __call__(self, x: Tensor, gain_E: Tensor) -> Tensor:
        """RMSNorm of `x` [n, E] times `gain_E`; valid until the next call."""
        if self._is_fused:
            return functional.rms_norm(x, (self._width,), gain_E, self._eps)
        self._inside.copy_(x)
        normed = _scaled_to_length(self._rows, self._length, 0)[0].narrow(1, 0, self._width)
        torch.mul(normed, gain_E, out=self._product)
        return self._product if self._result is self._product else self._result.copy_(self._product)


def missing_for_graphs(device: torch.device) -> str:
    """Return why decode steps on `device` cannot be graphs of these kernels, "" if they can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is SM {capability[0]}.{capability[1]}, the kernels need SM 8.0"
    return ""


def step_rows(n: int) -> int:
    """`n` slots rounded up to a number for which a graph is captured."""
    if n > STEP_ROWS[-1]:
        return -(-n // STEP_ROWS[-1]) * STEP_ROWS[-1]
    return STEP_ROWS[bisect_left(STEP_ROWS, n)]


@dataclass(frozen=True)
class StepWeights:
    """The weights of decode steps. `qk_gains` [H + K, D] are in pair order, `rotations_LD` is complex64.

    Their storage is fixed: values are written in place.
    """

    embedding_VE: Tensor
    layers: Sequence[DenseLayer]
    qk_gains: Sequence[Tensor | None]
    final_norm_E: Tensor
    head: Any
    rotations_LD: Tensor


class CudaSteps:
    """Decode steps over the slots of `cache` in its current layout.

    `graphed`: capture steps as CUDA graphs; without, every step launches its kernels, which runs on any device.
    """

    def __init__(self, shape: StepShape, weights: StepWeights, cache: SlotCache, *, graphed: bool = True) -> None:
        from furlong.inference.embedded import decode_kernels

        self._kernels: Any = decode_kernels
        self.shape, self.weights, self._graphed = shape, weights, graphed
        self._layers = cache.layers
        n, device = cache.num_slots, shape.device
        self._tokens = torch.zeros(n, dtype=torch.int64, device=device)
        self._positions = torch.zeros(n, dtype=torch.int64, device=device)
        self._queries = self._new(n, shape.num_heads, shape.head_dim)
        self._attended = self._new(n, shape.num_heads * shape.head_dim)
        self._gated = self._new(n, shape.inner)
        self._logits = torch.empty(n, len(weights.embedding_VE), dtype=torch.float32, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphed else None
        self._stream = torch.cuda.Stream(device) if graphed else None

    def _new(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self.shape.dtype, device=self.shape.device)

    def logits(self, tokens_N: Tensor, positions_N: NDArray[np.int64]) -> Tensor:
        """Process one token per slot; returns float32 logits [N, V], valid until the next call."""
        n = len(positions_N)
        self._tokens[:n].copy_(tokens_N)
        self._positions[:n].copy_(torch.from_numpy(positions_N))
        if not self._graphed:
            self._compute(n)
        else:
            if n not in self._graphs:
                self._graphs[n] = self._captured(n)
            self._graphs[n].replay()
        return self._logits[:n]

    def _captured(self, n: int) -> torch.cuda.CUDAGraph:
        """Run a step on another stream, which compiles kernels and allocates workspaces, and capture a second one."""
        assert self._stream is not None
        current = torch.cuda.current_stream(self.shape.device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._compute(n)
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # the trainer's thread may allocate
            try:
                self._compute(n)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph

    def _compute(self, n: int) -> None:
        shape, weights, kernels = self.shape, self.weights, self._kernels
        positions, queries, attended = self._positions[:n], self._queries[:n], self._attended[:n]
        gated = self._gated[:n]
        x = functional.embedding(self._tokens[:n], weights.embedding_VE)
        for layer, gains, (keys, values) in zip(weights.layers, weights.qk_gains, self._layers, strict=True):
            fused = functional.linear(self._norm(x, layer.input_norm_E), layer.qkv.weight, layer.qkv.bias)
            kernels.write_heads(fused, gains, weights.rotations_LD, positions, keys, values, shape.eps, queries)
            kernels.attend(queries, keys, values, positions, shape.scale, attended)
            x = layer.out.added_to(x, attended)
            kernels.gate(layer.gate_up(self._norm(x, layer.post_norm_E)), gated)
            x = layer.down.added_to(x, gated)
        self._logits[:n].copy_(weights.head(self._norm(x, weights.final_norm_E)))

    def _norm(self, x: Tensor, gain_E: Tensor) -> Tensor:
        return functional.rms_norm(x, (self.shape.width,), gain_E, self.shape.eps)
