"""Multi-head latent attention over packed sequences (MLA, DeepSeek-V2, arXiv:2405.04434 sec. 2.1).

Every tensor-parallel rank computes the compressed vectors (with sequence parallelism, of its tokens); heads are split
over ranks. Parameter names are those of Megatron-core's MLASelfAttention.

Legend: T tokens, H heads of this rank, P width of the rotated part of a head.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
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

NORM_EPS = 1e-6  # of the compressed vectors' norms, in all DeepSeek models


class MultiLatentAttention(MegatronModule):
    """Takes the place of Megatron-core's self-attention. hf: has the widths; factor: YaRN's, of cosines and sines."""

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
        """Return a linear layer that is replicated over tensor-parallel ranks."""
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
