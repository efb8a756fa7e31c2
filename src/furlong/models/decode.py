"""Models as an engine runs them: prefill and single-token decode over a slot KV cache.

Axes: B prompts, T packed prompt tokens, N decoding slots, H query heads, K key/value heads, G = H / K, D head width,
E model width, V vocabulary, S slots of the cache, L cached positions.

Two implementations: `FusedDenseModel` here (Llama, Mistral, Qwen2, Qwen3 without sliding windows) and
`TransformersModel` in decode_transformers.py (any other causal model of transformers). `build_decode_model` chooses.

Batch invariance. On CPU, a row of a matrix product does not depend on the other rows as long as the product takes the
same kernel, and the kernels of MKL and oneDNN differ for very few rows only. So every product here has at least
`min_rows()` rows (padding is dropped afterwards), attention over masked positions adds exact zeros, and prompts attend
one at a time. A completion is then bitwise the same in every batch composition, slot and order of arrival. (In
bfloat16 PyTorch switches kernels at 16 * 16 * 16 multiply-adds: only toy widths, of heads under 32, come below.)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from furlong.core.routing import Routes, RoutingShape
from furlong.errors import EngineError
from furlong.models.decode_linear import DecodeLinear, has_bfloat16_products, takes_blocks
from furlong.models.weight_table import WeightTable

logger = logging.getLogger(__name__)

ROW_MULTIPLE = 4
LENGTH_BUCKET = 32
FLOAT_ROWS = 2
FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def min_rows() -> int:
    """Fewest rows of a matrix product whose rows do not depend on their number, with this many CPU threads."""
    return ROW_MULTIPLE * max(1, torch.get_num_threads())


def padded_rows(n: int) -> int:
    """`n` rounded up to a row count that keeps products batch invariant."""
    return max(min_rows(), -(-n // ROW_MULTIPLE) * ROW_MULTIPLE)


def bucketed_length(length: int) -> int:
    """`length` cached positions rounded up to the multiple over which attention runs."""
    return -(-length // LENGTH_BUCKET) * LENGTH_BUCKET


class SlotCache:
    """Keys and values of every slot. `layers` holds pairs (keys, values), each [S, K, L, D].

    What is not yet written is zero, so masked positions never carry NaN.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._left: torch.UntypedStorage | None = None  # memory that a resized tensor left
        self.num_slots = 0
        self.length = 0

    def resize(self, num_slots: int, length: int) -> None:
        """Make room for `num_slots` slots of `length` positions, keeping what fits."""
        self.num_slots, self.length = num_slots, length
        self.layers = [(self._resized(keys), self._resized(values)) for keys, values in self.layers]

    def _resized(self, old: Tensor) -> Tensor:
        new = self._room(old, (self.num_slots, old.shape[1], self.length, old.shape[3]))
        slots, length = min(self.num_slots, old.shape[0]), min(self.length, old.shape[2])
        new[:slots, :, :length] = old[:slots, :, :length]
        new[:slots, :, length:] = 0
        new[slots:] = 0
        return new

    def _room(self, old: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Uninitialized memory for what `old` becomes.

        On the CPU each tensor moves into the memory that the one before it left, since pages that the process has
        never touched cost more than copying. What is taken beyond the present need is not touched until it is used.
        """
        if old.device.type != "cpu":
            return old.new_empty(shape)
        wanted = math.prod(shape)
        left, self._left = self._left, old.untyped_storage()
        if left is None or not wanted <= left.nbytes() // old.itemsize <= 4 * wanted:
            left = old.new_empty(wanted + wanted // 2).untyped_storage()
        return old.new_empty(0).set_(left, 0, shape)  # pyright: ignore[reportCallIssue]  torch lists no such overload

    def layer(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of layer `index`, created on first use after the shapes of `keys`, `values` [_, K, _, D]."""
        while len(self.layers) <= index:
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


class DecodeModel(Protocol):
    """What the engine needs of a model. All calls come from one thread, under `torch.inference_mode`.

    routing: how it sends tokens to experts, None for a model without. While `records_routes` is set, `routes` is where
    the last call's tokens went: a record for each prompt, or one with a row for each slot.
    """

    description: str
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    table: WeightTable
    routing: RoutingShape | None
    records_routes: bool
    routes: list[Routes]

    def prefill(self, prompts: Sequence[Sequence[int]], cache: SlotCache, slots: Sequence[int]) -> Tensor:
        """Fill `slots` with the keys and values of `prompts`; return the last tokens' logits, float32 [B, V]."""
        ...

    def decode(self, tokens_N: Tensor, positions_N: Tensor, cache: SlotCache, length: int) -> Tensor:
        """One token for each of slots 0..N-1, written at `positions_N` < `length`; float32 logits [N, V].

        N is a `padded_rows` count; rows beyond the active slots carry token 0 at position 0 of a free slot.
        """
        ...


@dataclass
class _Layer:
    input_norm_E: Tensor
    qkv: DecodeLinear
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    out: DecodeLinear
    post_norm_E: Tensor
    gate_up: DecodeLinear
    down: DecodeLinear


def unsupported_by_fused(config: Any) -> str:
    """Why `FusedDenseModel` cannot run a model of this config; empty if it can."""
    if config.model_type not in FUSED_FAMILIES:
        return f"model type {config.model_type}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"activation {config.hidden_act}"
    windowed = config.model_type == "mistral" or getattr(config, "use_sliding_window", False)
    if windowed and getattr(config, "sliding_window", None) is not None:
        return f"sliding window {config.sliding_window}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "layers without full attention"
    rope = _rope_type(config)
    if rope not in ("default", "linear", "llama3", "yarn"):
        return f"rope type {rope}"
    return ""


def _rope_type(config: Any) -> str:
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


def _rope_table(config: Any, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Return cos [L, D] and sin [L, D], the first half of sin negated, float32."""
    kind = _rope_type(config)
    if kind == "default":
        base = config.rope_parameters["rope_theta"]
        inverse = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
        scale = 1.0
    else:
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angles = torch.outer(torch.arange(length).float(), inverse.float())
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


class FusedDenseModel:
    """Llama, Mistral, Qwen2 and Qwen3 written out, with fused QKV and gate/up weights.

    Weights start as zeros: fill them through `table.load`. `max_length` bounds positions.
    """

    def __init__(self, config: Any, *, dtype: torch.dtype, device: torch.device, max_length: int) -> None:
        if reason := unsupported_by_fused(config):
            raise EngineError(f"the fused decode path does not cover {reason}; use TransformersModel")
        self.dtype, self.device, self.vocab_size = dtype, device, config.vocab_size
        self.width = config.hidden_size
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps = config.rms_norm_eps
        self.scale = self.head_dim**-0.5
        self.description = f"fused {config.model_type} path"
        self.routing: RoutingShape | None = None
        self.records_routes = False
        self.routes: list[Routes] = []
        cos, sin = _rope_table(config, self.head_dim, max_length)
        self.rotation_L2D = torch.stack([cos, sin], 1).to(device, dtype)
        self.table = WeightTable()
        self._allocate(config)
        self._linears = [m for layer in self.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self._linears.append(self.head)
        self._takes_blocks = takes_blocks(linear.weight for linear in self._linears)
        self._blocked_writes = 0

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _named(self, name: str, *shape: int) -> Tensor:
        tensor = self._new(*shape)
        self.table.views[name] = tensor
        return tensor

    def _fused(self, prefix: str, names: Sequence[str], rows: Sequence[int], columns: int, kind: str) -> Tensor:
        """Allocate one tensor for several projections and name its slices."""
        fused = self._new(sum(rows), columns) if kind == "weight" else self._new(sum(rows))
        for name, part in zip(names, fused.split(list(rows)), strict=True):
            self.table.views[f"{prefix}{name}.{kind}"] = part
        return fused

    def _allocate(self, config: Any) -> None:
        E, D, inner = self.width, self.head_dim, config.intermediate_size
        family = config.model_type
        qkv_bias = family == "qwen2" or getattr(config, "attention_bias", False)
        out_bias = family != "qwen2" and getattr(config, "attention_bias", False)
        mlp_bias = family == "llama" and getattr(config, "mlp_bias", False)
        self.embedding = self._named("model.embed_tokens.weight", self.vocab_size, E)
        self.layers: list[_Layer] = []
        for i in range(config.num_hidden_layers):
            at = f"model.layers.{i}."
            qkv = (f"{at}self_attn.", ("q_proj", "k_proj", "v_proj"))
            qkv_rows = (self.num_heads * D, self.num_kv_heads * D, self.num_kv_heads * D)
            mlp = (f"{at}mlp.", ("gate_proj", "up_proj"))
            has_qk_norm = family == "qwen3"
            self.layers.append(
                _Layer(
                    input_norm_E=self._named(f"{at}input_layernorm.weight", E),
                    qkv=DecodeLinear(
                        self._fused(*qkv, qkv_rows, E, "weight"),
                        self._fused(*qkv, qkv_rows, E, "bias") if qkv_bias else None,
                    ),
                    q_norm_D=self._named(f"{at}self_attn.q_norm.weight", D) if has_qk_norm else None,
                    k_norm_D=self._named(f"{at}self_attn.k_norm.weight", D) if has_qk_norm else None,
                    out=DecodeLinear(
                        self._named(f"{at}self_attn.o_proj.weight", E, self.num_heads * D),
                        self._named(f"{at}self_attn.o_proj.bias", E) if out_bias else None,
                    ),
                    post_norm_E=self._named(f"{at}post_attention_layernorm.weight", E),
                    gate_up=DecodeLinear(
                        self._fused(*mlp, (inner, inner), E, "weight"),
                        self._fused(*mlp, (inner, inner), E, "bias") if mlp_bias else None,
                    ),
                    down=DecodeLinear(
                        self._named(f"{at}mlp.down_proj.weight", E, inner),
                        self._named(f"{at}mlp.down_proj.bias", E) if mlp_bias else None,
                    ),
                )
            )
        self.final_norm_E = self._named("model.norm.weight", E)
        if config.tie_word_embeddings:
            self.head = DecodeLinear(self.embedding)
            self.table.views["lm_head.weight"] = self.embedding
            self.table.tied.add("lm_head.weight")
        else:
            self.head = DecodeLinear(self._named("lm_head.weight", self.vocab_size, E))

    def _follow_weights(self) -> None:
        """Renew what is derived from the weights, if they were written since."""
        if self._takes_blocks and self._blocked_writes != self.table.num_writes:
            for linear in self._linears:
                linear.block()
            self._blocked_writes = self.table.num_writes

    def prefill(self, prompts: Sequence[Sequence[int]], cache: SlotCache, slots: Sequence[int]) -> Tensor:
        """Run all prompts as one packed row of tokens; each attends to itself only."""
        self._follow_weights()
        lengths = [len(p) for p in prompts]
        total = sum(lengths)
        pad = padded_rows(total) - total
        flat = [token for prompt in prompts for token in prompt] + [0] * pad
        tokens_T = torch.tensor(flat, device=self.device)
        positions_T = torch.cat([torch.arange(n) for n in [*lengths, pad]]).to(self.device)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        cos, sin = self._rotation(positions_T)
        x = functional.embedding(tokens_T, self.embedding)
        for index, layer in enumerate(self.layers):
            q, k, v = self._qkv(x, layer, cos, sin)
            shape = (1, self.num_kv_heads, 1, self.head_dim)
            keys, values = cache.layer(index, k.new_empty(shape), v.new_empty(shape))
            attended = x.new_zeros(x.shape[0], self.num_heads * self.head_dim)
            for start, n, slot in zip(starts, lengths, slots, strict=True):
                rows = slice(start, start + n)
                k_KTD, v_KTD = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
                keys[slot, :, :n], values[slot, :, :n] = k_KTD, v_KTD
                out_HTD = functional.scaled_dot_product_attention(
                    q[rows].transpose(0, 1)[None], k_KTD[None], v_KTD[None], is_causal=True, enable_gqa=True
                )[0]
                attended[rows] = out_HTD.transpose(0, 1).flatten(1)
            x = self._mlp(x, attended, layer)
        last = [start + n - 1 for start, n in zip(starts, lengths, strict=True)]
        last += [last[-1]] * (padded_rows(len(last)) - len(last))
        return self._logits(x[torch.tensor(last, device=self.device)])[: len(prompts)]

    def decode(self, tokens_N: Tensor, positions_N: Tensor, cache: SlotCache, length: int) -> Tensor:
        """One token per slot."""
        self._follow_weights()
        n, K, D = tokens_N.shape[0], self.num_kv_heads, self.head_dim
        G = self.num_heads // K
        cos, sin = self._rotation(positions_N)
        where = cache.places(positions_N, K)
        mask = decode_mask(positions_N, length, self.dtype, K)
        x = functional.embedding(tokens_N, self.embedding)
        for layer, (keys, values) in zip(self.layers, cache.layers, strict=True):
            q, k, v = self._qkv(x, layer, cos, sin)
            keys.view(-1, D).index_copy_(0, where, k.reshape(-1, D))
            values.view(-1, D).index_copy_(0, where, v.reshape(-1, D))
            q = q.reshape(n * K, G, D)
            out = attend_slots(q, keys[:n, :, :length], values[:n, :, :length], mask, self.scale)
            x = self._mlp(x, out.reshape(n, self.num_heads * D), layer)
        return self._logits(x)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _rotation(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin [T, 1, D] of positions."""
        rotation_T2D = self.rotation_L2D.index_select(0, positions_T)
        return rotation_T2D[:, :1], rotation_T2D[:, 1:]

    def _qkv(self, x: Tensor, layer: _Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D], keys and values [T, K, D], rotated."""
        H, K, D = self.num_heads, self.num_kv_heads, self.head_dim
        fused = layer.qkv(self._norm(x, layer.input_norm_E)).view(-1, H + 2 * K, D)
        qk, v = fused[:, : H + K], fused[:, H + K :]
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            qk = torch.cat([self._norm(qk[:, :H], layer.q_norm_D), self._norm(qk[:, H:], layer.k_norm_D)], 1)
        qk = torch.addcmul(qk * cos, qk.roll(D // 2, -1), sin)
        return qk[:, :H], qk[:, H:], v

    def _mlp(self, x: Tensor, attended: Tensor, layer: _Layer) -> Tensor:
        x = layer.out.added_to(x, attended)
        gate, up = layer.gate_up(self._norm(x, layer.post_norm_E)).chunk(2, -1)
        return layer.down.added_to(x, functional.silu(gate).mul_(up))

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(self._norm(x, self.final_norm_E)).float()


def decode_mask(
    positions_N: Tensor, length: int, dtype: torch.dtype, num_kv_heads: int, window: int | None = None
) -> Tensor:
    """Additive mask [N * K, 1, L]: 0 for cached positions up to and including each slot's own, -inf beyond.

    With `window`, only the last `window` positions are seen.
    """
    device = positions_N.device
    at_L, own_N11 = torch.arange(length, device=device), positions_N[:, None, None]
    hidden = at_L > own_N11
    if window is not None:
        hidden |= at_L <= own_N11 - window
    mask = torch.zeros(len(positions_N), num_kv_heads, length, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf")).view(-1, 1, length)


def attend_slots(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of one position per slot over cached keys [N, K, L, D]; returns [N * K, G, Dv].

    `q` [N * K, G, D] has the heads of a KV group as rows, so that they share one product. Plain batched products
    beat the fused kernel on CPU by 3 times at these shapes. In float32 at most two rows are multiplied together: for
    four and more MKL cuts long sums, so that they depend on the number of cached positions. In half precision a single
    row is doubled where oneDNN does not multiply it: PyTorch's own matrix-vector kernel has the same fault.
    """
    k, v = keys.flatten(0, 1), values.flatten(0, 1)
    if q.device.type != "cpu":
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    rows = q.shape[1]
    if q.dtype == torch.float32 and rows > FLOAT_ROWS:
        return torch.cat([_attend_rows(part, k, v, mask, scale) for part in q.split(FLOAT_ROWS, 1)], 1)
    has_kernel = q.dtype.itemsize > 2 or (q.dtype == torch.bfloat16 and has_bfloat16_products())
    if rows == 1 and not has_kernel:
        return _attend_rows(q.repeat(1, 2, 1), k, v, mask, scale)[:, :1]
    return _attend_rows(q, k, v, mask, scale)


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(scores, -1), v)
