"""Reductions over tokens and steps: denominators and weights of the loss, means over sequences and steps.

N samples, R response tokens, S sequences. A loss is `(per_token_R * weight_R).sum()`. The weights contain the
denominator of the whole optimizer step, so losses (and gradients) of micro-batches and ranks add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from furlong.config.sections import AlgoFlags
from furlong.core.algorithms import Aggregation, find_algorithm
from furlong.core.batch import FloatArray, IntArray, RolloutBatch, sum_rows
from furlong.core.metric import Metric, Metrics, merge
from furlong.errors import ConfigError, DataError


def denominator(flags: AlgoFlags, *, max_response_len: int | None = None) -> tuple[Aggregation, int | None]:
    """Return `mode` and `constant_len` of `loss_weights`.

    The algorithm's mode, else that of --loss-constant-len or --calculate-per-token-loss, else per rollout. A constant
    that is not set is `max_response_len`, as in the Dr. GRPO paper.
    """
    mode = find_algorithm(flags.advantage_estimator).aggregation
    if mode is None:
        mode = "constant" if flags.loss_constant_len else "token" if flags.calculate_per_token_loss else "rollout"
    if mode != "constant":
        return mode, None
    constant_len = flags.loss_constant_len or max_response_len
    if constant_len is None:
        raise ConfigError(f"{flags.advantage_estimator} divides by a constant; give --loss-constant-len")
    return mode, constant_len


def loss_weights(
    batch: RolloutBatch, steps: Sequence[IntArray], *, mode: Aggregation, constant_len: int | None
) -> FloatArray:
    """Return mask / denominator for each response token of `batch`, float32 [sum of response lengths].

    `steps[k]` are the rows of optimizer step k. With M the number of unmasked tokens and n the number of rollouts
    (distinct rollout ids, fully masked ones included) of the step that a sample belongs to:
    "rollout": 1 / (M_rollout * n), M_rollout over all samples of one rollout id, so a fanned-out rollout weighs as one
    (GRPO, arXiv:2402.03300 eq. 3; GSPO); "token": 1 / M (DAPO, arXiv:2503.14476 eq. 8); "constant":
    1 / (constant_len * n) (Dr. GRPO, arXiv:2503.20783 sec. 3.2). Rows outside all steps get 0. Raises DataError if a
    row is in two steps or a rollout id is split over steps.
    """
    if mode == "constant" and (constant_len is None or constant_len < 1):
        raise DataError(f"constant aggregation needs a positive --loss-constant-len, got {constant_len}")
    step_N = _step_of_each_row(len(batch), steps)
    rollout_N = np.unique(batch.rollout_ids, return_inverse=True)[1]
    num_rollouts = int(rollout_N.max()) + 1 if len(rollout_N) else 0
    used = step_N >= 0
    step_of_rollout = np.full(num_rollouts, -1)
    step_of_rollout[rollout_N[used]] = step_N[used]
    if (split := np.flatnonzero(used & (step_of_rollout[rollout_N] != step_N))).size:
        row = int(split[0])
        raise DataError(
            f"rollout id {int(batch.rollout_ids[row])} has samples in steps {int(step_N[row])} and "
            f"{int(step_of_rollout[rollout_N[row]])}; all samples of a rollout must be in one optimizer step"
        )
    sums = np.concatenate([[0], np.cumsum(batch.loss_masks, dtype=np.int64)])
    mask_N = np.diff(sums[batch.response_starts]) * used
    rollouts_of_step = np.bincount(step_of_rollout[step_of_rollout >= 0], minlength=len(steps)).astype(np.float64)
    match mode:
        case "rollout":
            mask_of_rollout = np.maximum(np.bincount(rollout_N, weights=mask_N, minlength=num_rollouts), 1.0)
            denominator_N = mask_of_rollout[rollout_N] * rollouts_of_step[step_N]
        case "token":
            mask_of_step = np.bincount(step_N[used], weights=mask_N[used], minlength=len(steps))
            denominator_N = np.maximum(mask_of_step, 1.0)[step_N]
        case "constant":
            denominator_N = float(constant_len or 0) * rollouts_of_step[step_N]
    scale_N = np.where(used, 1.0 / denominator_N, 0.0)
    return (batch.loss_masks * np.repeat(scale_N, batch.response_lengths)).astype(np.float32)


def _step_of_each_row(num_rows: int, steps: Sequence[IntArray]) -> IntArray:
    step_N = np.full(num_rows, -1, dtype=np.int64)
    for step, rows in enumerate(steps):
        if len(np.unique(rows)) != len(rows) or (step_N[rows] >= 0).any():
            raise DataError(f"step {step} repeats a sample; every sample must be in one optimizer step, once")
        step_N[rows] = step
    return step_N


def sequence_mean(values_R: Tensor, mask_R: Tensor, seq_of_R: Tensor, num_sequences: int) -> Tensor:
    """Mean over the unmasked tokens of each sequence, [S]; 0 if there is none. Masked values are ignored."""
    kept_R = torch.where(mask_R > 0, values_R, 0.0)
    counts_S = sum_rows(mask_R.to(values_R.dtype), seq_of_R, num_sequences)
    return sum_rows(kept_R, seq_of_R, num_sequences) / counts_S.clamp_min(1.0)


def step_mean(steps: Sequence[Metrics], *, num_ranks: int = 1) -> Metrics:
    """Average the metrics of optimizer steps, each already merged over micro-batches.

    `merge` adds "sum" metrics (such as a loss) over micro-batches; over steps they are averaged instead. Each of
    `num_ranks` data-parallel ranks has a part of the value; merging the results of all ranks adds the parts. "mean"
    metrics keep their weights, so they stay means over tokens or rollouts.
    """
    return merge(
        {k: Metric(m.total, 1.0 / num_ranks, "mean") if m.rule == "sum" else m for k, m in metrics.items()}
        for metrics in steps
    )
