"""The experts of a rank."""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false, reportOptionalOperand=false
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


class GroupedExperts(SequentialMLP):
    """The experts of a rank by one grouped matrix product; parameters are those of one expert after the other."""

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor) -> Any:
        """Run each expert on its tokens, which lie one expert after the other; weighted by their probabilities."""
        x, probs = permuted_local_hidden_states, permuted_probs
        if parallel_state.get_expert_tensor_parallel_world_size() > 1 or not len(x):
            return super().forward(x, tokens_per_expert, probs)
        experts: Any = self.local_experts
        gate_up = torch.stack([expert.linear_fc1.weight for expert in experts])
        down = torch.stack([expert.linear_fc2.weight for expert in experts])
        ends = torch.cumsum(tokens_per_expert.to(x.device), 0).to(torch.int32)
        gate, up = F.grouped_mm(x, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        hidden = (F.silu(gate) * up * probs.unsqueeze(-1)).to(x.dtype)
        return F.grouped_mm(hidden, down.transpose(1, 2), offs=ends), None
