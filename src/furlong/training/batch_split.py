"""How a rollout is cut: into optimizer steps, micro-batches, and the parts of data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from furlong.algo.algorithm_rules import denominator
from furlong.algo.packing import Balance, Plan, plan
from furlong.algo.reduce import loss_weights
from furlong.algo.settings import Settings
from furlong.core.batch import FlopsModel, IntArray, RolloutBatch


@dataclass(frozen=True)
class Packing:
    """How samples become optimizer steps and micro-batches: arguments of `algo.packing.plan`.

    `max_tokens` caps a micro-batch by tokens; None takes `micro_batch_size` samples each.
    """

    global_batch_size: int | None = None
    num_steps: int | None = None
    max_tokens: int | None = None
    micro_batch_size: int = 1
    balance: Balance = "tokens"


@dataclass(frozen=True)
class RankPart:
    """What one data-parallel rank trains on in one rollout; holds nothing but arrays, so it may cross processes.

    batch: its samples, with the column `loss_weights`; steps: its micro-batches as rows of them, by optimizer step;
    num_rollouts, sizes: of each step, over all ranks; sizes are its tokens and its samples.
    """

    batch: RolloutBatch
    steps: list[list[IntArray]]
    num_rollouts: list[int]
    sizes: list[tuple[int, int]]


def split_batch(
    batch: RolloutBatch,
    *,
    settings: Settings,
    packing: Packing,
    num_ranks: int,
    max_response_len: int | None = None,
    flops: FlopsModel | None = None,
) -> list[RankPart]:
    """Plan one rollout and cut it into the parts of the data-parallel ranks.

    Loss weights are made here, of the whole batch: the losses of all parts add up to the loss of the step.
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
    divide = denominator(settings, max_response_len=max_response_len)
    weights = loss_weights(batch, layout.step_rows, mode=divide.mode, constant_len=divide.constant_len)
    whole = batch.with_columns(loss_weights=weights)
    return [_part(whole, layout, rank) for rank in range(num_ranks)]


def _part(batch: RolloutBatch, layout: Plan, rank: int) -> RankPart:
    """The samples of one rank, and its micro-batches as rows of them."""
    rows = layout.rank_rows(rank)
    steps = [[np.searchsorted(rows, micro) for micro in step.micro_batches[rank]] for step in layout.steps]
    is_whole = len(rows) == len(batch)
    return RankPart(
        batch if is_whole else batch.select(rows),
        cast("list[list[IntArray]]", steps),
        [step.num_rollouts for step in layout.steps],
        [(int(batch.lengths[rows].sum()), len(rows)) for rows in layout.step_rows],
    )
