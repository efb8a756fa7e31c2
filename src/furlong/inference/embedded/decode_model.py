"""Models of the embedded engine and their weights: prefill and single-token decode over a slot KV cache.

Axes: B prompts, T packed prompt tokens, N decoding slots, H query heads, K key/value heads, G = H / K, D head width,
E model width, V vocabulary, S slots of the cache, L cached positions.

Two implementations: `FusedDenseModel` here (Llama, Mistral, Qwen2, Qwen3 without sliding windows) and
`TransformersModel` in transformers_model.py (any other causal model of transformers). The engine chooses.

Batch invariance. On CPU, a row of a matmul does not depend on the other rows as long as the same kernel is used, and
MKL and oneDNN switch kernels only for very few rows. So every matmul here has at least `min_rows()` rows (padding is
dropped afterwards), attention over masked positions adds exact zeros, and prompts are attended one at a time. A
completion is then bitwise independent of batch composition, slot and order of arrival. (In bfloat16 PyTorch switches
kernels at 16 * 16 * 16 multiply-adds; only toy widths, with heads under 32, are below that.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from furlong.core.device_checksum import LocalChecksums
from furlong.core.quantization.scheme import QuantizationScheme
from furlong.core.routing import Routes, RoutingShape
from furlong.core.text import abbreviate
from furlong.core.weights import WeightSource, checksum
from furlong.errors import EngineError, SyncError
from furlong.inference.embedded.decode_steps import DecodeLinear, DecodeSteps, SlotCache, StepShape, supports_blocks


@dataclass
class WeightTable:
    """The storage of each Hugging Face name.

    views: Tensor to write by name.
    tied: Names that are optional in a load.
    parts: For a fused tensor, the names of the pieces that may be loaded instead (the experts of a checkpoint).
    num_writes: Number of tensors written, to detect changes.
    whole: By name, the storage of weights that are loaded quantized: `views` then has their stored tensors, and these
        are computed from them.
    """

    views: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    tied: set[str] = field(default_factory=set[str])
    parts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    num_writes: int = 0
    whole: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    _scheme: QuantizationScheme | None = None
    _owners: dict[str, str] = field(default_factory=dict[str, str])  # stored tensor -> its weight
    _released: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list[tuple[torch.UntypedStorage, int]])

    def quantize(self, scheme: QuantizationScheme, names: Iterable[str]) -> None:
        """Store these weights as `scheme` does. Raises SyncError for one that the model does not have.

        Loads and checksums are of the stored tensors, and the model computes with the values that they stand for.
        """
        self._scheme = scheme
        for name in names:
            dense = self.whole[name] = self.view(name)
            for fused in [fused for fused, pieces in self.parts.items() if name in pieces]:
                del self.views[fused], self.parts[fused]  # its pieces are loaded one by one
            del self.views[name]
            for part, (shape, dtype) in scheme.parts(name, tuple(dense.shape)).items():
                self.views[part] = torch.zeros(shape, dtype=dtype, device=dense.device)
                self._owners[part] = name

    def refresh_whole(self, part: str, loaded: Collection[str]) -> None:
        """Compute the weight of a stored tensor if all stored tensors of that weight are in `loaded`."""
        if (name := self._owners.get(part)) is None:
            return
        assert self._scheme is not None
        if all(each in loaded for each in self._scheme.part_names(name)):
            self.whole[name].copy_(self._scheme.dequantize(name, self.views))

    def release(self) -> int:
        """Release the memory of all weights; returns the number of bytes. No access until `restore`."""
        freed = 0
        for view in (*self.views.values(), *self.whole.values()):
            storage = view.untyped_storage()
            if (size := storage.nbytes()) and storage.resizable():
                self._released.append((storage, size))
                storage.resize_(0)
                freed += size
        return freed

    def restore(self) -> None:
        """Allocate the released memory again, without contents."""
        for storage, size in self._released:
            storage.resize_(size)
        self._released = []
        self.num_writes += 1

    @property
    def is_released(self) -> bool:
        """Whether the memory is released."""
        return bool(self._released)

    def required(self) -> list[str]:
        """Names that a complete load must contain."""
        pieces = {name for names in self.parts.values() for name in names}
        return [name for name in self.views if name not in self.tied and name not in pieces]

    def checkpoint_names(self) -> list[str]:
        """Names of all weights as in checkpoints: the pieces of a fused tensor instead of its own name."""
        return [piece for name in self.required() for piece in self.parts.get(name, [name])]

    def view(self, name: str) -> Tensor:
        """Storage of `name`. Raises SyncError if the model has no such tensor."""
        self._check_resident()
        if name in self.whole and name not in self.views:
            raise SyncError(
                f"the engine stores {name} quantized; send its stored tensors, or start the engine from a folder in "
                "bfloat16"
            )
        if name not in self.views:
            raise SyncError(f"the engine's model has no tensor {name!r}; it has {abbreviate(sorted(self.views))}")
        return self.views[name]

    def check_shape(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the storage of `name`. Raises SyncError if the model has no such tensor, or one of another shape."""
        view = self.view(name)
        if list(view.shape) != list(shape):
            raise SyncError(
                f"tensor {name!r} has shape {list(shape)}, but {list(view.shape)} in the engine's model; "
                "trainer and engine must use the same config"
            )
        return view

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """Return `tensor` in the precision and on the device of the storage of `name`."""
        view = self.view(name)
        return tensor.detach().to(view.device, view.dtype)

    def load(self, source: WeightSource) -> dict[str, str]:
        """Copy every tensor of `source` into place; return checksums of the stored tensors.

        Raises SyncError naming tensors that are unexpected, mis-shaped, repeated or missing.
        """
        load = WeightLoad(self)
        for name, tensor in source.open():
            load.put(name, tensor)
        if missing := load.missing():
            raise SyncError(
                f"{len(missing)} of {len(self.required())} tensors did not arrive: {abbreviate(missing)}; "
                "a weight load must contain the whole model"
            )
        return load.checksums()

    def checksums(self) -> dict[str, str]:
        """`core.weights.checksum` of each stored tensor, which other processes can compute."""
        self._check_resident()
        return {name: checksum(self.views[name]) for name in self.checkpoint_names()}

    def resident_checksums(self) -> dict[str, str]:
        """Checksum of each stored tensor, as returned by `load`."""
        self._check_resident()
        return _resident({name: self.views[name] for name in self.checkpoint_names()})

    def _check_resident(self) -> None:
        if self._released:
            raise SyncError("the memory of the weights is released; call /resume_memory_occupation first")


def _resident(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    sums = LocalChecksums()
    for name, tensor in tensors.items():
        sums.add(name, tensor)
    return sums.digests()


class WeightLoad:
    """A load of all weights, tensor by tensor."""

    def __init__(self, table: WeightTable) -> None:
        self._table = table
        self.loaded: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor into place. Raises SyncError if it is unexpected, mis-shaped or repeated."""
        self.expect(name, tensor.shape).copy_(tensor.detach())
        self._table.refresh_whole(name, self.loaded)
        self._table.num_writes += 1

    def expect(self, name: str, shape: Sequence[int]) -> Tensor:
        """Count a tensor as loaded and return its storage, unchanged. Raises like `put`."""
        view = self._table.check_shape(name, shape)
        if name in self.loaded:
            raise SyncError(f"tensor {name!r} was sent twice in one weight load; send every name once")
        self.loaded[name] = view
        return view

    def missing(self) -> list[str]:
        """Required names that were loaded neither whole nor in parts."""
        return [n for n in self._table.required() if n not in self.loaded and not self._by_parts(n)]

    def checksums(self) -> dict[str, str]:
        """Checksum of each loaded tensor as it is stored."""
        return _resident(self.loaded)

    def _by_parts(self, name: str) -> bool:
        return name in self._table.parts and all(part in self.loaded for part in self._table.parts[name])


ROW_MULTIPLE = 4
LENGTH_BUCKET = 32
FUSED_FAMILIES = ("llama", "mistral", "mimo", "qwen2", "qwen3")


def min_rows() -> int:
    """Minimum rows of a batch-invariant matmul with the current number of CPU threads."""
    return ROW_MULTIPLE * max(1, torch.get_num_threads())


def padded_rows(n: int) -> int:
    """`n` rounded up to a batch-invariant number of rows."""
    return max(min_rows(), -(-n // ROW_MULTIPLE) * ROW_MULTIPLE)


def bucketed_length(length: int) -> int:
    """`length` rounded up to a multiple of `LENGTH_BUCKET` positions."""
    return -(-length // LENGTH_BUCKET) * LENGTH_BUCKET


class DecodeModel(Protocol):
    """A model that the engine can run. All calls come from one thread, under `torch.inference_mode`.

    routing: Shape of the expert routing; None for a model without experts.
    routes: With `records_routes`, the routed experts of the last call: one array for each prompt, or one with a row
        for each slot.
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
        """Write the KV cache of `prompts` into `slots`; return the logits of the last tokens, float32 [B, V]."""
        ...

    def decode(self, tokens_N: Tensor, positions_N: NDArray[np.int64], cache: SlotCache, length: int) -> Tensor:
        """Process one token of each slot 0..N-1 at `positions_N` < `length`; return float32 logits [N, V].

        N is a result of `padded_rows`; padding rows have token 0 at position 0 of a free slot.
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


@dataclass
class _Gains:
    """Norm weights of a layer for decode steps; those of queries and keys [H + K, D] are in pair order."""

    input_E: Tensor
    qk_HD: Tensor | None
    post_E: Tensor


def unsupported_by_fused(config: Any) -> str:
    """Return the part of this config that `FusedDenseModel` does not support; "" if it supports all."""
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


def _rotations(config: Any, head_dim: int, length: int) -> Tensor:
    """Return cos + i sin of the rotary angles of each position, complex [L, D / 2]."""
    kind = _rope_type(config)
    if kind == "default":
        base = config.rope_parameters["rope_theta"]
        inverse = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
        scale = 1.0
    else:
        inverse, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angles = torch.outer(torch.arange(length).float(), inverse.float())
    return torch.complex(angles.cos() * scale, angles.sin() * scale)


def _pair_order(num_rotated: int, num_others: int, head_dim: int) -> Tensor:
    """Row order of the QKV projection in which rotary pairs are adjacent.

    In a checkpoint, dimensions i and i + D / 2 of a head are rotated together; here 2 i and 2 i + 1 are, as a complex
    number.
    """
    rows = torch.arange((num_rotated + num_others) * head_dim).view(-1, head_dim)
    rows[:num_rotated] = rows[:num_rotated].view(num_rotated, 2, -1).transpose(1, 2).flatten(1)
    return rows.flatten()


class FusedDenseModel:
    """Llama, Mistral, MiMo, Qwen2 and Qwen3 with fused QKV and gate/up weights.

    Weights are zero until `table.load`. `max_length` bounds positions.
    """

    def __init__(self, config: Any, *, dtype: torch.dtype, device: torch.device, max_length: int) -> None:
        if reason := unsupported_by_fused(config):
            raise EngineError(f"the fused implementation does not support {reason}; use TransformersModel")
        self.dtype, self.device, self.vocab_size = dtype, device, config.vocab_size
        self.width = config.hidden_size
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps = config.rms_norm_eps
        self.description = f"fused {config.model_type} path"
        self.routing: RoutingShape | None = None
        self.records_routes = False
        self.routes: list[Routes] = []
        self._wide = torch.promote_types(dtype, torch.float32)
        # Rounded like transformers, multiplied in the wide dtype.
        rotations_LD2 = (
            torch.view_as_real(_rotations(config, self.head_dim, max_length)).to(device, dtype).to(self._wide)
        )
        self._rotations_LD = torch.view_as_complex(rotations_LD2)
        self.shape = StepShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            width=self.width,
            inner=config.intermediate_size,
            eps=self.eps,
            scale=self.head_dim**-0.5,
            dtype=dtype,
            wide=self._wide,
            device=device,
        )
        self.table = WeightTable()
        self._allocate(config)
        self._linears = [m for layer in self.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self._linears.append(self.head)
        self._supports_blocks = supports_blocks(linear.weight for linear in self._linears)
        self._gains: list[_Gains] = []
        self._derived_writes = -1

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _named(self, name: str, *shape: int) -> Tensor:
        tensor = self._new(*shape)
        self.table.views[name] = tensor
        return tensor

    def _fused(self, prefix: str, names: Sequence[str], rows: Sequence[int], columns: int, kind: str) -> Tensor:
        """Allocate one tensor for several projections and register its slices by name."""
        fused = self._new(sum(rows), columns) if kind == "weight" else self._new(sum(rows))
        for name, part in zip(names, fused.split(list(rows)), strict=True):
            self.table.views[f"{prefix}{name}.{kind}"] = part
        return fused

    def _allocate(self, config: Any) -> None:
        E, D, inner = self.width, self.head_dim, config.intermediate_size
        family = config.model_type
        is_qwen2 = family in ("mimo", "qwen2")
        qkv_bias = is_qwen2 or getattr(config, "attention_bias", False)
        out_bias = not is_qwen2 and getattr(config, "attention_bias", False)
        mlp_bias = family == "llama" and getattr(config, "mlp_bias", False)
        self.embedding = self._named("model.embed_tokens.weight", self.vocab_size, E)
        self.layers: list[_Layer] = []
        order = _pair_order(self.num_heads + self.num_kv_heads, self.num_kv_heads, D).to(self.device)
        self._head_order = order[:D]
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
                        order,
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

    def _refresh_derived(self) -> None:
        """Renew blocked weights and gains if the weights were written since."""
        if self._derived_writes == self.table.num_writes:
            return
        if self._supports_blocks:
            for linear in self._linears:
                linear.block()
        self._gains = [
            _Gains(self._as_factor(layer.input_norm_E), self._qk_gain(layer), self._as_factor(layer.post_norm_E))
            for layer in self.layers
        ]
        self._final_gain_E = self._as_factor(self.final_norm_E)
        self._derived_writes = self.table.num_writes

    def _as_factor(self, gain_E: Tensor) -> Tensor:
        """A gain in the dtype in which `DecodeSteps` multiplies."""
        return gain_E.to(self._wide) if self.device.type == "cpu" else gain_E

    def _qk_gain(self, layer: _Layer) -> Tensor | None:
        if layer.q_norm_D is None or layer.k_norm_D is None:
            return None
        gains = [gain.index_select(0, self._head_order).to(self._wide) for gain in (layer.q_norm_D, layer.k_norm_D)]
        return torch.cat([gains[0].expand(self.num_heads, -1), gains[1].expand(self.num_kv_heads, -1)])

    def prefill(self, prompts: Sequence[Sequence[int]], cache: SlotCache, slots: Sequence[int]) -> Tensor:
        """Run all prompts packed into one sequence; each attends to itself only."""
        self._refresh_derived()
        lengths = [len(p) for p in prompts]
        total = sum(lengths)
        pad = padded_rows(total) - total
        flat = [token for prompt in prompts for token in prompt] + [0] * pad
        tokens_T = torch.tensor(flat, device=self.device)
        positions_T = torch.cat([torch.arange(n) for n in [*lengths, pad]]).to(self.device)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        rotation_T1D = self._rotations_LD.index_select(0, positions_T)[:, None]
        x = functional.embedding(tokens_T, self.embedding)
        for index, layer in enumerate(self.layers):
            q, k, v = self._heads(x, layer, self._gains[index].qk_HD, rotation_T1D)
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

    def decode(self, tokens_N: Tensor, positions_N: NDArray[np.int64], cache: SlotCache, length: int) -> Tensor:
        """Process one token per slot."""
        self._refresh_derived()
        steps = cache.prepared
        if not isinstance(steps, DecodeSteps) or (steps.n, steps.length) != (len(positions_N), length):
            cache.prepared = steps = DecodeSteps(self.shape, cache, len(positions_N), length)
        steps.move_to(positions_N, self._rotations_LD)
        x = functional.embedding(tokens_N, self.embedding)
        for index, (layer, gains) in enumerate(zip(self.layers, self._gains, strict=True)):
            steps.write_heads(index, layer.qkv(steps.norm(x, gains.input_E)), gains.qk_HD)
            x = layer.out.added_to(x, steps.attend(index))
            gate, up = layer.gate_up(steps.norm(x, gains.post_E)).chunk(2, -1)
            x = layer.down.added_to(x, steps.gate(gate, up))
        return self.head(steps.norm(x, self._final_gain_E)).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _heads(
        self, x: Tensor, layer: _Layer, qk_gain: Tensor | None, rotation_T1D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D], keys and values [T, K, D], rotated, in pair order."""
        H, K, D = self.num_heads, self.num_kv_heads, self.head_dim
        fused = layer.qkv(self._norm(x, layer.input_norm_E)).view(-1, H + 2 * K, D)
        qk, v = fused[:, : H + K].to(self._wide), fused[:, H + K :]
        if qk_gain is not None:
            qk = functional.rms_norm(qk, (D,), None, self.eps) * qk_gain
        pairs = torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * rotation_T1D
        qk = torch.view_as_real(pairs).flatten(-2).to(self.dtype)
        return qk[:, :H], qk[:, H:], v

    def _mlp(self, x: Tensor, attended: Tensor, layer: _Layer) -> Tensor:
        x = layer.out.added_to(x, attended)
        gate, up = layer.gate_up(self._norm(x, layer.post_norm_E)).chunk(2, -1)
        return layer.down.added_to(x, functional.silu(gate).mul_(up))

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(self._norm(x, self.final_norm_E)).float()
