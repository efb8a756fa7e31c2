"""Gated delta nets (Qwen3-Next, Qwen3.5) as Megatron-core's attention module, over packed micro-batches.

Heads are split by tensor parallelism: a key head with the value heads that it serves stays on one rank, so the rows of
every parameter are ordered by key head. With context parallelism, ranks exchange tokens for heads between projections
and delta rule (all-to-all): each computes whole sequences for a part of its heads.

Legend: T tokens (of this rank, outside of projections and delta rule), K key heads of this rank, R value heads of a key
head, E width of keys, F width of values, C channels.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from furlong.models.delta_rule import PackedSequences, causal_conv, delta_kernel, gated_delta_rule
from furlong.training.megatron.attention import gathered_rows, once

BY_HEAD = {"conv1d.weight": 0, "A_log": 0, "dt_bias": 0}  # parameters and the axis of their heads


class GatedDeltaNet(MegatronModule):
    """A layer's gated delta net; hf: has the widths."""

    def __init__(self, config: TransformerConfig, layer_number: int, *, hf: Any, **_: Any) -> None:
        super().__init__(config)
        del layer_number
        delta_kernel("cuda" if torch.cuda.is_available() else "cpu", config.params_dtype)
        self.tensor, self.context = config.tensor_model_parallel_size, config.context_parallel_size
        self.num_keys = hf.linear_num_key_heads // self.tensor
        self.per_key = hf.linear_num_value_heads // hf.linear_num_key_heads
        self.key_width, self.value_width = hf.linear_key_head_dim, hf.linear_value_head_dim
        self.eps = hf.rms_norm_eps
        values = hf.linear_num_value_heads * self.value_width
        keys = hf.linear_num_key_heads * self.key_width
        options: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        columns: dict[str, Any] = {**options, "gather_output": False}
        self.in_proj_qkvz = ColumnParallelLinear(hf.hidden_size, 2 * (keys + values), **columns)
        self.in_proj_ba = ColumnParallelLinear(hf.hidden_size, 2 * hf.linear_num_value_heads, **columns)
        self.out_proj = RowParallelLinear(values, hf.hidden_size, input_is_parallel=True, skip_bias_add=True, **options)
        self.conv1d: Any = torch.nn.Module()
        self.conv1d.weight = self._split(self.num_keys * self._mixed_width(), 1, hf.linear_conv_kernel_dim)
        self.A_log = self._split(self.num_keys * self.per_key)
        self.dt_bias = self._split(self.num_keys * self.per_key)
        self.norm: Any = torch.nn.Module()
        self.norm.weight = torch.nn.Parameter(torch.ones(self.value_width, dtype=config.params_dtype))

    def _mixed_width(self) -> int:
        return 2 * self.key_width + self.per_key * self.value_width

    def _split(self, *shape: int) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the places of the parameters in a Megatron-core checkpoint."""
        places: dict[str, Any] = {}
        for name in ("in_proj_qkvz", "in_proj_ba", "out_proj"):
            part: Any = getattr(self, name)
            places |= part.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        names = {*BY_HEAD, "norm.weight"}
        state = {name: each for name, each in self.state_dict(prefix="", keep_vars=True).items() if name in names}
        return places | make_sharded_tensors_for_checkpoint(state, prefix, BY_HEAD, sharded_offsets)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002  Megatron-core's signature
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Run the layer: [T, 1, D] of this rank's tokens to the same shape, and no bias."""
        qkvz_TKC = self.in_proj_qkvz(hidden_states)[0].view(-1, self.num_keys, self._mixed_width() + self._value_rows())
        ba_TKC = self.in_proj_ba(hidden_states)[0].view(-1, self.num_keys, 2 * self.per_key)
        mixed_TKC, gate_TKC = qkvz_TKC.split([self._mixed_width(), self._value_rows()], dim=-1)
        out_TKC = self._mix(mixed_TKC, ba_TKC, packed_seq_params)
        gate = gate_TKC.reshape(-1, self.num_keys * self.per_key, self.value_width)
        out = self._normalize(out_TKC.reshape(gate.shape), gate)
        return self.out_proj(out.flatten(1)[:, None])[0], None

    def _value_rows(self) -> int:
        return self.per_key * self.value_width

    def _mix(self, mixed_TKC: Tensor, ba_TKC: Tensor, packed: PackedSeqParams) -> Tensor:
        """Convolve queries, keys and values, and apply the delta rule: [T, K, R * F]."""
        device = mixed_TKC.device
        sequences = once(packed, "sequences", lambda: PackedSequences.of(packed.cu_seqlens_q, device))
        of_heads: list[Tensor] = [self.conv1d.weight[:, 0], self.A_log, self.dt_bias]
        if self.context == 1:
            return self._apply_rule(mixed_TKC, ba_TKC, of_heads, sequences)
        group = parallel_state.get_context_parallel_group()
        order = once(packed, "order", lambda: gathered_rows(packed.cu_seqlens_q, group.size()).to(device))
        rows = _tokens_for_heads(torch.cat([mixed_TKC, ba_TKC], dim=-1), group)[order]
        mixed, gates = rows.split([mixed_TKC.shape[-1], ba_TKC.shape[-1]], dim=-1)
        own = [each.chunk(group.size())[group.rank()] for each in of_heads]
        out = self._apply_rule(mixed, gates, own, sequences)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return _heads_for_tokens(out[back], group)

    def _apply_rule(self, mixed_TKC: Tensor, ba_TKC: Tensor, of_heads: list[Tensor], where: PackedSequences) -> Tensor:
        """Return the rule's output for whole sequences; of_heads: convolution, A_log and dt_bias of these heads."""
        conv, log_decay, bias = of_heads
        num_tokens, num_keys = mixed_TKC.shape[:2]
        mixed = causal_conv(mixed_TKC.flatten(1), conv, where).view(mixed_TKC.shape)
        query, key, value = mixed.split([self.key_width, self.key_width, self._value_rows()], dim=-1)
        strength, step = (part.flatten(1) for part in ba_TKC.split(self.per_key, dim=-1))
        decay = -log_decay.float().exp() * F.softplus(step.float() + bias)
        query, key = (part.repeat_interleave(self.per_key, dim=1) for part in (query, key))
        value = value.reshape(num_tokens, num_keys * self.per_key, self.value_width)
        out = gated_delta_rule(query, key, value, decay, strength.sigmoid(), where)
        return out.view(num_tokens, num_keys, -1)

    def _normalize(self, out: Tensor, gate: Tensor) -> Tensor:
        """Apply the norm of each head, then the gate: [T, heads, F]."""
        weight: Tensor = self.norm.weight
        if self.tensor > 1:  # every rank has other heads: sum the gradients
            weight = tensor_parallel.copy_to_tensor_model_parallel_region(weight)
        wide = out.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (weight * wide.to(out.dtype) * F.silu(gate.float())).to(out.dtype)


class AddOneRmsNorm(torch.nn.Module):
    """RMSNorm whose weight is stored minus one."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        # with sequence parallelism a rank has a partial gradient of this weight
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., D]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


def _tokens_for_heads(rows_TKC: Tensor, group: Any) -> Tensor:
    """Exchange [own tokens, K, C] for the rows of all ranks, rank by rank, and this rank's part of the heads."""
    parts = torch.stack(rows_TKC.chunk(group.size(), dim=1))
    return tensor_parallel.all_to_all(group, parts).flatten(0, 1)


def _heads_for_tokens(rows_TKC: Tensor, group: Any) -> Tensor:
    """Inverse of `_tokens_for_heads`."""
    parts = rows_TKC.unflatten(0, (group.size(), -1)).contiguous()
    return torch.cat(tensor_parallel.all_to_all(group, parts).unbind(), dim=1)
