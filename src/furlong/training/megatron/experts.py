"""The experts of a rank."""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false, reportOptionalOperand=false
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Experts(SequentialMLP):
    """The experts of a rank, in bfloat16 by one grouped matrix product; parameters are one expert's after another's."""

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor) -> Any:
        """Run each expert on its tokens, which lie one expert after the other; weighted by their probabilities."""
        x, probs_T1 = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if parallel_state.get_expert_tensor_parallel_world_size() > 1:
            return super().forward(x, tokens_per_expert, permuted_probs)
        counts = tokens_per_expert.tolist()
        gate, up = self._linear("linear_fc1", x, counts).chunk(2, dim=-1)
        hidden = (gated(gate, up, self.config) * probs_T1).to(x.dtype)
        return self._linear("linear_fc2", hidden, counts, probs_T1), None

    def _linear(self, name: str, x: Tensor, counts: list[int], weight_T1: Tensor | None = None) -> Tensor:
        """Each token through the linear layer of its expert; the bias is multiplied with `weight_T1`."""
        layers: list[Any] = [getattr(expert, name) for expert in self.local_experts]
        sizes = torch.tensor(counts, device=x.device)
        if self.config.moe_grouped_gemm and len(x):
            weights = torch.stack([layer.weight for layer in layers]).transpose(1, 2)
            out = F.grouped_mm(x, weights, offs=sizes.cumsum(0).to(torch.int32))
        else:
            parts = zip(layers, x.split(counts), strict=True)
            out = torch.cat([F.linear(part, layer.weight) for layer, part in parts])
        if layers[0].bias is None:
            return out
        bias = torch.stack([layer.bias for layer in layers]).repeat_interleave(sizes, dim=0)
        return out + (bias if weight_T1 is None else (bias * weight_T1).to(out.dtype))


def gated(gate: Tensor, up: Tensor, config: TransformerConfig) -> Tensor:
    """SwiGLU; of gpt-oss with limits, and one added to what the gate is for, as Megatron-core's MLP has it."""
    if (limit := config.activation_func_clamp_value) is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return config.activation_func(gate) * (up + config.glu_linear_offset)
