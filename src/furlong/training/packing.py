"""Packing of N samples into optimizer steps, data-parallel ranks and micro-batches.

All samples of a rollout (one completion, possibly fanned out) are in one step, every sample is in exactly one
micro-batch, and none is dropped. All ranks of a step get the same number of micro-batches, because their collectives
run in lockstep.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, cast

import numpy as np

from furlong.algo.reduce import denominator, loss_weights
from furlong.config.sections import AlgoFlags
from furlong.core.batch import Costs, FlopsModel, IntArray, RolloutBatch
from furlong.errors import ConfigError

Balance = Literal["none", "tokens", "flops"]


@dataclass(frozen=True)
class Packing:
    """How the samples of a rollout form optimizer steps and micro-batches.

    Rollouts in first-seen order fill steps of `global_batch_size` rollouts, or one step without it. `max_tokens` (over
    all context-parallel ranks) limits a micro-batch; a longer sample gets its own. Without it, micro-batches have at
    most `micro_batch_size` samples. `balance` "tokens" or "flops" equalizes micro-batches and ranks by that cost;
    "none" assigns them round-robin.
    """

    global_batch_size: int | None = None
    max_tokens: int | None = None
    micro_batch_size: int = 1
    balance: Balance = "tokens"


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step: `micro_batches[rank][i]` are rows of the batch. Ranks run their i-th ones together."""

    micro_batches: tuple[tuple[IntArray, ...], ...]
    num_rollouts: int

    @property
    def rows(self) -> IntArray:
        """Rows of the step, ascending."""
        return np.sort(np.concatenate([rows for rank in self.micro_batches for rows in rank]))


@dataclass(frozen=True)
class RankPart:
    """One data-parallel rank's part of a rollout. Contains only arrays, so it can be sent to another process.

    batch: the rank's samples, with the column `loss_weights`, and `value_weights` for a critic; steps: for each
    optimizer step its micro-batches, as rows of `batch`; num_rollouts, sizes: per step over all ranks, where a size is
    (tokens, samples).
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
    steps = plan(batch.lengths, batch.rollout_ids, packing, num_ranks=num_ranks, flops=flops)
    mode, constant_len = denominator(algo, max_response_len=max_response_len)
    weights = loss_weights(batch, [step.rows for step in steps], mode=mode, constant_len=constant_len)
    whole = batch.with_columns(loss_weights=weights)
    if algo.uses_critic:
        tokens = loss_weights(batch, [step.rows for step in steps], mode="token", constant_len=None)
        whole = whole.with_columns(value_weights=tokens)
    if algo.positive_nll_coef:
        is_positive = np.repeat(batch.raw_rewards > 0, batch.response_lengths)
        positive = replace(batch, loss_masks=(batch.loss_masks * is_positive).astype(np.uint8))
        tokens = loss_weights(positive, [step.rows for step in steps], mode="token", constant_len=None)
        whole = whole.with_columns(positive_weights=tokens)
    return [_part(whole, steps, rank) for rank in range(num_ranks)]


def _part(batch: RolloutBatch, steps: list[StepPlan], rank: int) -> RankPart:
    rows = np.sort(np.concatenate([micro for step in steps for micro in step.micro_batches[rank]]))
    local = [[np.searchsorted(rows, micro) for micro in step.micro_batches[rank]] for step in steps]
    return RankPart(
        batch if len(rows) == len(batch) else batch.select(rows),
        cast("list[list[IntArray]]", local),
        [step.num_rollouts for step in steps],
        [(int(batch.lengths[step.rows].sum()), len(step.rows)) for step in steps],
    )


def plan(
    lengths: IntArray, rollout_ids: IntArray, packing: Packing, *, num_ranks: int, flops: FlopsModel | None = None
) -> list[StepPlan]:
    """Plan one rollout of N samples with total `lengths` [N]; `flops` is needed to balance by FLOPs.

    Raises ConfigError if rollouts are left over, or if a step has fewer samples than ranks.

    >>> plan(np.array([5, 3, 4, 4]), np.arange(4), Packing(max_tokens=8), num_ranks=2)[0].micro_batches
    ((array([0, 1]),), (array([2, 3]),))
    """
    max_tokens, micro_batch_size, balance = packing.max_tokens, packing.micro_batch_size, packing.balance
    lengths, rollout_ids = np.asarray(lengths, dtype=np.int64), np.asarray(rollout_ids)
    if len(lengths) != len(rollout_ids) or not len(lengths):
        raise ConfigError(f"cannot plan {len(lengths)} lengths for {len(rollout_ids)} rollout ids; give one of each")
    if num_ranks < 1 or micro_batch_size < 1 or (max_tokens is not None and max_tokens < 1):
        raise ConfigError(
            f"num_ranks {num_ranks}, --micro-batch-size {micro_batch_size} and --max-tokens-per-gpu {max_tokens} "
            "must be positive"
        )
    costs = lengths.astype(np.float64)
    if balance == "flops":
        if flops is None:
            raise ConfigError("balancing by FLOPs needs the FLOPs model; pass `flops`, or balance by tokens")
        costs = flops.cost(lengths)
    steps: list[StepPlan] = []
    for rows, num_rollouts in _steps(rollout_ids, packing.global_batch_size):
        if len(rows) < num_ranks:
            raise ConfigError(
                f"step {len(steps)} has {len(rows)} samples for {num_ranks} data-parallel ranks; "
                "raise --global-batch-size or use fewer ranks"
            )
        if max_tokens is None:
            bins = _chunks(rows, costs, micro_batch_size, num_ranks, balance)
        else:
            bins = _capped_bins(rows, lengths, costs, max_tokens, num_ranks, balance)
        steps.append(StepPlan(_deal(bins, costs, num_ranks, balance), num_rollouts))
    return steps


def leftover_problem(num_rollouts: int, size: int) -> str | None:
    """Return why rollouts do not fill optimizer steps of `size`; None if they do."""
    if not (left := num_rollouts % size):
        return None
    return (
        f"{num_rollouts} rollouts do not fill optimizer steps of {size}: {left} are left over; make "
        "--rollout-batch-size x --n-samples-per-prompt a multiple of --global-batch-size, or, if your function or "
        "--load-debug-rollout-data-subsample leaves fewer, set a --global-batch-size that divides their number"
    )


def _steps(rollout_ids: IntArray, global_batch_size: int | None) -> list[tuple[IntArray, int]]:
    _, first, inverse = np.unique(rollout_ids, return_index=True, return_inverse=True)
    rank_of_first = np.empty(len(first), dtype=np.int64)
    rank_of_first[np.argsort(first)] = np.arange(len(first))
    position = rank_of_first[inverse.reshape(-1)]  # index of the row's rollout, in first-seen order
    num_rollouts = len(first)
    size = num_rollouts if global_batch_size is None else global_batch_size
    if size < 1:
        raise ConfigError(f"--global-batch-size {global_batch_size} must be positive")
    if problem := leftover_problem(num_rollouts, size):
        raise ConfigError(problem)
    order = np.argsort(position // size, kind="stable")
    bounds = np.cumsum(np.bincount(position // size))[:-1]
    return [(rows, size) for rows in np.split(order, bounds)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _chunks(rows: IntArray, costs: Costs, size: int, num_ranks: int, balance: Balance) -> list[IntArray]:
    count = _round_up(-(-len(rows) // size), num_ranks)
    if count > len(rows):
        raise ConfigError(
            f"a step of {len(rows)} samples cannot give {num_ranks} ranks equally many micro-batches of at most "
            f"{size}: that needs {count} samples. Raise --micro-batch-size or make --global-batch-size a multiple of "
            "the number of ranks"
        )
    if balance == "none":
        return np.array_split(rows, count)
    # Assigning sorted samples back and forth equalizes the cost of the micro-batches.
    order = rows[np.argsort(-costs[rows], kind="stable")]
    turn = np.arange(len(order)) % (2 * count)
    return _grouped(order, np.where(turn < count, turn, 2 * count - 1 - turn))


def _grouped(rows: IntArray, bin_of: IntArray) -> list[IntArray]:
    """Return the rows of each bin, ascending. `bin_of[i]` is the bin of `rows[i]`; no bin is empty."""
    return np.split(rows[np.lexsort((rows, bin_of))], np.cumsum(np.bincount(bin_of))[:-1])


def _capped_bins(
    rows: IntArray, lengths: IntArray, costs: Costs, cap: int, num_ranks: int, balance: Balance
) -> list[IntArray]:
    bins = _best_fit(rows, lengths, cap)
    count = _round_up(len(bins), num_ranks)
    if count > len(rows):
        raise ConfigError(
            f"a step of {len(rows)} samples needs {len(bins)} micro-batches of at most {cap} tokens, which cannot be "
            f"increased to {count}, a multiple of {num_ranks} ranks. Raise --max-tokens-per-gpu or make "
            "--global-batch-size a multiple of the number of ranks"
        )
    if balance != "none" and (even := _least_loaded(rows, lengths, costs, cap, count)) is not None:
        return even
    return _split_to(bins, lengths, count)


def _best_fit(rows: IntArray, lengths: IntArray, cap: int) -> list[IntArray]:
    """Best-fit decreasing: longest first, each into the fullest bin that still has room. O(n log n)."""
    order = rows[np.argsort(-lengths[rows], kind="stable")]
    smallest = int(lengths[order[-1]])
    bin_of: list[int] = []
    num_bins = 0
    rooms: list[int] = []  # distinct free spaces, ascending
    bins_with: dict[int, list[int]] = {}  # free space -> bins
    for length in lengths[order].tolist():
        at = bisect_left(rooms, length)
        if at == len(rooms):
            number, room = num_bins, cap
            num_bins += 1
        else:
            room = rooms[at]
            number = bins_with[room].pop()
            if not bins_with[room]:
                del bins_with[room], rooms[at]
        bin_of.append(number)
        left = room - length
        if left >= smallest:
            if left not in bins_with:
                bins_with[left] = []
                insort(rooms, left)
            bins_with[left].append(number)
    return _grouped(order, np.array(bin_of))


def _least_loaded(rows: IntArray, lengths: IntArray, costs: Costs, cap: int, count: int) -> list[IntArray] | None:
    """Longest processing time first into `count` bins; None if that would break the cap."""
    order = rows[np.argsort(-costs[rows], kind="stable")]
    heap: list[tuple[float, int, int]] = [(0.0, 0, number) for number in range(count)]
    bin_of: list[int] = []
    for length, cost in zip(lengths[order].tolist(), costs[order].tolist(), strict=True):
        load, tokens, number = heap[0]
        if tokens and tokens + length > cap:
            return None
        bin_of.append(number)
        heapq.heapreplace(heap, (load + cost, tokens + length, number))
    return _grouped(order, np.array(bin_of))


def _split_to(bins: list[IntArray], lengths: IntArray, count: int) -> list[IntArray]:
    """Halve the largest bins that have more than one sample until there are `count`."""
    bins = list(bins)
    heap = [(-int(lengths[rows].sum()), number) for number, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(heap)
    while len(bins) < count:
        _, number = heapq.heappop(heap)
        halves: tuple[list[int], list[int]] = ([], [])
        sums = [0, 0]
        for row in sorted(bins[number].tolist(), key=lambda row: -int(lengths[row])):
            side = int(sums[1] < sums[0])
            halves[side].append(row)
            sums[side] += int(lengths[row])
        bins[number] = np.array(sorted(halves[0]))
        bins.append(np.array(sorted(halves[1])))
        for index, half in ((number, 0), (len(bins) - 1, 1)):
            if len(halves[half]) > 1:
                heapq.heappush(heap, (-sums[half], index))
    return bins


def _deal(bins: list[IntArray], costs: Costs, num_ranks: int, balance: Balance) -> tuple[tuple[IntArray, ...], ...]:
    """Give each rank equally many bins: round-robin, or with equal loads and similar bins at the same index."""
    if balance == "none" or num_ranks == 1:
        return tuple(tuple(bins[rank::num_ranks]) for rank in range(num_ranks))
    flat = np.concatenate(bins)
    starts = np.concatenate([[0], np.cumsum([len(b) for b in bins])[:-1]])
    return tuple(
        tuple(bins[i] for i in members) for members in karmarkar_karp(np.add.reduceat(costs[flat], starts), num_ranks)
    )


def karmarkar_karp(costs: Costs | Sequence[float], num_sets: int) -> list[list[int]]:
    """Split items into `num_sets` sets of equal size with nearly equal sums (balanced largest differencing method).

    The number of items must be a multiple of `num_sets`. Sorted items form rows of `num_sets`; the two rows with the
    largest spread are merged, heavy end onto light end, until one row is left. Members of each set are sorted by
    descending cost, so the i-th members of all sets have similar costs.
    """
    costs = np.asarray(costs, dtype=np.float64)
    if len(costs) % num_sets or not len(costs):
        raise ValueError(f"{len(costs)} items cannot be split into {num_sets} sets of equal size")
    order = np.argsort(-costs, kind="stable")
    rows_KS = order.reshape(-1, num_sets)
    # Entry: (negative spread, tie-breaker, sums in descending order, members of each set as nested pairs).
    heap: list[tuple[float, int, Costs, list[list[IntArray]]]] = []
    for number, row in enumerate(rows_KS):
        sums = costs[row]
        heap.append((float(sums[-1] - sums[0]), number, sums, [[row[s : s + 1]] for s in range(num_sets)]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, sums, members = heapq.heappop(heap)
        _, _, other_sums, other_members = heapq.heappop(heap)
        total = sums + other_sums[::-1]
        joined = [a + b for a, b in zip(members, reversed(other_members), strict=True)]
        by_sum = np.argsort(-total, kind="stable")
        total = total[by_sum]
        heapq.heappush(heap, (float(total[-1] - total[0]), number, total, [joined[i] for i in by_sum]))
    place = np.empty(len(costs), dtype=np.int64)
    place[order] = np.arange(len(costs))
    sets = [np.fromiter(chain.from_iterable(parts), dtype=np.int64) for parts in heap[0][3]]
    return [s[np.argsort(place[s])].tolist() for s in sets]
