"""Models of the embedded engine and their weights: prefill and single-token decode over a slot KV cache.

Axes: B prompts, T packed prompt tokens, N decoding slots, H query heads, K key/value heads, G = H / K, D head width,
E model width, V vocabulary, S slots of the cache, L cached positions.

Two implementations: `FusedDenseModel` here (Llama, Mistral, Qwen2, Qwen3 without sliding windows) and
`TransformersModel` in transformers_model.py (any other causal model of transformers). The engine chooses.

Batch invariance. On CPU, a row of a matmul does not depend on the other rows as long as the same kernel is used, and
MKL and oneDNN switch kernels only for very few rows. So every matmul here has at least `min_rows()` rows (padding is
dropped afterwards), attention over masked positions adds exact zeros, and prompts are attended one at a time, in chunks
(`prompt_attention`). A completion is then bitwise independent of batch composition, slot, order of arrival and the
number of cached positions. (In bfloat16 PyTorch switches
kernels at 16 * 16 * 16 multiply-adds; only toy widths, with heads under 32, are below that.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from furlong.core.routing import Routes, RoutingShape
from furlong.errors import EngineError
from furlong.inference.embedded import decode_steps
from furlong.inference.embedded.decode_steps import (
    CudaSteps,
    DecodeLinear,
    DecodeSteps,
    DenseLayer,
    SlotCache,
    StepShape,
    StepWeights,
    supports_blocks,
)
from furlong.inference.embedded.prompt_attention import CHUNK, PackedPrompts, PromptMask, attend_prompt
from furlong.inference.embedded.weight_table import WeightTable
from furlong.interfaces import TokenScores
from furlong.models import varlen_attention

ROW_MULTIPLE = 4
LENGTH_BUCKET = 32
SCORED_TOKENS = 8 * CHUNK  # of one pass that scores; its logits are [SCORED_TOKENS, V]
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

    extends_prefixes: Whether a prompt may begin with cached positions. Recurrent states cannot be cut, so models that
        have them always compute whole prompts.
    captures_steps: Whether decode steps depend on the layout of the cache but not on its length, so that the cache
        should rarely be resized.
    routing: Shape of the expert routing; None for a model without experts.
    routes: With `records_routes`, the routed experts of the last call: one array for each prompt, or one with a row
        for each slot.
    """

    description: str
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    table: WeightTable
    extends_prefixes: bool
    captures_steps: bool
    routing: RoutingShape | None
    records_routes: bool
    routes: list[Routes]

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: SlotCache,
        slots: Sequence[int],
        starts: Sequence[int],
        *,
        last: int = 1,
    ) -> Tensor:
        """Write the KV cache of `prompts` into `slots`; return logits of their `last` tokens, float32 [B * last, V].

        The slots have the cache of the first `starts` tokens already; at least one token of each prompt is left. The
        cache has room for a multiple of `CHUNK` positions.
        """
        ...

    def decode(self, tokens_N: Tensor, positions_N: NDArray[np.int64], cache: SlotCache, length: int) -> Tensor:
        """Process one token of each slot 0..N-1 at `positions_N` < `length`; return float32 logits [N, V].

        N is a result of `padded_rows`, or of `step_rows` with `captures_steps`; padding rows have token 0 at position 0
        of a free slot.
        """
        ...


def score_tokens(
    model: DecodeModel,
    tokens: Sequence[int],
    num_scored: int,
    *,
    temperature: float,
    num_top: int,
    ids_RK: NDArray[np.int32] | None,
) -> TokenScores:
    """Compute `Engine.score` with a separate cache, which is dropped."""
    read = list(tokens[:-1])  # the last one is predicted only
    cache, first = SlotCache(), len(tokens) - num_scored  # the first token that is scored
    cache.resize(padded_rows(1), bucketed_length(len(read)))
    num_top = min(num_top, model.vocab_size)
    asked_RK = torch.from_numpy(np.zeros((num_scored, 0), np.int32) if ids_RK is None else ids_RK).long()
    parts: list[tuple[Tensor, ...]] = []
    step = SCORED_TOKENS if model.extends_prefixes else len(read)
    for start in range(0, len(read), step):
        end = min(start + step, len(read))
        num_kept = min(end - start, end + 1 - first)
        logits_TV = model.prefill([read[:end]], cache, [0], [start], last=max(num_kept, 1))
        if num_kept <= 0:
            continue
        log_probs_TV = (logits_TV / temperature).log_softmax(-1)
        own_T1 = torch.tensor(tokens[end + 1 - num_kept : end + 1], device=model.device)[:, None]
        ids_TK = asked_RK[end + 1 - num_kept - first : end + 1 - first].to(model.device)
        top = log_probs_TV.topk(num_top)
        parts.append((log_probs_TV.gather(1, own_T1)[:, 0], top.indices, top.values, log_probs_TV.gather(1, ids_TK)))
    own, top_ids, top, asked = (torch.cat(columns).cpu().numpy() for columns in zip(*parts, strict=True))
    return TokenScores(own, top_ids.astype(np.int32), top, asked)


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
        self.extends_prefixes = True
        self.captures_steps, self._is_graphed = not decode_steps.missing_for_graphs(device), device.type == "cuda"
        self.routing: RoutingShape | None = None
        self.records_routes = False
        self.routes: list[Routes] = []
        self._attends_packed = dtype.itemsize == 2 and not varlen_attention.missing(device)
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
        self._mask = PromptMask()
        self._moves = 0  # of the weights under `_step_weights`
        self._step_weights: StepWeights | None = None

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _named(self, name: str, *shape: int) -> Tensor:
        tensor = self._new(*shape)
        self.table.views[name] = tensor
        return tensor

    def _fused(self, prefix: str, names: Sequence[str], rows: Sequence[int], columns: int, kind: str) -> Tensor:
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
        self.layers: list[DenseLayer] = []
        order = _pair_order(self.num_heads + self.num_kv_heads, self.num_kv_heads, D).to(self.device)
        self._head_order = order[:D]
        for i in range(config.num_hidden_layers):
            at = f"model.layers.{i}."
            qkv = (f"{at}self_attn.", ("q_proj", "k_proj", "v_proj"))
            qkv_rows = (self.num_heads * D, self.num_kv_heads * D, self.num_kv_heads * D)
            mlp = (f"{at}mlp.", ("gate_proj", "up_proj"))
            has_qk_norm = family == "qwen3"
            self.layers.append(
                DenseLayer(
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
        if self.captures_steps:
            self._refresh_step_weights()

    def _refresh_step_weights(self) -> None:
        """Write derived weights in place for captured steps, or make new ones if the weights have moved."""
        gains = [each.qk_HD for each in self._gains]
        known = self._step_weights
        if known is not None and self._moves == self.table.num_moves:
            for old, new in zip(known.qk_gains, gains, strict=True):
                if old is not None and new is not None:
                    old.copy_(new)
            return
        self._moves = self.table.num_moves
        self._step_weights = StepWeights(
            self.embedding, self.layers, gains, self.final_norm_E, self.head, self._rotations_LD
        )

    def _as_factor(self, gain_E: Tensor) -> Tensor:
        """A gain in the dtype in which `DecodeSteps` multiplies."""
        return gain_E.to(self._wide) if self.device.type == "cpu" else gain_E

    def _qk_gain(self, layer: DenseLayer) -> Tensor | None:
        if layer.q_norm_D is None or layer.k_norm_D is None:
            return None
        gains = [gain.index_select(0, self._head_order).to(self._wide) for gain in (layer.q_norm_D, layer.k_norm_D)]
        return torch.cat([gains[0].expand(self.num_heads, -1), gains[1].expand(self.num_kv_heads, -1)])

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        cache: SlotCache,
        slots: Sequence[int],
        starts: Sequence[int],
        *,
        last: int = 1,
    ) -> Tensor:
        """Run all new tokens packed into one sequence; each attends to its own prompt only."""
        self._refresh_derived()
        news = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        ends = list(itertools.accumulate(map(len, news)))
        pad = padded_rows(ends[-1]) - ends[-1]
        tokens_T = torch.tensor([token for new in news for token in new] + [0] * pad, device=self.device)
        positions = [torch.arange(start, len(prompt)) for prompt, start in zip(prompts, starts, strict=True)]
        positions_T = torch.cat([*positions, torch.arange(pad)]).to(self.device)
        rotation_T1D = self._rotations_LD.index_select(0, positions_T)[:, None]
        x = functional.embedding(tokens_T, self.embedding)
        if self.captures_steps:
            cache.allocate_block(len(self.layers), self.num_kv_heads, self.head_dim, x)
        packed = None
        if self._attends_packed and not any(starts):
            packed = PackedPrompts([len(prompt) for prompt in prompts], slots, cache, x)
        for index, layer in enumerate(self.layers):
            q, k, v = self._heads(x, layer, self._gains[index].qk_HD, rotation_T1D)
            if packed is not None:
                x = self._mlp(x, packed.attend(q, k, v, cache.layers[index], self.shape.scale), layer)
                continue
            shape = (1, self.num_kv_heads, 1, self.head_dim)
            keys, values = cache.layer(index, k.new_empty(shape), v.new_empty(shape))
            attended = x.new_zeros(x.shape[0], self.num_heads * self.head_dim)
            for prompt, start, end, slot in zip(prompts, starts, ends, slots, strict=True):
                rows, places = slice(end + start - len(prompt), end), slice(start, len(prompt))
                keys[slot, :, places], values[slot, :, places] = k[rows].transpose(0, 1), v[rows].transpose(0, 1)
                out_HTD = attend_prompt(
                    q[rows].transpose(0, 1)[None],
                    keys[slot][None],
                    values[slot][None],
                    start,
                    self._mask,
                    self.shape.scale,
                )[0]
                attended[rows] = out_HTD.transpose(0, 1).flatten(1)
            x = self._mlp(x, attended, layer)
        kept = [row for end in ends for row in range(end - last, end)]
        rows = kept + [kept[-1]] * (padded_rows(len(kept)) - len(kept))
        return self._logits(x[torch.tensor(rows, device=self.device)])[: len(kept)]

    def decode(self, tokens_N: Tensor, positions_N: NDArray[np.int64], cache: SlotCache, length: int) -> Tensor:
        """Process one token per slot."""
        self._refresh_derived()
        steps = cache.prepared
        if self._step_weights is not None:
            if not isinstance(steps, CudaSteps) or steps.weights is not self._step_weights:
                cache.prepared = steps = CudaSteps(self.shape, self._step_weights, cache, graphed=self._is_graphed)
            return steps.logits(tokens_N, positions_N)
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
        self, x: Tensor, layer: DenseLayer, qk_gain: Tensor | None, rotation_T1D: Tensor
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

    def _mlp(self, x: Tensor, attended: Tensor, layer: DenseLayer) -> Tensor:
        x = layer.out.added_to(x, attended)
        gate, up = layer.gate_up(self._norm(x, layer.post_norm_E)).chunk(2, -1)
        return layer.down.added_to(x, functional.silu(gate).mul_(up))

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(self._norm(x, self.final_norm_E)).float()
