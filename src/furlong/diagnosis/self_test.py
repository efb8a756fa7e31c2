"""The self-test of a run's first steps: log-probs of engine and trainer for the same tokens, before any update.

It needs no extra pass: the log-probs are those of the first optimizer step's forward passes. Only if they differ, part
of the batch is run again to attribute the gap on each token to one cause.

Axes: R trained response tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.core.batch import FloatArray, IntArray, RolloutBatch
from furlong.core.metric import Metrics, maximum, mean
from furlong.core.sample import UNKNOWN_VERSION
from furlong.interfaces import SamplingParams, TokenStats

Cause = Literal[
    "stale_version", "sampling_transform", "flat", "shifted", "quantization", "routing", "numerics", "unexplained"
]  # fmt: skip
CAUSES: tuple[Cause, ...] = get_args(Cause)
FLOOR = 1e-4  # smaller gaps are float noise and ignored
EXPLAINED = 0.2  # a transform explains a gap if at most this part of it remains
FLAT_TOKENS = 8  # at least; no policy finds that many equally likely
FITTED_TOKENS = 32  # at least, for another temperature: one of ten fits a few tokens by chance
# That the engine may have sampled with.
TEMPERATURES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
LOOK_CLOSER = 1e-2  # mean gap per token from which on its cause is determined
SAMPLES = 8  # to run again for that
BF16_ROUNDING = 2.0**-8  # relative rounding error of bfloat16
# Mean gap over that of one rounding (see `rounding_limit`) with engine and trainer in bfloat16: 2.4 to 5.1 in 40
# settings of dense models (random ones of 32 to 1,024 wide, several families and scales, temperatures from 0.1 to 1.5),
# up to 7.6 with experts.
ROUNDINGS = 8.0


@dataclass(frozen=True)
class Attribution:
    """Shares of the total gap by cause, which sum to 1 (empty without a gap), and the transform that explains one.

    rounding_limit: that of the function; 0 if engine and trainer do not both compute in bfloat16.
    """

    shares: Mapping[Cause, float]
    transform: str = ""
    rounding_limit: float = 0.0


def attribute(
    engine_R: Floats,
    trainer_R: Floats,
    *,
    is_stale_R: Flags | None = None,
    is_rerouted_R: Flags | None = None,
    quantized_R: Floats | None = None,
    transformed_R: Mapping[str, Floats] | None = None,
    shifted_R: Sequence[Floats] = (),
    rounding_limit: float = 0.0,
) -> Attribution:
    """Attribute each token's gap to the first cause that applies, in the order of `CAUSES`.

    A token is stale if older weights sampled it, and rerouted if trainer and engine chose different experts.
    `transformed_R` has the trainer's log-probs under other sampling parameters: the closest one applies if it explains
    most of the remaining gap. Log-probs are flat if all tokens have the same, and shifted if those of the neighbors,
    `shifted_R` (nan without one), explain most of the gap. `quantized_R` has the trainer's log-probs
    with the engine's quantized weights: quantization applies where they explain most of the gap. The rest is numerics
    if its mean is at most `rounding_limit`, which bfloat16 explains, and otherwise unexplained.
    """
    gap_R = np.abs(engine_R - trainer_R)
    gap_R = np.where(gap_R < FLOOR, 0.0, gap_R)
    if not (total := float(gap_R.sum())):
        return Attribution({})
    none_R = np.zeros(len(gap_R), np.bool_)
    left_R = np.ones(len(gap_R), np.bool_)
    shares: dict[Cause, float] = {}

    def take(cause: Cause, which_R: Flags) -> None:
        nonlocal left_R
        shares[cause] = float(gap_R[which_R & left_R].sum()) / total
        left_R = left_R & ~which_R

    take("stale_version", none_R if is_stale_R is None else is_stale_R)
    name, is_transformed_R = _best_transform(engine_R, gap_R, left_R, transformed_R or {})
    take("sampling_transform", is_transformed_R)
    take("flat", ~none_R if len(engine_R) >= FLAT_TOKENS and np.ptp(engine_R) < FLOOR else none_R)
    rests = [np.abs(engine_R - neighbor_R)[left_R] for neighbor_R in shifted_R if len(engine_R) >= FITTED_TOKENS]
    known = [~np.isnan(rest) for rest in rests]
    limits = [EXPLAINED * gap_R[left_R][is_known].sum() for is_known in known]
    is_shifted = any(rest[k].sum() < limit for rest, k, limit in zip(rests, known, limits, strict=True))
    take("shifted", ~none_R if is_shifted else none_R)
    is_explained_R = none_R if quantized_R is None else np.abs(engine_R - quantized_R) <= EXPLAINED * gap_R
    take("quantization", is_explained_R)
    take("routing", none_R if is_rerouted_R is None else is_rerouted_R)
    is_rounding = bool(left_R.any()) and float(gap_R[left_R].mean()) <= rounding_limit
    take("numerics", ~none_R if is_rounding else none_R)
    take("unexplained", ~none_R)
    return Attribution(shares, name, rounding_limit)


def _best_transform(
    engine_R: Floats, gap_R: Floats, left_R: Flags, transformed_R: Mapping[str, Floats]
) -> tuple[str, Flags]:
    if len(engine_R) < FITTED_TOKENS:
        return "", np.zeros(len(gap_R), np.bool_)
    before = float(gap_R[left_R].sum())
    best, name = EXPLAINED * before, ""
    for candidate, values_R in transformed_R.items():
        rest = float(np.abs(engine_R - values_R)[left_R].sum())
        if rest < best:
            best, name = rest, candidate
    if not name:
        return "", np.zeros(len(gap_R), np.bool_)
    return name, np.abs(engine_R - transformed_R[name]) <= EXPLAINED * gap_R


def transforms(logits_RV: Tensor, tokens_R: Tensor, sampling: SamplingParams) -> dict[str, Floats]:
    """Compute log-probs of `tokens_R` under other sampling parameters, by name of the transform.

    These are other temperatures, and the distribution after top-k, top-p and min-p if enabled (a token outside of it
    keeps its plain log-prob). `logits_RV` are the trainer's, divided by the temperature.
    """
    temperature = sampling.temperature
    logits_RV = logits_RV.double()
    index_R1 = tokens_R[:, None]
    transformed: dict[str, Floats] = {}
    for other in TEMPERATURES:
        if abs(other - temperature) > 1e-6:
            scaled_RV = (logits_RV * (temperature / other)).log_softmax(-1)
            transformed[f"temperature {other:g}"] = scaled_RV.gather(1, index_R1)[:, 0].cpu().numpy()
    if sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
        plain_RV = logits_RV.log_softmax(-1)
        ordered_RV, order_RV = plain_RV.exp().sort(-1, descending=True)
        kept_RV = (ordered_RV.cumsum(-1) - ordered_RV) < sampling.top_p
        if sampling.top_k > 0:
            kept_RV[:, sampling.top_k :] = False
        kept_RV &= ordered_RV >= sampling.min_p * ordered_RV[:, :1]
        kept_RV = torch.zeros_like(kept_RV).scatter(1, order_RV, kept_RV)
        cut_R = plain_RV.masked_fill(~kept_RV, -torch.inf).log_softmax(-1).gather(1, index_R1)[:, 0]
        is_in_R = kept_RV.gather(1, index_R1)[:, 0]
        transformed["after top-p, top-k, min-p"] = (
            torch.where(is_in_R, cut_R, plain_RV.gather(1, index_R1)[:, 0]).cpu().numpy()
        )
    return transformed


def rounding_limit(logits_RV: Tensor, tokens_R: Tensor) -> float:
    """Return the mean gap per token that bfloat16 can explain, from the trainer's logits, divided by the temperature.

    It is `ROUNDINGS` times the mean change of a token's log-prob if each logit changes by one rounding of the logits'
    standard deviation: the errors of two passes over the same weights have this order. Large logits (low temperatures,
    peaked models) give large gaps; tokens with a probability near 1 hardly change.
    """
    logits_RV = logits_RV.double()
    probs_RV = logits_RV.softmax(-1)
    chosen_R = probs_RV.gather(1, tokens_R[:, None])[:, 0]
    moved_R = (1 - 2 * chosen_R + probs_RV.square().sum(-1)).clamp(min=0).sqrt()
    return ROUNDINGS * float((BF16_ROUNDING * logits_RV.std(-1) * moved_R).mean())


logger = logging.getLogger(__name__)


Look = Callable[[IntArray], TokenStats]  # token stats of these rows, with logits
LookQuantized = Callable[[IntArray], Tensor | None]  # log-probs of these rows with the engine's quantized values


@dataclass
class LogProbSelfTest:
    """Compares log-probs in the first batch and in the first one sampled entirely after the second weight update.

    Implements `training.worker.SelfTest`. sampling: the engine's sampling parameters. replays_routing: the trainer
    replays the engine's expert choices, which rules out routing as a cause. is_bfloat16: engine and trainer both
    compute in bfloat16.
    """

    sampling: SamplingParams
    replays_routing: bool = False
    is_bfloat16: bool = False
    first_version: int | None = None
    is_done: bool = False

    def due(self, batch: RolloutBatch) -> bool:
        """Whether this batch is one of the two. Batches without the engine's log-probs are skipped."""
        if self.is_done or "rollout_log_probs" not in batch.columns or not batch.loss_masks.any():
            return False
        oldest = self._oldest(batch)
        if self.first_version is None:
            self.first_version = oldest
            return True
        self.is_done = oldest > self.first_version
        return self.is_done

    def _oldest(self, batch: RolloutBatch) -> int:
        versions = batch.columns.get("token_versions")
        known = versions[versions > UNKNOWN_VERSION] if versions is not None else np.zeros(0)
        return int(known.min()) if known.size else batch.rollout_id

    def report(
        self,
        batch: RolloutBatch,
        log_probs_R: FloatArray,
        look: Look | None,
        look_quantized: LookQuantized | None = None,
    ) -> Metrics:
        """Compare and return `selftest/logp_*_diff`, `selftest/ref_kl`, and `selftest/share/<cause>` if there is a gap.

        `log_probs_R` are the trainer's before the first optimizer step, nan for tokens that the step does not include.
        """
        where = np.flatnonzero((batch.loss_masks > 0) & ~np.isnan(log_probs_R))
        if not where.size:
            return {}
        trainer, engine = log_probs_R[where].astype(np.float64), batch.columns["rollout_log_probs"][where]
        gap = np.abs(trainer - engine)
        largest, average, p99 = float(gap.max()), float(gap.mean()), float(np.percentile(gap, 99))
        logger.info(
            "log-probs of engine and trainer %s: forward_logp_max_diff %.3g nats, mean %.3g, p99 %.3g (rollout %d, "
            "%d tokens)",
            "differ" if average > LOOK_CLOSER else "agree", largest, average, p99, batch.rollout_id, len(gap),
        )  # fmt: skip
        metrics = {
            "selftest/logp_max_diff": maximum(largest),
            "selftest/logp_mean_diff": mean(average, len(gap)),
            "selftest/logp_p99_diff": mean(p99, len(gap)),
        }
        if (ref := batch.columns.get("ref_log_probs")) is not None and not self.is_done:
            difference = ref[where] - trainer
            metrics["selftest/ref_kl"] = mean(float(np.mean(np.expm1(difference) - difference)), len(gap))
        if average > LOOK_CLOSER:
            result = self._attribute(batch, log_probs_R, look, look_quantized)
            causes = ", ".join(f"{name} {share:.0%}" for name, share in result.shares.items() if share)
            logger.info("log-prob gap by cause: %s%s", causes, f" ({result.transform})" if result.transform else "")
            metrics |= {f"selftest/share/{name}": mean(share, average) for name, share in result.shares.items()}
            if result.rounding_limit:
                metrics["selftest/logp_rounding_limit"] = mean(result.rounding_limit)
        return metrics

    def _attribute(
        self, batch: RolloutBatch, log_probs_R: FloatArray, look: Look | None, look_quantized: LookQuantized | None
    ) -> Attribution:
        """Attribute the gap of the first samples: eight, or more until they have the tokens that a fit needs."""
        measured = np.add.reduceat(~np.isnan(log_probs_R), batch.response_starts[:-1][batch.response_lengths > 0]) > 0
        rows = np.flatnonzero(batch.response_lengths > 0)[measured]
        enough = int(np.searchsorted(batch.response_lengths[rows].cumsum(), FITTED_TOKENS)) + 1
        rows = rows[: max(SAMPLES, enough)]
        part = batch.select(rows)
        trainer_R = np.concatenate([log_probs_R[batch.response_starts[i] : batch.response_starts[i + 1]] for i in rows])
        keep = (part.loss_masks > 0) & ~np.isnan(trainer_R)
        versions = part.columns.get("token_versions")
        is_stale = None
        if versions is not None:
            is_stale = ((versions != batch.rollout_id) & (versions != UNKNOWN_VERSION))[keep]

        sizes = part.response_lengths
        others, is_rerouted, limit = dict[str, Floats](), None, 0.0
        if look is not None:
            stats = look(rows)
            assert stats.logits_RV is not None
            if stats.rerouted_R is not None and not self.replays_routing:
                is_rerouted = (stats.rerouted_R.nan_to_num().cpu().numpy() > 0)[keep]
            ends = part.starts[1:]
            tokens = np.concatenate([part.tokens[end - size : end] for end, size in zip(ends, sizes, strict=True)])
            logits_RV = stats.logits_RV[torch.from_numpy(keep)]
            tokens_R = torch.from_numpy(tokens[keep]).long().to(logits_RV.device)
            if self.is_bfloat16:
                limit = rounding_limit(logits_RV, tokens_R)
            others = transforms(logits_RV, tokens_R, self.sampling)
        quantized_R = None if look_quantized is None else look_quantized(rows)
        padded = [
            np.pad(each.astype(np.float64), 1, constant_values=np.nan)
            for each in np.split(trainer_R, np.cumsum(sizes)[:-1])
        ]
        shifted = [np.concatenate([each[side : len(each) - 2 + side] for each in padded]) for side in (0, 2)]
        return attribute(
            part.columns["rollout_log_probs"][keep].astype(np.float64),
            trainer_R[keep].astype(np.float64),
            is_stale_R=is_stale,
            is_rerouted_R=is_rerouted,
            quantized_R=None if quantized_R is None else quantized_R.double().cpu().numpy()[keep],
            transformed_R=others,
            shifted_R=[each[keep] for each in shifted],
            rounding_limit=limit,
        )
