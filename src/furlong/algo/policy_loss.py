"""Policy losses per response token: clipped ratio (PPO, GRPO, DAPO, GSPO) and clipped weight (CISPO).

R response tokens, S sequences. rho_t = pi(t) / pi_old(t), passed as log-ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.algo.reduce import Reduce, identity, sequence_mean


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of a policy loss.

    `log_ratio_R` is log rho of the token, or of its sequence (`sequence_log_ratio`). Masked tokens are 0 in all
    tensors, so they affect neither the loss nor its gradient. `eps_dual` is c of dual clip, None to disable it.
    """

    log_ratio_R: Tensor
    log_probs_R: Tensor
    advantages_R: Tensor
    eps_low: float
    eps_high: float
    eps_dual: float | None


@dataclass(frozen=True)
class PolicyTerms:
    """Loss of each token, and 1.0 where it was clipped."""

    loss_R: Tensor
    clipped_R: Tensor


def clipped_ratio_loss(inputs: PolicyInputs) -> PolicyTerms:
    """Pessimistic clipped surrogate: max(-rho A, -clip(rho, 1 - low, 1 + high) A) (PPO, arXiv:1707.06347 eq. 7).

    low = high is PPO and GRPO (arXiv:2402.03300 eq. 3); high > low is DAPO's clip-higher (arXiv:2503.14476 eq. 8).
    Dual clip (arXiv:1912.09729 eq. 5) bounds the loss by -c A where A < 0.
    """
    ratio_R = inputs.log_ratio_R.exp()
    plain_R = -ratio_R * inputs.advantages_R
    bounded_R = -ratio_R.clamp(1 - inputs.eps_low, 1 + inputs.eps_high) * inputs.advantages_R
    loss_R = torch.maximum(plain_R, bounded_R)
    if inputs.eps_dual is not None:
        dual_R = torch.minimum(loss_R, -inputs.eps_dual * inputs.advantages_R)
        loss_R = torch.where(inputs.advantages_R < 0, dual_R, loss_R)
    return PolicyTerms(loss_R, (bounded_R > plain_R).detach().to(plain_R.dtype))


def clipped_weight_loss(inputs: PolicyInputs) -> PolicyTerms:
    """-sg(clip(rho, 1 - low, 1 + high)) A log pi (CISPO, MiniMax-M1, arXiv:2506.13585 eq. 4-5).

    Clips the weight, not the loss, so every token has a gradient. The paper has no lower bound (eps_clip >= 1).
    """
    ratio_R = inputs.log_ratio_R.detach().exp()
    weight_R = ratio_R.clamp(1 - inputs.eps_low, 1 + inputs.eps_high)
    loss_R = -weight_R * inputs.advantages_R * inputs.log_probs_R
    return PolicyTerms(loss_R, (weight_R != ratio_R).to(loss_R.dtype))


POLICY_LOSSES: Mapping[str, Callable[[PolicyInputs], PolicyTerms]] = {
    "clipped_ratio": clipped_ratio_loss,
    "clipped_weight": clipped_weight_loss,
}


def sequence_log_ratio(
    log_ratio_R: Tensor, mask_R: Tensor, seq_of_R: Tensor, num_sequences: int, *, reduce: Reduce = identity
) -> Tensor:
    """Return the log of GSPO's length-normalized sequence ratio for each token (arXiv:2507.18071 eq. 7).

    Value: the mean log-ratio of the sequence. Gradient: the token's own, sg(s_i) pi_t / sg(pi_t), which is GSPO-token
    (eq. 14). With one advantage per sequence and equal token weights, loss, clipping and gradient are those of GSPO
    (eq. 5, sec. 4.3). Only values are reduced over tokens, so under context parallelism `reduce` needs no gradient.
    """
    mean_S = sequence_mean(log_ratio_R.detach(), mask_R, seq_of_R, num_sequences, reduce=reduce)
    return mean_S[seq_of_R] + (log_ratio_R - log_ratio_R.detach())
