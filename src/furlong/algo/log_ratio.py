"""Functions of the log-ratio of two policies: KL estimates, corrections for off-policy tokens, the ratio of a sequence.

R response tokens, S sequences. Sampling policy (engine) and trainer differ in kernels, precision and routing, so their
ratio w = pi_train / pi_rollout, both before the update, is not 1 even on-policy. Corrections change only the numerator
of the loss; its denominator is that of the original mask.

| known as | level | mode |
|---|---|---|
| TIS (truncated importance sampling, Yao et al. 2025) | token | truncate |
| slime's --use-tis | token | clip |
| IcePop (Ling team 2025) | token | mask |
| MIS (masked importance sampling, Liu et al. 2025) | sequence or geometric | mask |
| slime's mis.py | --tis-level, and --rs-level of --use-rs | any, with rejection |
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from furlong.algo.reduce import sequence_mean
from furlong.config.sections import AlgoFlags
from furlong.core.batch import sum_rows

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]

LOW_VAR_BOUND = 10.0
MIN_MEAN_WEIGHT = 1e-8  # below it, --tis-batch-normalize leaves the weights as they are
LOG_RATIO_BOUND = 20.0  # exp(20) is far beyond every useful clip, and far from overflow


def bounded_exp(log_ratio_R: Tensor) -> Tensor:
    """Return the ratio for a log-ratio limited to [-20, 20], without gradient beyond.

    An unlimited one overflows in float32 at 88, and infinity times an advantage or a gradient of 0 is NaN.
    """
    return log_ratio_R.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def kl_estimate(log_probs_R: Tensor, ref_log_probs_R: Tensor, kind: KlKind, *, ratio_R: Tensor | None = None) -> Tensor:
    """Estimate KL(policy || reference) from one sampled token each (J. Schulman, "Approximating KL divergence").

    With d = log pi - log pi_ref:
    k1 = d: unbiased, can be negative; as a loss it has a gradient of 0 on average. k2 = d^2 / 2: biased, its gradient
    is the KL's. k3 = exp(-d) + d - 1: unbiased and never negative (GRPO, arXiv:2402.03300 eq. 4), for d limited to
    [-20, 20]. low_var_kl = k3 clamped to [-10, 10], no gradient beyond.
    `ratio_R` = pi / pi_old weights the estimate where the tokens were sampled from pi_old, which makes value and
    gradient unbiased (DeepSeek-V3.2, arXiv:2512.02556); the gradient flows through the ratio. low_var_kl clamps the
    weighted estimate.
    """
    diff_R = log_probs_R - ref_log_probs_R
    match kind:
        case "k1":
            kl_R = diff_R
        case "k2":
            kl_R = diff_R.square() / 2
        case "k3" | "low_var_kl":
            kl_R = _k3(diff_R.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    if ratio_R is not None:
        kl_R = ratio_R * kl_R
    return kl_R.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else kl_R


def _k3(diff_R: Tensor) -> Tensor:
    """exp(-d) - 1 + d. Near 0 the terms cancel to rounding noise of either sign, so there it is its Taylor series."""
    series_R = diff_R.square() * (0.5 - diff_R / 6 + diff_R.square() / 24)
    return torch.where(diff_R.abs() < 1e-3, series_R, torch.expm1(-diff_R) + diff_R)


def sequence_log_ratio(log_ratio_R: Tensor, mask_R: Tensor, seq_of_R: Tensor, num_sequences: int) -> Tensor:
    """Return the log of GSPO's length-normalized sequence ratio for each token (arXiv:2507.18071 eq. 7).

    Value: the mean log-ratio of the sequence. Gradient: the token's own, sg(s_i) pi_t / sg(pi_t), which is GSPO-token
    (eq. 14). With one advantage per sequence and equal token weights, loss, clipping and gradient are those of GSPO
    (eq. 5, sec. 4.3).
    """
    mean_S = sequence_mean(log_ratio_R.detach(), mask_R, seq_of_R, num_sequences)
    return mean_S[seq_of_R] + (log_ratio_R - log_ratio_R.detach())


def importance_weights(
    flags: AlgoFlags,
    train_log_probs_R: Tensor,
    rollout_log_probs_R: Tensor,
    mask_R: Tensor,
    seq_of_R: Tensor,
    num_sequences: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weight of each token's policy loss by the `--tis-*` flags, without gradient, and per-token metrics.

    The weight is a bounded w: the token's ratio, or the product or geometric mean over its sequence. Outside the
    bounds, "truncate" limits above only, "clip" on both sides, "mask" gives weight 0 (rejection). A sequence with a
    token ratio below --tis-veto gets weight 0, and so do tokens whose w at --rs-level is outside of the bounds of
    --use-rs. --tis-batch-normalize divides the weights by their mean over the micro-batch, taken before rejection.
    Metrics: `tis` the unbounded weight, `tis_clipfrac` tokens changed by a bound or rejected, `tis_abs` |w - 1|,
    `tis_vetofrac` tokens of vetoed sequences, `rs_frac` tokens rejected by --use-rs, `tis_mean` the divisor.
    """
    low, high, sequences = flags.tis_clip_low, flags.tis_clip, (mask_R, seq_of_R, num_sequences)
    keep_R = mask_R > 0
    diff_R = torch.where(keep_R, train_log_probs_R.detach() - rollout_log_probs_R.detach(), 0.0)
    raw_R = bounded_exp(_at_level(diff_R, flags.tis_level, *sequences))
    rejected_R = torch.zeros_like(keep_R)
    match flags.tis_mode:
        case "truncate":
            weight_R = raw_R.clamp_max(high)
        case "clip":
            weight_R = raw_R.clamp(low, high)
        case "mask":
            weight_R, rejected_R = raw_R, (raw_R < low) | (raw_R > high)
    metrics = {"tis": raw_R, "tis_abs": (raw_R - 1).abs()}
    if flags.use_rs:
        low, high = flags.rejection_bounds
        ratio_R = bounded_exp(_at_level(diff_R, flags.rs_level, *sequences))
        outside_R = (ratio_R < low) | (ratio_R > high)
        rejected_R = rejected_R | outside_R
        metrics["rs_frac"] = outside_R.to(raw_R.dtype)
    if flags.tis_veto is not None:
        bad_R = (keep_R & (diff_R.exp() < flags.tis_veto)).to(raw_R.dtype)
        vetoed_R = sum_rows(bad_R, seq_of_R, num_sequences)[seq_of_R] > 0
        rejected_R = rejected_R | vetoed_R
        metrics["tis_vetofrac"] = vetoed_R.to(raw_R.dtype)
    metrics["tis_clipfrac"] = (rejected_R | (weight_R != raw_R)).to(raw_R.dtype)
    if flags.tis_batch_normalize:
        mean = _mean_weight(weight_R, flags.tis_level, *sequences)
        weight_R = weight_R / mean
        metrics["tis_mean"] = mean.expand_as(weight_R)
    return torch.where(rejected_R, 0.0, weight_R), metrics


def _at_level(log_w_R: Tensor, level: str, mask_R: Tensor, seq_of_R: Tensor, num_sequences: int) -> Tensor:
    """Return log w of each token, or of its sequence: the sum or the mean of its tokens' (0 where masked)."""
    if level == "sequence":
        return sum_rows(log_w_R, seq_of_R, num_sequences)[seq_of_R]
    if level == "geometric":
        return sequence_mean(log_w_R, mask_R, seq_of_R, num_sequences)[seq_of_R]
    return log_w_R


def _mean_weight(weight_R: Tensor, level: str, mask_R: Tensor, seq_of_R: Tensor, num_sequences: int) -> Tensor:
    """Return the mean over unmasked tokens or, at sequence level, over sequences; 1 if it is near 0."""
    if level == "token":
        mean = (weight_R * mask_R).sum() / mask_R.sum().clamp_min(1)
    else:
        mean = sequence_mean(weight_R, mask_R, seq_of_R, num_sequences).mean()
    return torch.where(mean > MIN_MEAN_WEIGHT, mean, torch.ones_like(mean))


def mismatch_metrics(train_log_probs_R: Tensor, rollout_log_probs_R: Tensor, mask_R: Tensor) -> dict[str, Tensor]:
    """Return the absolute log-prob difference of trainer and engine, and k3 of KL(rollout || train), each [R].

    The tokens are samples of the engine's policy, so with w = pi_train / pi_rollout the k3 is w - 1 - log w.
    """
    keep_R = mask_R > 0
    rollout_R = torch.where(keep_R, rollout_log_probs_R.detach(), 0.0)
    train_R = torch.where(keep_R, train_log_probs_R.detach(), 0.0)
    return {
        "train_rollout_logprob_abs_diff": (train_R - rollout_R).abs(),
        "train_rollout_kl": kl_estimate(rollout_R, train_R, "k3"),
    }


def off_policy_mask(
    log_ratio_R: Tensor, advantages_R: Tensor, mask_R: Tensor, seq_of_R: Tensor, num_sequences: int, *, delta: float
) -> Tensor:
    """Return 1.0 for tokens to mask: A < 0 in a sequence whose mean log(pi_old / pi) exceeds `delta`, [R].

    Off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556 sec. 3.1). `log_ratio_R` is log(pi / pi_old).
    """
    drift_S = sequence_mean(-log_ratio_R.detach(), mask_R, seq_of_R, num_sequences)
    return ((advantages_R < 0) & (drift_S[seq_of_R] > delta)).to(log_ratio_R.dtype)
