"""A layer of Megatron-core's model as functions of plain tensors, which compile.

`PackedLayer` has the modules, and so the parameters, that Megatron-core builds; only what is done with them is written
here. A layer whose tensors are whole compiles in one piece: norms, rotary embedding, SwiGLU and residual sums become
few kernels, and what is kept for the backward pass is chosen as in the layers of `models.compiled_layers`. Where
tensors are cut over ranks, what lies between two collectives is a piece.

Legend: T tokens of a micro-batch, of which a rank has a part outside of attention and MLP with sequence parallelism;
D width, G groups of query heads with one key/value head, E head width.
"""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false, reportIncompatibleMethodOverride=false, reportOptionalOperand=false, reportFunctionMemberAccess=false
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from furlong.models.compiled_layers import MlpRecompute, allow_variants
from furlong.models.varlen_attention import varlen_attention
from furlong.training.megatron.attention import attend_by_sequence, attend_unfused


class PackedPositions(NamedTuple):
    """Where the tokens of a micro-batch are: rotary embedding [T, 1, rotated part of E] and offsets of sequences."""

    cos: Tensor
    sin: Tensor
    cu_seqlens_S1: Tensor
    cu_host_S1: Tensor
    longest: int


class PackedLayer(TransformerLayer):
    """Attention by packed sequences and a gated MLP or experts.

    Attention may have norms of its heads, biases, a window and sinks, and rotate a part of its heads.

    is_recomputed: the MLP's intermediate rows are made again in the backward pass.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.must_recompute = config.recompute_granularity == "selective" and "mlp" in (config.recompute_modules or ())
        self.is_recomputed = self.must_recompute
        self.is_unfused = config.has_unfused_attention
        self.num_tensor, self.has_parts = config.tensor_model_parallel_size, config.sequence_parallel
        assert config.num_query_groups  # Megatron-core derives both
        assert config.kv_channels
        self.num_groups = config.num_query_groups // self.num_tensor
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        self.head_width, self.eps = config.kv_channels, config.layernorm_epsilon
        self.scale: float = self.self_attention.core_attention.scale

    def compile_pieces(self) -> None:
        """Compile what is on this rank alone; its first calls take their time."""
        allow_variants()
        if self.num_tensor == 1 and not self.is_moe_layer:
            self._through = torch.compile(self._through, dynamic=True)
            return
        names = ("_first_norm", "_attend", "_second_norm", "_transform")
        for name in names[:3] if self.is_moe_layer else names:
            setattr(self, name, torch.compile(getattr(self, name), dynamic=True))

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Any:
        """Run the layer on [T, 1, D]; returns the same and None, which Megatron-core wants."""
        assert packed_seq_params is not None
        assert rotary_pos_emb is not None
        if self.config.context_parallel_size > 1:  # a sequence is on several ranks: each piece is Megatron-core's own
            return super().forward(
                hidden_states,
                *args,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                **options,
            )
        x = hidden_states
        if x.stride(1) != x.shape[2]:  # of the embedding; the compiler would make variants for the first layer alone
            x = x.clone(memory_format=torch.contiguous_format)
        return self._through(x, packed_positions(packed_seq_params, rotary_pos_emb, x)), None

    def _through(self, x: Tensor, where: PackedPositions) -> Tensor:
        rows = self._first_norm(x)
        x, rows = self._second_norm(x, self._leave(self._attend(self._enter(rows), where)))
        if self.is_moe_layer:
            return x + self.mlp(rows)[0]
        rows = self._enter(rows)
        if self.is_recomputed and torch.is_grad_enabled():
            rows = checkpoint(self._transform, rows, use_reentrant=False, preserve_rng_state=False)
        else:
            rows = self._transform(rows)
        return x + self._leave(rows)

    def _first_norm(self, x: Tensor) -> Tensor:
        return _norm(x, self.input_layernorm.weight, self.eps)

    def _second_norm(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        bias: Tensor | None = self.self_attention.linear_proj.bias
        x = x + (rows if bias is None else rows + bias)
        return x, _norm(x, self.pre_mlp_layernorm.weight, self.eps)

    def _attend(self, rows: Tensor, where: PackedPositions) -> Tensor:
        """What this rank's heads add; to be summed over the ranks that share a layer."""
        attention: Any = self.self_attention
        query, key, value = (
            F.linear(rows, *of).view(-1, len(of[0]) // self.head_width, self.head_width) for of in self._qkv()
        )
        if self.config.qk_layernorm:
            query = _norm(query, attention.q_layernorm.weight, self.eps)
            key = _norm(key, attention.k_layernorm.weight, self.eps)
        query, key = _rotated(query, where), _rotated(key, where)
        core = attention.core_attention
        how: dict[str, Any] = {"scale": self.scale, "window": core.window, "sinks_H": core.softmax_offset}
        if self.is_unfused:
            out = attend_unfused(query, key, value, where.cu_host_S1, where.cu_host_S1, **how)
        elif query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            offsets = where.cu_seqlens_S1, where.cu_host_S1, where.longest
            out = varlen_attention(query, key, value, *offsets, **how)
        else:
            out = attend_by_sequence(query, key, value, where.cu_host_S1, where.cu_host_S1, **how)
        return F.linear(out.flatten(1)[:, None], attention.linear_proj.weight)

    def _qkv(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Weight and bias of queries, of keys and of values, which are stored group by group.

        Copying weights is quicker than taking the product of all three apart: gradients would have to be put together.
        """
        stored: Any = self.self_attention.linear_qkv
        rows = (self.num_groups, self.heads_per_group + 2, self.head_width)
        weights = stored.weight.view(*rows, -1).split((self.heads_per_group, 1, 1), dim=1)
        biases = (None,) * 3
        if stored.bias is not None:
            biases = (part.flatten() for part in stored.bias.view(rows).split((self.heads_per_group, 1, 1), dim=1))
        for weight, bias in zip(weights, biases, strict=True):
            yield weight.flatten(0, 2), bias

    def _transform(self, rows: Tensor) -> Tensor:
        """What this rank's part of the MLP adds."""
        gate, up = (F.linear(rows, weight) for weight in self.mlp.linear_fc1.weight.chunk(2))
        return F.linear(F.silu(gate) * up, self.mlp.linear_fc2.weight)

    def _enter(self, rows: Tensor) -> Tensor:
        """All tokens, before a product with weights of which each rank has some rows."""
        if self.num_tensor == 1:
            return rows
        if self.has_parts:
            return tensor_parallel.gather_from_sequence_parallel_region(rows)
        return tensor_parallel.copy_to_tensor_model_parallel_region(rows)

    def _leave(self, rows: Tensor) -> Tensor:
        """The sum of what the ranks' parts of a layer add, of this rank's tokens."""
        if self.num_tensor == 1:
            return rows
        if self.has_parts:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(rows)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(rows)


def prepare_layers(model: GPTModel, *, compiled: bool) -> MlpRecompute:
    """Compile a stage's layers if asked for; returns what chooses which of their MLPs are recomputed."""
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
    """Make `PackedPositions` once for all layers. `angles` [L, 1, 1, E] are those of each position."""
    kept: dict[str, Any] = packed.__dict__
    if "furlong_places" not in kept:
        host: Tensor = packed.cu_seqlens_q
        positions = torch.cat([torch.arange(end - start) for start, end in pairwise(host.tolist())])
        angles = angles[:, 0].index_select(0, positions.to(like.device, non_blocking=True))
        found = PackedPositions(
            angles.cos().to(like.dtype),
            angles.sin().to(like.dtype),
            host.to(like.device, non_blocking=True),
            host,
            packed.max_seqlen_q,
        )
        for offsets in (found.cu_seqlens_S1, found.cu_host_S1):
            torch._dynamo.maybe_mark_dynamic(offsets, 0)  # pyright: ignore[reportPrivateUsage]  documented for users
        kept["furlong_places"] = found
    return kept["furlong_places"]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def _rotated(x: Tensor, where: PackedPositions) -> Tensor:
    """Rotate pairs of the first and the second half of a head, or of that part of it that is rotated."""
    x, rest = x.split([where.cos.shape[-1], x.shape[-1] - where.cos.shape[-1]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    x = x * where.cos + torch.cat((-second, first), dim=-1) * where.sin
    return torch.cat((x, rest), dim=-1) if rest.shape[-1] else x
