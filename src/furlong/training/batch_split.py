"""Split a rollout into optimizer steps, micro-batches and the parts of data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from furlong.algo.algorithm_rules import denominator
from furlong.algo.packing import Balance, BatchPlan, plan
from furlong.algo.reduce import loss_weights
from furlong.config.sections import AlgoFlags
from furlong.core.batch import FlopsModel, IntArray, RolloutBatch


@dataclass(frozen=True)
class Packing:
    """Split of samples into optimizer steps and micro-batches; arguments of `algo.packing.plan`."""

    global_batch_size: int | None = None
    num_steps: int | None = None
    max_tokens: int | None = None
    micro_batch_size: int = 1
    balance: Balance = "tokens"


@dataclass(frozen=True)
class RankPart:
    """One data-parallel rank's part of a rollout. Contains only arrays, so it can be sent to another process.

    batch: the rank's samples, with the column `loss_weights`; steps: for each optimizer step its micro-batches, as rows
    of `batch`; num_rollouts, sizes: per step over all ranks, where a size is (tokens, samples).
    """

    batch: RolloutBatch
    steps: list[list[IntArray]]
    num_rollouts: list[int]
    sizes: list[tuple[int, int]]


def split_batch(
    batch: RolloutBatch,
    *,
    algo: AlgoFlags,
    packing: Packing,
    num_ranks: int,
    max_response_len: int | None = None,
    flops: FlopsModel | None = None,
) -> list[RankPart]:
    """Plan one rollout and split it into the parts of the data-parallel ranks.

    Loss weights are computed here over the whole batch, so that the losses of all parts add up to the step's loss.
    """
    layout = plan(
        batch.lengths,
        batch.rollout_ids,
        num_ranks=num_ranks,
        global_batch_size=packing.global_batch_size,
        num_steps=packing.num_steps,
        max_tokens=packing.max_tokens,
        micro_batch_size=packing.micro_batch_size,
        balance=packing.balance,
        flops=flops if packing.balance == "flops" else None,
    )
    divide = denominator(algo, max_response_len=max_response_len)
    weights = loss_weights(batch, layout.step_rows, mode=divide.mode, constant_len=divide.constant_len)
    whole = batch.with_columns(loss_weights=weights)
    return [_part(whole, layout, rank) for rank in range(num_ranks)]


def _part(batch: RolloutBatch, layout: BatchPlan, rank: int) -> RankPart:
    """Select the samples of one rank; its micro-batches become rows of them."""
    rows = layout.rank_rows(rank)
    steps = [[np.searchsorted(rows, micro) for micro in step.micro_batches[rank]] for step in layout.steps]
    is_whole = len(rows) == len(batch)
    return RankPart(
        batch if is_whole else batch.select(rows),
        cast("list[list[IntArray]]", steps),
        [step.num_rollouts for step in layout.steps],
        [(int(batch.lengths[rows].sum()), len(rows)) for rows in layout.step_rows],
    )
