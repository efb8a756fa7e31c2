"""Attention whose keys and values come from a compressed vector of each token (DeepSeek-V2, arXiv:2405.04434 sec. 2.1).

Compressing is done by every tensor-parallel rank, of its own tokens with sequence parallelism; heads are cut over them.
Names of parameters are those of Megatron-core's own such layer.

Legend: T tokens, H heads of this rank, E width of a head without positions, P of its part with them, F of values,
C width of the compressed vector.
"""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
# pyright: reportArgumentType=false
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from furlong.training.megatron.attention import PackedAttention

NORM_EPS = 1e-6  # of the compressed vectors, whatever the other norms have


class MultiLatentAttention(MegatronModule):
    """Stands where Megatron-core builds its own; `hf` has the widths, `factor` is that of cosines and sines."""

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
        self.plain, self.turned, self.value = hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim
        self.rank, heads = hf.kv_lora_rank, hf.num_attention_heads
        how: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        columns: dict[str, Any] = {**how, "gather_output": False}
        width = heads * (self.plain + self.turned)
        self.has_short_queries = hf.q_lora_rank is not None
        if self.has_short_queries:
            self.linear_q_down_proj = self._shared(hf.hidden_size, hf.q_lora_rank)
            self.q_layernorm = norm(config, hf.q_lora_rank, eps=NORM_EPS)
            self.linear_q_up_proj = ColumnParallelLinear(hf.q_lora_rank, width, **columns)
        else:
            self.linear_q_proj = ColumnParallelLinear(hf.hidden_size, width, **columns)
        self.linear_kv_down_proj = self._shared(hf.hidden_size, self.rank + self.turned)
        self.kv_layernorm = norm(config, self.rank, eps=NORM_EPS)
        self.linear_kv_up_proj = ColumnParallelLinear(self.rank, heads * (self.plain + self.value), **columns)
        self.core_attention = PackedAttention(
            config, layer_number, AttnMaskType.causal, "self", softmax_scale=config.softmax_scale
        )
        self.linear_proj = RowParallelLinear(
            heads * self.value, hf.hidden_size, input_is_parallel=True, skip_bias_add=True, **how
        )

    def _shared(self, rows: int, columns: int) -> torch.nn.Linear:
        """A layer that all tensor-parallel ranks have."""
        layer = torch.nn.Linear(rows, columns, bias=False, dtype=self.config.params_dtype)
        # a rank that saw a part of the sequence has a part of this weight's gradient
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
        """[T, 1, D] from the same, of this rank's tokens; and no bias."""
        queries = hidden_states
        if self.has_short_queries:
            queries = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(queries)))[0]
        else:
            queries = self.linear_q_proj(queries)[0]
        query = queries.view(len(queries), -1, self.plain + self.turned)
        compressed, turned = self.linear_kv_down_proj(hidden_states).split([self.rank, self.turned], dim=-1)
        mixed = self.linear_kv_up_proj(self.kv_layernorm(compressed))[0]
        key, value = mixed.view(len(mixed), -1, self.plain + self.value).split([self.plain, self.value], dim=-1)
        turned = self._rotated(self._of_all_tokens(turned), rotary_pos_emb, packed_seq_params)
        query, last = query.split([self.plain, self.turned], dim=-1)
        query = torch.cat([query, self._rotated(last, rotary_pos_emb, packed_seq_params)], dim=-1)
        key = torch.cat([key, turned.expand(-1, key.shape[1], -1)], dim=-1)
        out = self.core_attention(query, key, value, packed_seq_params=packed_seq_params)
        return self.linear_proj(out[:, None])[0], None

    def _of_all_tokens(self, rows: Tensor) -> Tensor:
        """What all heads share, on every rank; its gradient is the sum of what the ranks' heads give."""
        if self.tensor == 1:
            return rows
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=True)
        return tensor_parallel.copy_to_tensor_model_parallel_region(rows)

    def _rotated(self, x: Tensor, angles: Tensor, packed: PackedSeqParams) -> Tensor:
        """[T, H or 1, P]; DeepSeek stores pairs next to each other."""
        if self.is_interleaved:
            x = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
        group = parallel_state.get_context_parallel_group()
        cu_S1 = packed.cu_seqlens_q
        return apply_rotary_pos_emb(x, angles, config=self.config, cu_seqlens=cu_S1, mscale=self.factor, cp_group=group)
