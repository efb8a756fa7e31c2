"""Causal attention over packed micro-batches, where Megatron-core leaves room for TransformerEngine's.

Legend: T tokens of this rank, H query heads, K key/value heads, E width of queries and keys, F of values, S sequences;
Q, L tokens of one sequence, as queries and as keys.
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
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
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
        layer_number: int,
        attn_mask_type: AttnMaskType,  # noqa: ARG002  Megatron-core's arguments
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
        """Where its parameter lies in a checkpoint of Megatron-core's: sinks are cut by heads."""
        del metadata
        own = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(own, prefix, {"softmax_offset": 0}, sharded_offsets)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002  causality is in the kernels
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """[T, H * F] from queries [T, H, E], keys [T, K, E] and values [T, K, F]."""
        assert packed_seq_params is not None
        cu_host_S1 = packed_seq_params.cu_seqlens_q
        if self.num_context > 1:
            return self._over_ranks(query, key, value, cu_host_S1).flatten(1)
        how: Any = {"scale": self.scale, "window": self.window, "sinks_H": self.softmax_offset}
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not self.is_unfused:
            cu_S1 = _on_device(packed_seq_params, query.device)
            longest = packed_seq_params.max_seqlen_q
            width = value.shape[-1]
            value = F.pad(value, (0, query.shape[-1] - width))  # the kernel wants all three of one width
            out_THE = varlen_attention(query, key, value, cu_S1, cu_host_S1, longest, **how)
            return out_THE[..., :width].flatten(1)
        return self.attend(query, key, value, cu_host_S1, cu_host_S1, **how).flatten(1)

    def _over_ranks(self, q_THE: Tensor, k_TKE: Tensor, v_TKF: Tensor, cu_S1: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        keys, cu_q, cu_k = key_rows(cu_S1, group.size(), group.rank())
        both = torch.cat([k_TKE, v_TKF], dim=-1)
        both = tensor_parallel.gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=group)
        key, value = both[keys.to(q_THE.device)].split([k_TKE.shape[-1], v_TKF.shape[-1]], dim=-1)
        how: Any = {"scale": self.scale, "window": self.window, "sinks_H": self.softmax_offset}
        return self.attend(q_THE, key, value, cu_q, cu_k, **how)


def _on_device(packed: PackedSeqParams, device: torch.device) -> Tensor:
    """The offsets on the GPU, copied once for all layers; Megatron-core's rotary embedding wants them on the host."""
    kept = packed.__dict__
    if "furlong_cu_seqlens" not in kept:
        kept["furlong_cu_seqlens"] = packed.cu_seqlens_q.to(device, non_blocking=True)
    return kept["furlong_cu_seqlens"]


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
    """Attend sequence by sequence; where there are more keys than queries, the last query sees the last key.

    A query sees itself and the `window - 1` tokens before it. `sinks_H` are logits of a key whose value is zero.
    """
    out: list[Tensor] = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        spans = ((q_THE, q0, q1), (k_TKE, k0, k1), (v_TKF, k0, k1))
        query, key, value = (rows[start:end].transpose(0, 1) for rows, start, end in spans)
        mask = None
        if q1 - q0 != k1 - k0 or (window is not None and window < k1 - k0) or sinks_H is not None:
            last = k1 - k0 - (q1 - q0)  # the key that the first query is
            mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=query.device).tril_(last)
            if window is not None:
                mask.triu_(last - window + 1)
        out.append(_attend(query, key, value, mask, scale, sinks_H).transpose(0, 1))
    return torch.cat(out)


def attend_unfused(q_THE: Tensor, k_TKE: Tensor, v_TKF: Tensor, cu_q: Tensor, cu_k: Tensor, **how: Any) -> Tensor:
    """`attend_by_sequence` by products and a softmax, whose scores exist: for comparison with the kernels."""
    with sdpa_kernel(SDPBackend.MATH):
        return attend_by_sequence(q_THE, k_TKE, v_TKF, cu_q, cu_k, **how)


def _attend(
    q_HQE: Tensor, k_KLE: Tensor, v_KLF: Tensor, mask_QL: Tensor | None, scale: float, sinks_H: Tensor | None
) -> Tensor:
    """[H, Q, F] of one sequence."""
    if sinks_H is None:
        whole = (tensor[None] for tensor in (q_HQE, k_KLE, v_KLF))
        grouped = len(q_HQE) != len(k_KLE)
        how: Any = {"attn_mask": mask_QL, "is_causal": mask_QL is None, "scale": scale, "enable_gqa": grouped}
        return F.scaled_dot_product_attention(*whole, **how)[0]
    assert mask_QL is not None
    groups = len(q_HQE) // len(k_KLE)
    k_HLE, v_HLF = (tensor.repeat_interleave(groups, dim=0) for tensor in (k_KLE, v_KLF))
    scores_HQL = (q_HQE * scale) @ k_HLE.transpose(1, 2)
    scores_HQL = scores_HQL.masked_fill(~mask_QL, float("-inf"))
    sinks_HQ1 = sinks_H.to(scores_HQL.dtype)[:, None, None].expand(-1, scores_HQL.shape[1], 1)
    exact = torch.promote_types(scores_HQL.dtype, torch.float32)
    probs_HQL = torch.cat([scores_HQL, sinks_HQ1], dim=-1).softmax(-1, dtype=exact)[..., :-1]
    return probs_HQL.to(v_HLF.dtype) @ v_HLF


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
