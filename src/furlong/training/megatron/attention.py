"""Causal attention over packed micro-batches, used as Megatron-core's `core_attention` instead of TransformerEngine's.

Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434 sec. 2.1): every tensor-parallel rank computes the
compressed vectors (with sequence parallelism, of its tokens); heads are split over ranks.

Legend: T tokens of this rank, H query heads, K key/value heads, E width of queries and keys, F of values, S sequences;
Q, L tokens of one sequence, as queries and as keys; P width of the rotated part of an MLA head.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed.nn.functional import all_reduce
from torch.nn.attention import SDPBackend, sdpa_kernel

from furlong.models.packed_attention import allowed_keys, explicit_attention, prefers_explicit_attention
from furlong.models.varlen_attention import varlen_attention

T = TypeVar("T")


class _SplitByHeads(torch.nn.Module):
    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the places of the parameters in a Megatron-core checkpoint: split by heads."""
        del metadata
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, dict.fromkeys(state, 0), sharded_offsets)


class PackedAttention(_SplitByHeads):
    """Causal attention within each sequence of a packed micro-batch ("thd"); heads are split by tensor parallelism.

    With context parallelism a rank has two chunks of every sequence, one from each end, which balances the work; keys
    and values are gathered from all ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,  # noqa: ARG002  Megatron-core's signature
        attention_type: str,  # noqa: ARG002
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None  # Megatron-core derives it
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.num_context = config.context_parallel_size
        self.is_unfused = config.has_unfused_attention
        self.attend = attend_unfused if self.is_unfused else attend_by_sequence
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if has_window and config.window_size else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":  # of this rank's heads
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002  causality is in the kernels
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend: queries [T, H, E], keys [T, K, E] and values [T, K, F] to [T, H * F]."""
        assert packed_seq_params is not None
        cu_host_S1 = packed_seq_params.cu_seqlens_q
        if self.num_context > 1:
            return self._context_parallel(query, key, value, cu_host_S1).flatten(1)
        options: Any = {"scale": self.scale, "window": self.window, "sinks_H": self.softmax_offset}
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not self.is_unfused:
            cu_S1 = once(packed_seq_params, "cu_seqlens", lambda: cu_host_S1.to(query.device, non_blocking=True))
            longest = packed_seq_params.max_seqlen_q
            width = value.shape[-1]
            value = F.pad(value, (0, query.shape[-1] - width))  # the kernel needs equal widths
            out_THE = varlen_attention(query, key, value, cu_S1, cu_host_S1, longest, **options)
            return out_THE[..., :width].flatten(1)
        return self.attend(query, key, value, cu_host_S1, cu_host_S1, **options).flatten(1)

    def _context_parallel(self, q_THE: Tensor, k_TKE: Tensor, v_TKF: Tensor, cu_S1: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        keys, cu_q, cu_k = key_rows(cu_S1, group.size(), group.rank())
        both = torch.cat([k_TKE, v_TKF], dim=-1)
        both = tensor_parallel.gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=group)
        key, value = both[keys.to(q_THE.device)].split([k_TKE.shape[-1], v_TKF.shape[-1]], dim=-1)
        options: Any = {"scale": self.scale, "window": self.window, "sinks_H": self.softmax_offset}
        return self.attend(q_THE, key, value, cu_q, cu_k, **options)


def once(packed: PackedSeqParams, name: str, make: Callable[[], T]) -> T:
    """Return what `make` makes of a micro-batch, made once for all layers."""
    cache = packed.__dict__
    if (key := f"furlong_{name}") not in cache:
        cache[key] = make()
    return cache[key]


def attend_by_sequence(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKF: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend within each sequence; with more keys than queries, the last query is aligned with the last key.

    A query attends to itself and the `window - 1` tokens before it. `sinks_H`: logits of a key whose value is zero.
    Consecutive sequences of equal length are computed as one batch.
    """
    out: list[Tensor] = []
    q0 = k0 = 0
    lengths = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)
    for (num_queries, num_keys), run in groupby(lengths):
        count = len(list(run))
        q1, k1 = q0 + count * num_queries, k0 + count * num_keys
        query, key, value = (
            rows.unflatten(0, (count, -1)).transpose(1, 2) for rows in (q_THE[q0:q1], k_TKE[k0:k1], v_TKF[k0:k1])
        )
        out.append(_attend(query, key, value, scale, window, sinks_H).transpose(1, 2).flatten(0, 1))
        q0, k0 = q1, k1
    return torch.cat(out)


def attend_unfused(q_THE: Tensor, k_TKE: Tensor, v_TKF: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any) -> Tensor:
    """`attend_by_sequence` with an explicit softmax, which stores the scores: a reference for the fused kernels."""
    with sdpa_kernel(SDPBackend.MATH):
        return attend_by_sequence(q_THE, k_TKE, v_TKF, cu_q, cu_k, **options)


def _attend(
    q_SHQE: Tensor, k_SKLE: Tensor, v_SKLF: Tensor, scale: float, window: int | None, sinks_H: Tensor | None
) -> Tensor:
    """Attend within sequences of one length: [S, H, Q, F]."""
    num_queries, num_keys = q_SHQE.shape[2], k_SKLE.shape[2]
    mask_QL = None
    if sinks_H is not None or prefers_explicit_attention(q_SHQE):
        mask_QL = allowed_keys(num_queries, num_keys, window, q_SHQE.device)
        return explicit_attention(q_SHQE, k_SKLE, v_SKLF, mask_QL, scale, sinks_H=sinks_H)
    if num_queries != num_keys or (window is not None and window < num_keys):
        mask_QL = allowed_keys(num_queries, num_keys, window, q_SHQE.device)
    grouped = q_SHQE.shape[1] != k_SKLE.shape[1]
    options: Any = {"attn_mask": mask_QL, "is_causal": mask_QL is None, "scale": scale, "enable_gqa": grouped}
    return F.scaled_dot_product_attention(q_SHQE, k_SKLE, v_SKLF, **options)


def gathered_rows(cu_S1: Tensor, num_ranks: int) -> Tensor:
    """Return [T] the row of each token, in order, among the gathered rows of all context-parallel ranks."""
    cu = cu_S1.tolist()
    local = cu[-1] // num_ranks
    chunks: list[Tensor] = []
    for start, end in pairwise(cu):
        size, base = (end - start) // (2 * num_ranks), start // num_ranks
        for chunk in range(2 * num_ranks):
            is_second = chunk >= num_ranks
            owner = 2 * num_ranks - 1 - chunk if is_second else chunk
            first = owner * local + base + is_second * size
            chunks.append(torch.arange(first, first + size))
    return torch.cat(chunks)


def key_rows(cu_S1: Tensor, num_ranks: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gathered rows that are the keys of a context-parallel rank's two chunks of every sequence.

    Every sequence has 2 * num_ranks chunks; a rank has chunk `rank` and the one as far from the end. Also returns the
    offsets of queries and of keys, chunk by chunk.
    """
    gathered_T = gathered_rows(cu_S1, num_ranks)
    rows: list[Tensor] = []
    cu_q, cu_k = [0], [0]
    for start, end in pairwise(cu_S1.tolist()):
        size, whole = (end - start) // (2 * num_ranks), gathered_T[start:end]
        for chunk in (rank, 2 * num_ranks - 1 - rank):
            rows.append(whole[: (chunk + 1) * size])
            cu_q.append(cu_q[-1] + size)
            cu_k.append(cu_k[-1] + (chunk + 1) * size)
    return torch.cat(rows), torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k, dtype=torch.int32)


class JointNorm(_SplitByHeads):
    """RMSNorm over all heads of a token together; this rank has some of them.

    num_heads: of all tensor-parallel ranks. hidden_size: width of a head, as Megatron-core names it.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, num_heads: int, **_: Any) -> None:
        super().__init__()
        self.eps, self.width, self.tensor = eps, num_heads * hidden_size, config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(self.width // self.tensor, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x_THE: Tensor) -> Tensor:
        """Normalize this rank's heads [..., H, E]."""
        wide = x_THE.to(torch.promote_types(x_THE.dtype, torch.float32))
        squares = wide.square().sum((-2, -1), keepdim=True)
        if self.tensor > 1:  # every rank's output depends on all ranks' sums: gradients are summed, too
            group = parallel_state.get_tensor_model_parallel_group()
            squares = all_reduce(squares, group=group)
        wide = wide * torch.rsqrt(squares / self.width + self.eps)
        return wide.to(x_THE.dtype) * self.weight.view(x_THE.shape[-2:])


NORM_EPS = 1e-6  # of the compressed vectors' norms, in all DeepSeek models


class MultiLatentAttention(MegatronModule):
    """Takes the place of Megatron-core's MLASelfAttention and has its parameter names.

    hf: has the widths. factor: YaRN's, of cosines and sines.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        hf: Any,
        factor: float,
        norm: type[torch.nn.Module],
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.factor, self.is_interleaved = factor, bool(hf.rope_interleave)
        self.tensor = config.tensor_model_parallel_size
        self.nope_width, self.rope_width, self.value_width = hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim
        self.rank, heads = hf.kv_lora_rank, hf.num_attention_heads
        options: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        columns: dict[str, Any] = {**options, "gather_output": False}
        width = heads * (self.nope_width + self.rope_width)
        self.compresses_queries = hf.q_lora_rank is not None
        if self.compresses_queries:
            self.linear_q_down_proj = self._replicated(hf.hidden_size, hf.q_lora_rank)
            self.q_layernorm = norm(config, hf.q_lora_rank, eps=NORM_EPS)
            self.linear_q_up_proj = ColumnParallelLinear(hf.q_lora_rank, width, **columns)
        else:
            self.linear_q_proj = ColumnParallelLinear(hf.hidden_size, width, **columns)
        self.linear_kv_down_proj = self._replicated(hf.hidden_size, self.rank + self.rope_width)
        self.kv_layernorm = norm(config, self.rank, eps=NORM_EPS)
        self.linear_kv_up_proj = ColumnParallelLinear(
            self.rank, heads * (self.nope_width + self.value_width), **columns
        )
        self.core_attention = PackedAttention(
            config, layer_number, AttnMaskType.causal, "self", softmax_scale=config.softmax_scale
        )
        self.linear_proj = RowParallelLinear(
            heads * self.value_width, hf.hidden_size, input_is_parallel=True, skip_bias_add=True, **options
        )

    def _replicated(self, rows: int, columns: int) -> torch.nn.Linear:
        layer = torch.nn.Linear(rows, columns, bias=False, dtype=self.config.params_dtype)
        # with sequence parallelism a rank has a partial gradient of this weight
        vars(layer.weight)["sequence_parallel"] = self.config.sequence_parallel
        return layer

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002  causality is in the kernels
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend: [T, 1, D] of this rank's tokens to the same shape, and no bias."""
        queries = hidden_states
        if self.compresses_queries:
            queries = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(queries)))[0]
        else:
            queries = self.linear_q_proj(queries)[0]
        query = queries.view(len(queries), -1, self.nope_width + self.rope_width)
        compressed, shared_key = self.linear_kv_down_proj(hidden_states).split([self.rank, self.rope_width], dim=-1)
        key_value = self.linear_kv_up_proj(self.kv_layernorm(compressed))[0]
        widths = [self.nope_width, self.value_width]
        key, value = key_value.view(len(key_value), -1, sum(widths)).split(widths, dim=-1)
        shared_key = self._rotate(self._gather_tokens(shared_key), rotary_pos_emb, packed_seq_params)
        query, last = query.split([self.nope_width, self.rope_width], dim=-1)
        query = torch.cat([query, self._rotate(last, rotary_pos_emb, packed_seq_params)], dim=-1)
        key = torch.cat([key, shared_key.expand(-1, key.shape[1], -1)], dim=-1)
        out = self.core_attention(query, key, value, packed_seq_params=packed_seq_params)
        return self.linear_proj(out[:, None])[0], None

    def _gather_tokens(self, rows: Tensor) -> Tensor:
        """Gather the keys that all heads share on every rank; gradients are summed over the ranks' heads."""
        if self.tensor == 1:
            return rows
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=True)
        return tensor_parallel.copy_to_tensor_model_parallel_region(rows)

    def _rotate(self, x: Tensor, angles: Tensor, packed: PackedSeqParams) -> Tensor:
        """Apply rotary embeddings to [T, H or 1, P]; DeepSeek interleaves the pairs."""
        if self.is_interleaved:
            x = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
        group = parallel_state.get_context_parallel_group()
        cu_S1 = packed.cu_seqlens_q
        return apply_rotary_pos_emb(x, angles, config=self.config, cu_seqlens=cu_S1, mscale=self.factor, cp_group=group)
