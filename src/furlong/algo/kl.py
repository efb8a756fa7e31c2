"""Estimators of KL(policy || reference) from one sampled token each (J. Schulman, "Approximating KL divergence").

R response tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
LOW_VAR_BOUND = 10.0


def kl_estimate(log_probs_R: Tensor, ref_log_probs_R: Tensor, kind: KlKind, *, ratio_R: Tensor | None = None) -> Tensor:
    """Estimate the KL of each token, with d = log pi - log pi_ref.

    k1 = d: unbiased, can be negative; as a loss it has a gradient of 0 on average. k2 = d^2 / 2: biased, its gradient
    is the KL's. k3 = exp(-d) + d - 1: unbiased and never negative (GRPO, arXiv:2402.03300 eq. 4). low_var_kl = k3
    clamped to [-10, 10], no gradient beyond.
    `ratio_R` = pi / pi_old weights the estimate where the tokens were sampled from pi_old, which makes value and
    gradient unbiased (DeepSeek-V3.2, arXiv:2512.02556); the gradient flows through the ratio.
    """
    diff_R = log_probs_R - ref_log_probs_R
    match kind:
        case "k1":
            kl_R = diff_R
        case "k2":
            kl_R = diff_R.square() / 2
        case "k3":
            kl_R = _k3(diff_R)
        case "low_var_kl":
            kl_R = _k3(diff_R).clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    return kl_R if ratio_R is None else ratio_R * kl_R


def _k3(diff_R: Tensor) -> Tensor:
    """exp(-d) - 1 + d. Near 0 the terms cancel to rounding noise of either sign, so there it is its Taylor series."""
    series_R = diff_R.square() * (0.5 - diff_R / 6 + diff_R.square() / 24)
    return torch.where(diff_R.abs() < 1e-3, series_R, torch.expm1(-diff_R) + diff_R)
