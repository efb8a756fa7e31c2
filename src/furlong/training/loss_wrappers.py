"""The outputs that a loss needs from the forward pass, and a loss that records them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from furlong.core.batch import FloatArray, IntArray, MicroBatch, RolloutBatch
from furlong.core.metric import Metric, Metrics
from furlong.interfaces import HeadOutput, LossFn, TokenStats

HEAD_OUTPUTS: dict[HeadOutput, str] = {  # and the field of TokenStats
    "top_ids": "top_ids_RK",
    "top_log_probs": "top_log_probs_RK",
    "hidden": "hidden_RD",
    "teacher_kl": "teacher_kl_R",
}


@dataclass(frozen=True)
class StatsRequest:
    """Outputs of a forward pass per response token, in addition to the log-prob.

    entropy_grad: the entropy needs a gradient. head: what else the head computes; top_k: for "top_ids".
    """

    entropy: bool = False
    entropy_grad: bool = False
    logits: bool = False
    head: HeadOutput = ""
    top_k: int = 0

    @staticmethod
    def of(loss: LossFn) -> StatsRequest:
        """Return what `loss` reads."""
        head: HeadOutput = getattr(loss, "head_output", "")
        return StatsRequest(loss.needs_entropy, loss.entropy_grad, loss.needs_logits, head)


class LossRecorder:
    """`loss`, recording the stats of each micro-batch; without a loss, 0 without gradient, and the logits as well.

    keeps_tokens: record log-probs and entropies. reports_log_probs: add the live log-probs to the metrics, for rounds
    without a log-prob pass before the step.
    """

    def __init__(self, loss: LossFn | None = None) -> None:
        self.loss = loss
        self.needs_entropy = loss is not None and loss.needs_entropy
        self.entropy_grad = loss is not None and loss.entropy_grad
        self.needs_logits = loss is None or loss.needs_logits
        self.head_output: HeadOutput = getattr(loss, "head_output", "")
        self.keeps_tokens, self.reports_log_probs = loss is None, False
        self._parts: list[tuple[IntArray, TokenStats]] = []

    def __call__(self, micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Metrics]:
        """Return the loss, with `rollout/log_probs` among its metrics if asked."""
        if self.keeps_tokens:
            entropy_R = None if stats.entropy_R is None else stats.entropy_R.detach()
            logits_RV = None if self.loss is not None or stats.logits_RV is None else stats.logits_RV.detach()
            kept = TokenStats(stats.log_probs_R.detach(), entropy_R, logits_RV, rerouted_R=stats.rerouted_R)
            self._parts.append((micro.rows, kept))
        if self.loss is None:
            return stats.log_probs_R.new_zeros(()), {}
        loss, metrics = self.loss(micro, stats)
        if self.reports_log_probs:
            live_R = torch.where(micro.mask_R > 0, stats.log_probs_R.detach(), 0.0)
            weight, log_prob = torch.stack([micro.weight_R.sum(), (live_R * micro.weight_R).sum().float()]).tolist()
            metrics["rollout/log_probs"] = Metric(log_prob, weight)
        return loss, metrics

    @property
    def last(self) -> TokenStats:
        """The stats that were recorded last."""
        return self._parts[-1][1]

    def log_probs(self, batch: RolloutBatch) -> FloatArray:
        """Return the recorded log-prob of each response token of the batch, [R]; nan where none was recorded."""
        return filled_column(batch, [(rows, stats.log_probs_R) for rows, stats in self._parts], rest=np.nan)

    def columns(self, batch: RolloutBatch) -> dict[str, FloatArray]:
        """Return `train_log_probs` and, if the loss reads it, `train_entropy`; empty if nothing was recorded."""
        if not self._parts:  # a pipeline stage without the loss
            return {}
        entropies = [(rows, stats.entropy_R) for rows, stats in self._parts if stats.entropy_R is not None]
        columns = {"train_log_probs": self.log_probs(batch)}
        return columns | ({"train_entropy": filled_column(batch, entropies, rest=np.nan)} if entropies else {})


def filled_column(batch: RolloutBatch, parts: Sequence[tuple[IntArray, Tensor]], *, rest: float) -> FloatArray:
    """Return a column [response tokens of `batch`, ...] from values of some rows; tokens of other rows have `rest`."""
    shape = parts[0][1].shape[1:] if parts else ()
    filled = np.full((int(batch.response_lengths.sum()), *shape), rest, np.float32)
    for rows, values_R in parts:
        filled[batch.response_positions(rows)] = values_R.float().cpu().numpy()
    return filled
