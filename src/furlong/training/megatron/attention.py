"""Causal attention over packed micro-batches, used as Megatron-core's `core_attention` instead of TransformerEngine's.

Legend: T tokens of this rank, H query heads, K key/value heads, E width of queries and keys, F of values, S sequences;
Q, L tokens of one sequence, as queries and as keys.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from furlong.models.packed_attention import allowed_keys, explicit_attention, prefers_explicit_attention
from furlong.models.varlen_attention import varlen_attention


class PackedAttention(torch.nn.Module):
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

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the place of the attention sinks in a Megatron-core checkpoint: split by heads."""
        del metadata
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)

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
            cu_S1 = _on_device(packed_seq_params, query.device)
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


def _on_device(packed: PackedSeqParams, device: torch.device) -> Tensor:
    """Return the offsets on the GPU, copied once for all layers; rotary embeddings need them on the host."""
    cache = packed.__dict__
    if "furlong_cu_seqlens" not in cache:
        cache["furlong_cu_seqlens"] = packed.cu_seqlens_q.to(device, non_blocking=True)
    return cache["furlong_cu_seqlens"]


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


def key_rows(cu_S1: Tensor, num_ranks: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gathered rows that are the keys of a context-parallel rank's two chunks of every sequence.

    Every sequence has 2 * num_ranks chunks; a rank has chunk `rank` and the one as far from the end. Also returns the
    offsets of queries and of keys, chunk by chunk.
    """
    cu = cu_S1.tolist()
    local = cu[-1] // num_ranks
    rows: list[Tensor] = []
    cu_q, cu_k = [0], [0]
    for start, end in pairwise(cu):
        size, base = (end - start) // (2 * num_ranks), start // num_ranks
        chunks: list[Tensor] = []
        for chunk in range(2 * num_ranks):
            is_second = chunk >= num_ranks
            owner = 2 * num_ranks - 1 - chunk if is_second else chunk
            first = owner * local + base + is_second * size
            chunks.append(torch.arange(first, first + size))
        whole = torch.cat(chunks)
        for chunk in (rank, 2 * num_ranks - 1 - rank):
            rows.append(whole[: (chunk + 1) * size])
            cu_q.append(cu_q[-1] + size)
            cu_k.append(cu_k[-1] + (chunk + 1) * size)
    return torch.cat(rows), torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k, dtype=torch.int32)
