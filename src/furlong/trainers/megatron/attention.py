"""Causal attention over packed micro-batches, where Megatron-core leaves room for TransformerEngine's.

Legend: T tokens of this rank, H query heads, K key/value heads, E head width, S sequences.
"""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from furlong.models.varlen_attention import varlen_attention


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a packed micro-batch ("thd"); heads are split by tensor parallelism.

    With context parallelism a rank has two chunks of every sequence, one from each end, so that all ranks have the same
    work; keys and values are gathered from all of them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,  # noqa: ARG002  Megatron-core's arguments
        attn_mask_type: AttnMaskType,  # noqa: ARG002
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

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002  causality is in the kernels
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """[T, H * E] from [T, H, E] and [T, K, E] of keys and values."""
        assert packed_seq_params is not None
        cu_host_S1 = packed_seq_params.cu_seqlens_q
        if self.num_context > 1:
            return self._over_ranks(query, key, value, cu_host_S1).flatten(1)
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not self.is_unfused:
            cu_S1 = _on_device(packed_seq_params, query.device)
            longest = packed_seq_params.max_seqlen_q
            return varlen_attention(query, key, value, cu_S1, cu_host_S1, longest, scale=self.scale).flatten(1)
        return self.attend(query, key, value, cu_host_S1, cu_host_S1, scale=self.scale).flatten(1)

    def _over_ranks(self, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, cu_S1: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        keys, cu_q, cu_k = key_rows(cu_S1, group.size(), group.rank())
        both = torch.stack([k_TKE, v_TKE], dim=1).contiguous()
        both = tensor_parallel.gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=group)
        rows = both[keys.to(q_THE.device)]
        return self.attend(q_THE, rows[:, 0], rows[:, 1], cu_q, cu_k, scale=self.scale)


def _on_device(packed: PackedSeqParams, device: torch.device) -> Tensor:
    """The offsets on the GPU, copied once for all layers; Megatron-core's rotary embedding wants them on the host."""
    kept = packed.__dict__
    if "furlong_cu_seqlens" not in kept:
        kept["furlong_cu_seqlens"] = packed.cu_seqlens_q.to(device, non_blocking=True)
    return kept["furlong_cu_seqlens"]


def attend_by_sequence(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, cu_q: Tensor, cu_k: Tensor, *, scale: float
) -> Tensor:
    """Attend sequence by sequence; where there are more keys than queries, the last query sees the last key."""
    out: list[Tensor] = []
    grouped = q_THE.shape[1] != k_TKE.shape[1]
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        parts = (t[a:b].transpose(0, 1)[None] for t, a, b in ((q_THE, q0, q1), (k_TKE, k0, k1), (v_TKE, k0, k1)))
        query, key, value = parts
        mask = None
        if q1 - q0 != k1 - k0:
            mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=query.device).tril(k1 - k0 - (q1 - q0))
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        out.append(attended[0].transpose(0, 1))
    return torch.cat(out)


def attend_unfused(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, cu_q: Tensor, cu_k: Tensor, *, scale: float) -> Tensor:
    """`attend_by_sequence` by products and a softmax, whose scores exist: for comparison with the kernels."""
    with sdpa_kernel(SDPBackend.MATH):
        return attend_by_sequence(q_THE, k_TKE, v_TKE, cu_q, cu_k, scale=scale)


def key_rows(cu_S1: Tensor, num_ranks: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which gathered rows are the keys of a context-parallel rank's two chunks of every sequence.

    Every sequence is 2 * num_ranks chunks, of which a rank holds `rank` and the one as far from the end. Returns the
    rows, and the offsets of queries and of keys, chunk by chunk.
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
