"""Metrics of one training round: of its batch, its duration and its routing."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from furlong.algo.log_ratio import KlKind, kl_estimate
from furlong.core.batch import FlopsModel, MicroBatch, RolloutBatch
from furlong.core.metric import Metric, Metrics, maximum, mean, total
from furlong.core.tracing import tracer


@dataclass
class Clock:
    """Seconds of each phase of the round, reported as `perf/<phase>_time`."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    record: Callable[[str], AbstractContextManager[None]] = tracer.span

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time the body; repeated phases of one name add up."""
        start = time.perf_counter()
        with self.record(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def perf_metrics(batch: RolloutBatch, clock: Clock, flops: FlopsModel | None, *, num_sharers: int = 1) -> Metrics:
    """Return `perf/*` of one round: seconds per phase, tokens/s over all ranks, TFLOPS per rank.

    `batch` is trained on by this rank together with `num_sharers` - 1 others. Training counts as three forward passes;
    recomputation is not counted.
    """
    metrics: Metrics = {f"perf/{name}_time": maximum(seconds) for name, seconds in clock.seconds.items()}
    teraflops = None if flops is None else float(flops.cost(batch.lengths).sum()) / 1e12 / num_sharers
    for name, seconds in clock.seconds.items():
        is_training = name.endswith("_train")
        if is_training:
            metrics[f"perf/{name}_tok_per_s"] = total(float(batch.lengths.sum()) / seconds)
        if teraflops is not None and (is_training or name in ("log_probs", "ref_log_probs", "values")):
            metrics[f"perf/{name}_tflops"] = mean((3 if is_training else 1) * teraflops / seconds)
    return metrics


# Per-token batch columns and the metric each becomes.
LOGGED = {
    "old_log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "teacher_log_probs": "teacher_log_probs",
    "teacher_mask": "opd_aligned_frac",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
    "entropy": "entropy",
}


def batch_metrics(batch: RolloutBatch, kl_kind: KlKind) -> Metrics:
    """Return `rollout/*` of the batch: tokens weighted like the loss (`loss_weights`), samples unweighted."""
    weights = batch.columns["loss_weights"].astype(np.float64) * (batch.loss_masks > 0)
    weight = float(weights.sum())
    columns = {name: batch.columns[column] for column, name in LOGGED.items() if column in batch.columns}
    if "log_probs" in columns and "ref_log_probs" in columns:
        old, ref = torch.from_numpy(columns["log_probs"]), torch.from_numpy(columns["ref_log_probs"])
        columns["kl"] = kl_estimate(old, ref, kl_kind).numpy()
    metrics: Metrics = {
        f"rollout/{name}": Metric(float(weights @ np.where(weights > 0, values, 0.0)), weight)
        for name, values in columns.items()
    }
    per_sample = {
        "rewards": batch.rewards,
        "raw_reward": batch.raw_rewards,
        "response_lengths": batch.response_lengths,
        "total_lengths": batch.lengths,
        "truncated": batch.truncated,
    }
    for name, values in per_sample.items():
        numbers = values[~np.isnan(values)]  # a sample whose reward call failed has no raw reward
        if len(numbers):
            metrics[f"rollout/{name}"] = mean(float(np.mean(numbers, dtype=np.float64)), len(numbers))
    return metrics


def agreement(micro: MicroBatch, rerouted_R: Tensor | None) -> Metrics:
    """Return `routing_agreement`: the share of the engine's expert choices that the trainer's routers also make."""
    if rerouted_R is None:
        return {}
    is_known_R = (micro.mask_R > 0) & ~torch.isnan(rerouted_R)
    weight = is_known_R.sum()
    shared, count = torch.stack([weight - rerouted_R.nan_to_num() @ is_known_R.to(rerouted_R.dtype), weight]).tolist()
    return {"routing_agreement": Metric(shared, count)}
