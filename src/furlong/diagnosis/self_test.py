"""The self-test of a run's first steps: log-probs of engine and trainer for the same tokens, before any update.

It needs no extra pass: the log-probs are those of the first optimizer step's forward passes. Only if they differ, part
of the batch is run again to find the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from furlong.core.batch import FloatArray, IntArray, RolloutBatch
from furlong.core.metric import Metrics, maximum, mean
from furlong.core.sample import UNKNOWN_VERSION
from furlong.diagnosis.logprob_mismatch import Attribution, attribute, transforms
from furlong.interfaces import SamplingParams, TokenStats

logger = logging.getLogger(__name__)

LOOK_CLOSER = 1e-2  # mean gap per token from which on its cause is determined
SAMPLES = 8  # to run again for that

Look = Callable[[IntArray], TokenStats]  # token stats of these rows, with logits


@dataclass
class LogProbSelfTest:
    """Compares log-probs in the first batch and in the first one sampled entirely after the second weight update.

    Implements `training.worker.SelfTest`. sampling: the engine's sampling parameters. replays_routing: the trainer
    replays the engine's expert choices, which rules out routing as a cause.
    """

    sampling: SamplingParams
    replays_routing: bool = False
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

    def report(self, batch: RolloutBatch, log_probs_R: FloatArray, look: Look | None) -> Metrics:
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
            "forward_logp_max_diff %.3g, mean %.3g, p99 %.3g (rollout %d, %d tokens)",
            largest, average, p99, batch.rollout_id, len(gap),
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
            result = self._attribute(batch, log_probs_R, look)
            causes = ", ".join(f"{name} {share:.0%}" for name, share in result.shares.items() if share)
            logger.info("log-prob gap by cause: %s%s", causes, f" ({result.transform})" if result.transform else "")
            metrics |= {f"selftest/share/{name}": mean(share, average) for name, share in result.shares.items()}
        return metrics

    def _attribute(self, batch: RolloutBatch, log_probs_R: FloatArray, look: Look | None) -> Attribution:
        """Attribute the gap of the first samples."""
        measured = np.add.reduceat(~np.isnan(log_probs_R), batch.response_starts[:-1][batch.response_lengths > 0]) > 0
        rows = np.flatnonzero(batch.response_lengths > 0)[measured][:SAMPLES]
        part = batch.select(rows)
        trainer_R = np.concatenate([log_probs_R[batch.response_starts[i] : batch.response_starts[i + 1]] for i in rows])
        keep = (part.loss_masks > 0) & ~np.isnan(trainer_R)
        versions = part.columns.get("token_versions")
        is_stale = None
        if versions is not None:
            is_stale = ((versions != batch.rollout_id) & (versions != UNKNOWN_VERSION))[keep]

        def flags(name: str) -> np.ndarray | None:
            return part.columns[name][keep] > 0 if name in part.columns else None

        sampling, others, is_rerouted = self.sampling, {}, None
        if look is not None:
            stats = look(rows)
            assert stats.logits_RV is not None
            if stats.rerouted_R is not None and not self.replays_routing:
                is_rerouted = (stats.rerouted_R.nan_to_num().cpu().numpy() > 0)[keep]
            ends, sizes = part.starts[1:], part.response_lengths
            tokens = np.concatenate([part.tokens[end - size : end] for end, size in zip(ends, sizes, strict=True)])
            others = transforms(
                stats.logits_RV[torch.from_numpy(keep)],
                torch.from_numpy(tokens[keep]).long().to(stats.logits_RV.device),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
            )
        return attribute(
            part.columns["rollout_log_probs"][keep].astype(np.float64),
            trainer_R[keep].astype(np.float64),
            is_stale_R=is_stale,
            is_retokenised_R=flags("retokenised"),
            is_rerouted_R=is_rerouted,
            transformed_R=others,
        )
