"""Packed micro-batches for Megatron-core, and its transformer layer as functions that torch.compile can fuse.

A micro-batch is aligned and split over context-parallel ranks. `PackedLayer` uses the modules and parameters that
Megatron-core builds, with its own forward pass. Without tensor parallelism a dense layer compiles in one piece: norms,
rotary embedding, SwiGLU and residual sums become few kernels, and activations are kept or recomputed as in
`models.compiled_layers`. With tensor parallelism the pieces between two collectives compile.

Legend: T tokens of a micro-batch (outside of attention and MLP a part of them, with sequence parallelism); R response
tokens, D width, E head width.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false, reportIncompatibleMethodOverride=false, reportOptionalOperand=false, reportFunctionMemberAccess=false
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from furlong.core.batch import MicroBatch
from furlong.models.compiled_layers import MlpRecompute, set_compiler_options
from furlong.models.varlen_attention import varlen_attention
from furlong.training.megatron.attention import JointNorm, attend_by_sequence, attend_unfused, once


@dataclass(frozen=True)
class PackedMicroBatch:
    """This rank's part of a micro-batch.

    tokens: [1, T of this rank]. params: offsets of the whole micro-batch, on the host. predict: rows of this rank's
    hidden states that predict response tokens; response: the indices of those among the R tokens. targets_R: all R
    tokens. source: the micro-batch token of each row, -1 for padding.
    """

    tokens: Tensor
    params: PackedSeqParams
    predict: Tensor
    response: Tensor
    targets_R: Tensor
    source: Tensor


def pack(micro: MicroBatch, *, align: int, context: int, context_rank: int) -> PackedMicroBatch:
    """Pad every sequence to a multiple of 2 * context, and each rank's tokens in total to a multiple of `align`."""
    device = micro.tokens_T.device
    cu = micro.host_index().cu_seqlens_S1.tolist()
    lengths = [end - start for start, end in pairwise(cu)]
    unit = 2 * context if context > 1 else 1
    padded = [-(-length // unit) * unit for length in lengths]
    total = sum(padded)
    if rest := -total % math.lcm(unit, align * context):
        padded.append(rest)  # a sequence of padding
        lengths.append(0)
    starts = torch.tensor([0, *padded]).cumsum(0)
    offsets = torch.tensor(cu)
    moved = torch.repeat_interleave(starts[: len(cu) - 1] - offsets[:-1], torch.tensor(lengths[: len(cu) - 1]))
    where_T = (torch.arange(cu[-1]) + moved).to(device, non_blocking=True)
    tokens = micro.tokens_T.new_zeros(int(starts[-1]))
    tokens[where_T] = micro.tokens_T
    source = torch.full_like(tokens, -1)
    source[where_T] = torch.arange(cu[-1], device=device)
    predict_R = where_T[micro.response_pos_R - 1]
    response = torch.arange(len(predict_R), device=device)
    if context > 1:
        rows = _rows_of_rank(starts.tolist(), context, context_rank).to(device, non_blocking=True)
        place = torch.full((len(tokens),), -1, device=device)
        place[rows] = torch.arange(len(rows), device=device)
        tokens, source = tokens[rows], source[rows]
        response = response[place[predict_R] >= 0]
        predict_R = place[predict_R[response]]
    params = sequence_params(starts.to(torch.int32), max(padded))
    return PackedMicroBatch(tokens[None], params, predict_R, response, micro.tokens_T[micro.response_pos_R], source)


def sequence_params(cu_S1: Tensor, longest: int) -> PackedSeqParams:
    """Return Megatron-core's description of packed sequences; `cu_S1` is on the host."""
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_S1, cu_seqlens_kv=cu_S1, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _rows_of_rank(starts: list[int], context: int, rank: int) -> Tensor:
    """Return the rows of a context-parallel rank: two chunks of every sequence, one from each end."""
    rows: list[Tensor] = []
    for start, end in pairwise(starts):
        size = (end - start) // (2 * context)
        for chunk in (rank, 2 * context - 1 - rank):
            rows.append(torch.arange(start + chunk * size, start + (chunk + 1) * size))
    return torch.cat(rows)


class PackedPositions(NamedTuple):
    """Rotary cosines and sines of the tokens, [T, 1, rotated part of E], and offsets of the sequences."""

    cos: Tensor
    sin: Tensor
    cu_seqlens_S1: Tensor
    cu_host_S1: Tensor
    longest: int


class PackedLayer(TransformerLayer):
    """Packed attention and a gated MLP or experts.

    Attention may have QK norms, biases, a sliding window, sinks and partial rotary embeddings. is_recomputed: the MLP's
    intermediate activations are recomputed in the backward pass. post_norm: class of the norms of the outputs of
    attention and MLP, None without these.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        post_norm: Callable[[TransformerConfig, int, float], torch.nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, *args, **options)
        self.has_post_norms = post_norm is not None
        if post_norm is not None:
            self.post_self_attn_layernorm, self.post_mlp_layernorm = (
                post_norm(config, config.hidden_size, config.layernorm_epsilon) for _ in range(2)
            )
        self.must_recompute = config.recompute_granularity == "selective" and "mlp" in (config.recompute_modules or ())
        self.is_recomputed = self.must_recompute
        self.is_unfused = config.has_unfused_attention
        self.tp_size, self.is_sequence_parallel = config.tensor_model_parallel_size, config.sequence_parallel
        assert config.num_query_groups  # Megatron-core derives both
        assert config.kv_channels
        self.num_groups = config.num_query_groups // self.tp_size
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        self.head_width, self.eps = config.kv_channels, config.layernorm_epsilon
        self.scale: float = self.self_attention.core_attention.scale

    def compile_pieces(self) -> None:
        """Compile the pieces without collectives; compilation happens on first use."""
        set_compiler_options()
        if self.tp_size == 1 and not self.is_moe_layer:
            self._layer = torch.compile(self._layer, dynamic=True)
            return
        names = ["_input_norm", "_mlp_norm"]
        if self.tp_size == 1 or not isinstance(self.self_attention.q_layernorm, JointNorm):  # which communicates
            names.append("_attend")
        if not self.is_moe_layer:
            names.append("_mlp")
        for name in names:
            setattr(self, name, torch.compile(getattr(self, name), dynamic=True))

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Any:
        """Run the layer on [T, 1, D]; returns the output and None, as Megatron-core expects."""
        assert packed_seq_params is not None
        assert rotary_pos_emb is not None
        if self.config.context_parallel_size > 1:  # Megatron-core's own forward pass
            if self.has_post_norms:
                self.self_attn_bda = _add_normalized(self.post_self_attn_layernorm)
                self.mlp_bda = _add_normalized(self.post_mlp_layernorm)
            return super().forward(
                hidden_states, *args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **options
            )
        x = hidden_states
        if x.stride(1) != x.shape[2]:  # the embedding's output, for which the compiler would add variants
            x = x.clone(memory_format=torch.contiguous_format)
        angles = rotary_pos_emb
        where = once(packed_seq_params, "positions", lambda: packed_positions(packed_seq_params, angles, x))
        return self._layer(x, where), None

    def _layer(self, x: Tensor, where: PackedPositions) -> Tensor:
        rows = self._input_norm(x)
        x, rows = self._mlp_norm(x, self._reduce(self._attend(self._gather(rows), where)))
        if self.is_moe_layer:
            return self._add_mlp(x, self.mlp(rows)[0])
        rows = self._gather(rows)
        if self.is_recomputed and torch.is_grad_enabled():
            rows = checkpoint(self._mlp, rows, use_reentrant=False, preserve_rng_state=False)
        else:
            rows = self._mlp(rows)
        return self._add_mlp(x, self._reduce(rows))

    def _input_norm(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.input_layernorm.weight, self.eps)

    def _mlp_norm(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        bias: Tensor | None = self.self_attention.linear_proj.bias
        rows = rows if bias is None else rows + bias
        if self.has_post_norms:
            rows = _rms_norm(rows, self.post_self_attn_layernorm.weight, self.eps)
        x = x + rows
        return x, _rms_norm(x, self.pre_mlp_layernorm.weight, self.eps)

    def _add_mlp(self, x: Tensor, rows: Tensor) -> Tensor:
        return x + (_rms_norm(rows, self.post_mlp_layernorm.weight, self.eps) if self.has_post_norms else rows)

    def _attend(self, rows: Tensor, where: PackedPositions) -> Tensor:
        attention: Any = self.self_attention
        query, key, value = (
            F.linear(rows, *of).view(-1, len(of[0]) // self.head_width, self.head_width) for of in self._qkv()
        )
        if isinstance(attention.q_layernorm, JointNorm):
            query, key = attention.q_layernorm(query), attention.k_layernorm(key)
        elif self.config.qk_layernorm:
            query = _rms_norm(query, attention.q_layernorm.weight, self.eps)
            key = _rms_norm(key, attention.k_layernorm.weight, self.eps)
        pairs_neighbors = self.config.rotary_interleaved
        query, key = _rotate(query, where, pairs_neighbors), _rotate(key, where, pairs_neighbors)
        core = attention.core_attention
        options: dict[str, Any] = {"scale": self.scale, "window": core.window, "sinks_H": core.softmax_offset}
        if self.is_unfused:
            out = attend_unfused(query, key, value, where.cu_host_S1, where.cu_host_S1, **options)
        elif query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            offsets = where.cu_seqlens_S1, where.cu_host_S1, where.longest
            out = varlen_attention(query, key, value, *offsets, **options)
        else:
            out = attend_by_sequence(query, key, value, where.cu_host_S1, where.cu_host_S1, **options)
        return F.linear(out.flatten(1)[:, None], attention.linear_proj.weight)

    def _qkv(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield weight and bias of q, of k and of v, which are stored per key/value head.

        Copying weights is faster than splitting the joint projection's output, whose gradients would have to be joined.
        """
        stored: Any = self.self_attention.linear_qkv
        rows = (self.num_groups, self.heads_per_group + 2, self.head_width)
        weights = stored.weight.view(*rows, -1).split((self.heads_per_group, 1, 1), dim=1)
        biases = (None,) * 3
        if stored.bias is not None:
            biases = (part.flatten() for part in stored.bias.view(rows).split((self.heads_per_group, 1, 1), dim=1))
        for weight, bias in zip(weights, biases, strict=True):
            yield weight.flatten(0, 2), bias

    def _mlp(self, rows: Tensor) -> Tensor:
        gate, up = (F.linear(rows, weight) for weight in self.mlp.linear_fc1.weight.chunk(2))
        return F.linear(F.silu(gate) * up, self.mlp.linear_fc2.weight)

    def _gather(self, rows: Tensor) -> Tensor:
        if self.tp_size == 1:
            return rows
        if self.is_sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(rows)
        return tensor_parallel.copy_to_tensor_model_parallel_region(rows)

    def _reduce(self, rows: Tensor) -> Tensor:
        if self.tp_size == 1:
            return rows
        if self.is_sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(rows)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(rows)


def prepare_layers(model: GPTModel, *, compiled: bool) -> MlpRecompute:
    """Compile a stage's layers if `compiled`; returns the choice of the MLPs to recompute."""
    layers = [layer for layer in model.decoder.layers if isinstance(layer, PackedLayer)]
    if compiled:
        for layer in layers:
            layer.compile_pieces()
    dense = [layer for layer in layers if not (layer.is_moe_layer or layer.must_recompute)]
    row_bytes = 0
    if dense:
        weight: Tensor = dense[0].mlp.linear_fc2.weight
        row_bytes = weight.shape[1] * weight.itemsize
    return MlpRecompute(dense, row_bytes=row_bytes, compiled=compiled)


def packed_positions(packed: PackedSeqParams, angles: Tensor, like: Tensor) -> PackedPositions:
    """Return the `PackedPositions` of a micro-batch. angles: [L, 1, 1, E] of each position."""
    host: Tensor = packed.cu_seqlens_q
    index = torch.cat([torch.arange(end - start) for start, end in pairwise(host.tolist())])
    angles = angles[:, 0].index_select(0, index.to(like.device, non_blocking=True))
    cu_seqlens_S1 = host.to(like.device, non_blocking=True)
    for offsets in (cu_seqlens_S1, host):
        torch._dynamo.maybe_mark_dynamic(offsets, 0)  # pyright: ignore[reportPrivateUsage]  documented for users
    cos, sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    return PackedPositions(cos, sin, cu_seqlens_S1, host, packed.max_seqlen_q)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def _add_normalized(norm: torch.nn.Module) -> Any:
    """Return the residual sum in the form of Megatron-core's `get_bias_dropout_add`, with a norm of the output."""

    def add(with_bias: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
        rows, bias = with_bias
        return residual + norm(rows if bias is None else rows + bias)

    return lambda *_: add


def _rotate(x: Tensor, where: PackedPositions, pairs_neighbors: bool) -> Tensor:
    """Apply rotary embeddings to the first `cos.shape[-1]` channels of each head, paired by halves or as neighbors."""
    x, rest = x.split([where.cos.shape[-1], x.shape[-1] - where.cos.shape[-1]], dim=-1)
    if pairs_neighbors:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    x = x * where.cos + turned * where.sin
    return torch.cat((x, rest), dim=-1) if rest.shape[-1] else x
