"""Losses that keep the experts of a layer evenly used, per layer with experts.

Load balancing (Switch Transformer, arXiv:2101.03961, eq. 4; Megatron-LM's normalization), for tokens that are counted
together:

    N / (K T^2) * sum over experts of (tokens that chose it) * (sum of its scores),

where scores are a softmax of the router's logits, or sigmoids that sum to one. It is K^-1 N sum f_i P_i, which is 1 for
experts that are used evenly. Counted together are

- "aux_loss": the tokens of a micro-batch, as in Megatron-LM; so it depends on how samples are packed. Micro-batches
  count by their tokens.
- "seq_aux_loss": the tokens of a sample (DeepSeek-V3, arXiv:2412.19437, eq. 17); the mean over the samples of the step.

The z-loss (ST-MoE, arXiv:2202.08906, eq. 5) is the mean of logsumexp(logits)^2 over the tokens of the step.

Prompt and response count alike. The choice that is counted is the best K by score: no bias, no groups, no replay.

Legend: T tokens that a router sees, N experts, K experts of a token, G sets of tokens that are counted together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from furlong.core.batch import sum_rows

Kind = Literal["none", "aux_loss", "seq_aux_loss"]


@dataclass(frozen=True)
class Balancing:
    """Which losses are added, and how strongly. bias_rate: how far the bias of an expert moves in a step."""

    kind: Kind = "none"
    coeff: float = 0.0
    z_coeff: float = 0.0
    bias_rate: float = 0.0

    @property
    def has_loss(self) -> bool:
        """Whether there is a loss at all."""
        return (self.kind != "none" and self.coeff > 0) or self.z_coeff > 0

    @property
    def is_on(self) -> bool:
        """Whether routers have anything to count."""
        return self.has_loss or self.bias_rate > 0


@dataclass(frozen=True)
class Counted:
    """The tokens of a router's pass: `set_T` says which are counted together, -1 none (padding).

    weight_G: what each set adds to the step's loss; num_tokens: of the whole step.
    """

    set_T: Tensor
    weight_G: Tensor
    num_tokens: int


def load_balancing(
    logits_TN: Tensor,
    counted: Counted,
    *,
    top_k: int,
    is_sigmoid: bool,
    reduce: Callable[[Tensor], Tensor],
) -> Tensor:
    """This rank's part of the load-balancing loss; the parts of the ranks that share the sets add up to it.

    `reduce` sums over those ranks.
    """
    is_real_T = counted.set_T >= 0
    logits_TN, set_T = logits_TN[is_real_T].float(), counted.set_T[is_real_T]
    if is_sigmoid:
        scores_TN = logits_TN.sigmoid()
        scores_TN = scores_TN / (scores_TN.sum(-1, keepdim=True) + 1e-20)
    else:
        scores_TN = logits_TN.softmax(-1)
    num_sets = len(counted.weight_G)
    with torch.no_grad():
        is_chosen_TN = torch.zeros_like(scores_TN).scatter(1, scores_TN.topk(top_k, -1).indices, 1.0)
        counts_GN = reduce(sum_rows(is_chosen_TN, set_T, num_sets))
        tokens_G = counts_GN.sum(1) / top_k
    sums_GN = sum_rows(scores_TN, set_T, num_sets)
    factor_G = counted.weight_G * logits_TN.shape[1] / (top_k * tokens_G.clamp(min=1) ** 2)
    return ((counts_GN * sums_GN).sum(1) * factor_G).sum()


def z_loss(logits_TN: Tensor, counted: Counted) -> Tensor:
    """This rank's part of the z-loss."""
    return logits_TN[counted.set_T >= 0].float().logsumexp(-1).square().sum() / counted.num_tokens


class Attached(torch.autograd.Function):
    """A tensor as it is, in whose backward pass a loss that it does not depend on is taken back, too."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        """Return `output`."""
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of `output` as it came, and 1 for the loss."""
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)
