"""Losses of the policy on a micro-batch: the losses of the algorithms, cross-entropy, and a function of the user.

R response tokens. A loss is a sum of per-token terms times `micro.weight_R`, so the losses of all micro-batches and
ranks of a step add up to the loss of the step. rho_t = pi(t) / pi_old(t), passed as log-ratios.

The metrics `loss` and `pg_loss` are sums: merged over the micro-batches and ranks of a step they are the minimized
value; over steps they are averaged (`reduce.step_mean`). All others are means weighted by `weight_R`, so merging them
in any order over micro-batches, ranks and steps gives the mean over rollouts (or tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from furlong.algo.distillation import top_k_kl
from furlong.algo.log_ratio import (
    bounded_exp,
    importance_weights,
    kl_estimate,
    mismatch_metrics,
    off_policy_mask,
    sequence_log_ratio,
)
from furlong.config.sections import AlgoFlags, OpdFlags
from furlong.core.algorithms import find_algorithm
from furlong.core.batch import MicroBatch
from furlong.core.metric import Metric, Metrics
from furlong.errors import DataError
from furlong.interfaces import HeadOutput, TokenStats

PgReducer = Callable[[Tensor, MicroBatch], Tensor]
CustomLossFn = Callable[[MicroBatch, TokenStats], tuple[Tensor, Metrics]]


class CustomCorrection(Protocol):
    """A user's mismatch correction, which replaces --tis-*.

    Takes the policy loss of each token and the trainer's log-probs before the update (the engine's are
    `micro.columns["rollout_log_probs"]`). Returns the corrected loss, the mask of tokens to keep in the numerator, and
    per-token metrics.
    """

    def __call__(
        self, micro: MicroBatch, *, pg_loss_R: Tensor, train_log_probs_R: Tensor
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Return loss [R], mask [R] and metrics [R] each."""
        ...


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
    ratio_R = bounded_exp(inputs.log_ratio_R)
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
    ratio_R = bounded_exp(inputs.log_ratio_R.detach())
    weight_R = ratio_R.clamp(1 - inputs.eps_low, 1 + inputs.eps_high)
    loss_R = -weight_R * inputs.advantages_R * inputs.log_probs_R
    return PolicyTerms(loss_R, (weight_R != ratio_R).to(loss_R.dtype))


def masked_weight_loss(inputs: PolicyInputs) -> PolicyTerms:
    """-sg(rho) A log pi where 1 - low <= rho <= 1 + high, 0 elsewhere (SAO, arXiv:2607.07508).

    rho is the ratio to the policy that sampled the token. Tokens outside are masked and not clipped.
    """
    ratio_R = bounded_exp(inputs.log_ratio_R.detach())
    is_masked_R = (ratio_R < 1 - inputs.eps_low) | (ratio_R > 1 + inputs.eps_high)
    loss_R = torch.where(is_masked_R, 0.0, -ratio_R * inputs.advantages_R * inputs.log_probs_R)
    return PolicyTerms(loss_R, is_masked_R.to(loss_R.dtype))


POLICY_LOSSES: Mapping[str, Callable[[PolicyInputs], PolicyTerms]] = {
    "clipped_ratio": clipped_ratio_loss,
    "clipped_weight": clipped_weight_loss,
    "masked_weight": masked_weight_loss,
}


class PolicyLoss:
    """Policy gradient loss of the chosen algorithm, with entropy bonus, KL term and corrections.

    Columns of `micro.columns`: `advantages`; `old_log_probs`, by default the live ones, detached, so the ratio is
    exactly 1; `ref_log_probs` with use_kl_loss; `rollout_log_probs` for corrections, for mismatch metrics, and as the
    old policy with use_rollout_logprobs. Raises DataError for a missing column. Values of masked tokens are never used,
    not even multiplied by 0.

    loss = pg_loss - entropy_coef * entropy + kl_loss_coef * kl, each summed with `weight_R`, + positive_nll_coef * the
    negative log-likelihood of samples with a reward above 0, summed with the column `positive_weights`, + opd_kl_coef *
    the reverse KL to a teacher for --opd-loss topk and full (for sampled it is in the advantages).
    """

    needs_logits = False
    needs_entropy = True  # a metric even if it is not in the loss

    def __init__(
        self,
        flags: AlgoFlags,
        *,
        opd: OpdFlags | None = None,
        correction: CustomCorrection | None = None,
        pg_reducer: PgReducer | None = None,
    ) -> None:
        self.flags, self.opd = flags, opd or OpdFlags()
        outputs: dict[str, HeadOutput] = {"topk": "top_log_probs", "full": "teacher_kl"}
        self.head_output = outputs.get(self.opd.opd_loss, "") if self.opd.use_opd else ""
        self.algorithm = find_algorithm(flags.advantage_estimator)
        upper = flags.eps_clip_high
        self.eps_low = flags.eps_clip
        self.eps_high = self.algorithm.upper_clip(flags.eps_clip) if upper is None else upper
        self.correction = tis_correction(flags) if correction is None and flags.use_tis else correction
        self.pg_reducer = pg_reducer
        self.entropy_grad = flags.entropy_coef != 0

    def __call__(self, micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Metrics]:
        """Return the loss of one micro-batch and its metrics, with a single host synchronization."""
        flags = self.flags
        keep_R, weight_R = micro.mask_R > 0, micro.weight_R
        live_R = torch.where(keep_R, stats.log_probs_R, 0.0)
        train_R = micro.columns.get("old_log_probs", stats.log_probs_R.detach())
        old_R = column(micro, "rollout_log_probs") if flags.use_rollout_logprobs else train_R
        log_ratio_R = torch.where(keep_R, live_R - old_R, 0.0)
        pg_R, means = self._policy_terms(micro, live_R, log_ratio_R, keep_R)
        if self.correction is not None:
            pg_R, kept_R, corrected = self.correction(micro, pg_loss_R=pg_R, train_log_probs_R=train_R)
            pg_R = torch.where(kept_R > 0, pg_R, 0.0)
            means |= corrected
        pg_loss = (pg_R * weight_R).sum() if self.pg_reducer is None else self.pg_reducer(pg_R, micro)
        loss, sums = pg_loss, {"pg_loss": pg_loss}
        if stats.entropy_R is not None:
            entropy_R = torch.where(keep_R, stats.entropy_R, 0.0)
            means["entropy_loss"] = entropy_R
            if self.entropy_grad:
                loss = loss - flags.entropy_coef * (entropy_R * weight_R).sum()
        if flags.positive_nll_coef:
            nll = -(live_R * column(micro, "positive_weights")).sum()
            loss = loss + flags.positive_nll_coef * nll
            sums["positive_nll"] = nll
        if flags.use_kl_loss:
            ref_R = torch.where(keep_R, column(micro, "ref_log_probs"), 0.0)
            ratio_R = bounded_exp(log_ratio_R) if flags.use_unbiased_kl else None
            kl_R = kl_estimate(live_R, ref_R, flags.kl_loss_type, ratio_R=ratio_R)
            means["kl_loss"] = kl_R
            if flags.kl_loss_coef != 0:
                loss = loss + flags.kl_loss_coef * (kl_R * weight_R).sum()
        if self.opd.use_opd:
            means |= self._distillation(micro, stats, keep_R)
            if self.head_output:
                loss = loss + self.opd.opd_kl_coef * (means["opd_reverse_kl"] * weight_R).sum()
        if (rollout_R := micro.columns.get("rollout_log_probs")) is not None:
            means |= mismatch_metrics(train_R, rollout_R, micro.mask_R)
        return loss, loss_metrics(sums={"loss": loss} | sums, means_R=means, weight_R=weight_R)

    def _policy_terms(
        self, micro: MicroBatch, live_R: Tensor, log_ratio_R: Tensor, keep_R: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_R = torch.where(keep_R, column(micro, "advantages"), 0.0)
        token_log_ratio_R = log_ratio_R
        if self.algorithm.sequence_level:
            log_ratio_R = sequence_log_ratio(log_ratio_R, micro.mask_R, micro.seq_of_R, micro.num_sequences)
        terms = POLICY_LOSSES[self.algorithm.policy](
            PolicyInputs(log_ratio_R, live_R, advantages_R, self.eps_low, self.eps_high, self.flags.eps_clip_c)
        )
        metrics = {"pg_clipfrac": terms.clipped_R, "ppo_kl": -log_ratio_R, "ois": bounded_exp(log_ratio_R.detach())}
        if not self.flags.use_opsm:
            return terms.loss_R, metrics
        sequences = micro.mask_R, micro.seq_of_R, micro.num_sequences
        dropped_R = off_policy_mask(token_log_ratio_R, advantages_R, *sequences, delta=self.flags.opsm_delta)
        metrics["opsm_clipfrac"] = dropped_R
        return torch.where(dropped_R > 0, 0.0, terms.loss_R), metrics

    def _distillation(self, micro: MicroBatch, stats: TokenStats, keep_R: Tensor) -> dict[str, Tensor]:
        """Return the reverse KL to the teacher of each token, and the probability of the tokens that it compares."""
        if self.opd.opd_loss == "sampled":
            return {"opd_reverse_kl": column(micro, "opd_reverse_kl")}
        if self.opd.opd_loss == "full":
            if stats.teacher_kl_R is None:
                raise DataError("--opd-loss full needs the teacher in the trainer; give --opd-teacher-load")
            return {"opd_reverse_kl": torch.where(keep_R, stats.teacher_kl_R, 0.0)}
        teacher_RK = column(micro, "teacher_top_log_probs")
        assert stats.top_log_probs_RK is not None  # `head_output`
        if (is_aligned_R := micro.columns.get("teacher_mask")) is not None:
            keep_R = keep_R & (is_aligned_R > 0)
        return {
            "opd_reverse_kl": top_k_kl(stats.top_log_probs_RK, teacher_RK, keep_R),
            "opd_topk_mass_student": stats.top_log_probs_RK.exp().sum(-1),
            "opd_topk_mass_teacher": teacher_RK.exp().sum(-1),
        }


def tis_correction(flags: AlgoFlags) -> CustomCorrection:
    """Build the correction of the `--tis-*` flags."""

    def correct(
        micro: MicroBatch, *, pg_loss_R: Tensor, train_log_probs_R: Tensor
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        rollout_R, sequences = column(micro, "rollout_log_probs"), (micro.mask_R, micro.seq_of_R, micro.num_sequences)
        tis_R, metrics = importance_weights(flags, train_log_probs_R, rollout_R, *sequences)
        return pg_loss_R * tis_R, micro.mask_R, metrics

    return correct


def metrics_only(correction: CustomCorrection) -> CustomCorrection:
    """Report the metrics of a correction without applying it (--get-mismatch-metrics)."""

    def observe(
        micro: MicroBatch, *, pg_loss_R: Tensor, train_log_probs_R: Tensor
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        _, _, metrics = correction(micro, pg_loss_R=pg_loss_R.detach(), train_log_probs_R=train_log_probs_R)
        return pg_loss_R, micro.mask_R, metrics

    return observe


class SftLoss:
    """Negative log-likelihood of the unmasked response tokens, summed with `weight_R`."""

    needs_logits = False
    needs_entropy = False
    entropy_grad = False

    def __call__(self, micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Metrics]:
        """Return the loss of one micro-batch; metric `loss` is a sum, `nll` its mean over weights."""
        nll_R = torch.where(micro.mask_R > 0, -stats.log_probs_R, 0.0)
        loss = (nll_R * micro.weight_R).sum()
        return loss, loss_metrics(sums={"loss": loss}, means_R={"nll": nll_R}, weight_R=micro.weight_R)


class CustomLoss:
    """A user's loss function as a LossFn. It must weight tokens with `micro.weight_R`."""

    def __init__(
        self, fn: CustomLossFn, *, needs_entropy: bool = False, entropy_grad: bool = False, needs_logits: bool = False
    ) -> None:
        self.fn = fn
        self.needs_entropy = needs_entropy
        self.entropy_grad = entropy_grad
        self.needs_logits = needs_logits

    def __call__(self, micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Metrics]:
        """Call the function and add a `loss` metric if it returns none."""
        loss, metrics = self.fn(micro, stats)
        if "loss" not in metrics:
            metrics = {**loss_metrics(sums={"loss": loss}, means_R={}, weight_R=micro.weight_R), **metrics}
        return loss, metrics


def column(micro: MicroBatch, name: str) -> Tensor:
    """Return a per-token column. Raises DataError if the micro-batch does not have it."""
    try:
        return micro.columns[name]
    except KeyError:
        raise DataError(
            f"the loss needs the per-token column {name}, but the micro-batch has {sorted(micro.columns)}; "
            "rollout_log_probs come from the engine, the others from the trainer's log-prob passes"
        ) from None


def loss_metrics(*, sums: Mapping[str, Tensor], means_R: Mapping[str, Tensor], weight_R: Tensor) -> Metrics:
    """Return metrics: `sums`, and means with `weight_R` of `means_R`, all fetched with one device-to-host copy."""
    with torch.no_grad():
        totals = [weight_R.sum(), *sums.values()]
        if means_R:
            table_MR = torch.stack([m.to(weight_R.dtype) for m in means_R.values()])
            table_MR = torch.where(weight_R != 0, table_MR, 0.0)  # masked tokens may have any value
            totals.extend((table_MR @ weight_R).unbind())
        weight, *values = torch.stack([t.to(torch.float64) for t in totals]).tolist()
    result: Metrics = {k: Metric(v, 1.0, "sum") for k, v in zip(sums, values[: len(sums)], strict=True)}
    result |= {k: Metric(v, weight, "mean") for k, v in zip(means_R, values[len(sums) :], strict=True)}
    return result
