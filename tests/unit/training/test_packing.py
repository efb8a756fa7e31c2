from __future__ import annotations

import numpy as np
import pytest

from furlong.config.sections import AlgoFlags
from furlong.core.batch import FlopsModel
from furlong.errors import ConfigError
from furlong.training.packing import Packing, StepPlan, karmarkar_karp, split_batch
from furlong.training.packing import plan as plan_packing
from oracles.cases import random_batch


def plan(lengths, ids, *, num_ranks, flops=None, **packing) -> list[StepPlan]:
    return plan_packing(lengths, ids, Packing(**packing), num_ranks=num_ranks, flops=flops)


def _lists(step):
    return [[rows.tolist() for rows in rank] for rank in step.micro_batches]


def test_static_micro_batches_without_balance_are_consecutive_and_assigned_round_robin():
    step = plan(np.full(8, 10), np.arange(8), num_ranks=2, micro_batch_size=2, balance="none")[0]
    assert _lists(step) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_cap_fills_micro_batches_and_leaves_a_longer_sample_alone():
    step = plan(np.array([1, 50, 4, 5, 7, 3]), np.arange(6), num_ranks=1, max_tokens=10)[0]
    assert sorted(_lists(step)[0]) == [[0, 2, 3], [1], [4, 5]]


def test_rollouts_fill_steps_in_the_order_in_which_they_are_seen():
    ids = np.array([7, 3, 7, 9, 3, 1])
    steps = plan(np.full(6, 5), ids, num_ranks=1, global_batch_size=2, micro_batch_size=8)
    assert [(step.rows.tolist(), step.num_rollouts) for step in steps] == [([0, 1, 2, 4], 2), ([3, 5], 2)]


def test_remainder_is_an_error_with_its_numbers():
    with pytest.raises(ConfigError, match="7 rollouts do not fill optimizer steps of 3: 1 are left over"):
        plan(np.full(7, 5), np.arange(7), num_ranks=1, global_batch_size=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_ranks": 5}, "step 0 has 4 samples for 5 data-parallel ranks"),
        ({"num_ranks": 3, "micro_batch_size": 1}, "cannot give 3 ranks equally many micro-batches of at most 1"),
        ({"num_ranks": 3, "max_tokens": 5}, "4 micro-batches of at most 5 tokens.* 6, a multiple of 3 ranks"),
        ({"num_ranks": 0}, "must be positive"),
        ({"num_ranks": 1, "max_tokens": 0}, "must be positive"),
        ({"num_ranks": 1, "global_batch_size": 0}, "must be positive"),
        ({"num_ranks": 1, "balance": "flops"}, "needs the FLOPs model"),
    ],
)
def test_impossible_plans_name_their_numbers(values, message):
    with pytest.raises(ConfigError, match=message):
        plan(np.full(4, 5), np.arange(4), **values)


def test_no_samples_are_refused():
    with pytest.raises(ConfigError, match="cannot plan 0 lengths"):
        plan(np.array([], dtype=np.int64), np.array([], dtype=np.int64), num_ranks=1)


def test_cap_wins_over_even_micro_batches():
    # The even split {3, 2, 2} {3, 2} breaks the cap of 6; two micro-batches exist that do not.
    step = plan(np.array([3, 3, 2, 2, 2]), np.arange(5), num_ranks=1, max_tokens=6)[0]
    assert sorted(_lists(step)[0]) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(("balance", "alone"), [("flops", True), ("tokens", False)])
def test_flops_balance_evens_out_cost_where_token_balance_does_not(balance, alone):
    lengths, model = np.array([100] + [10] * 20), FlopsModel(per_token=1.0, per_pair=1.0)
    step = plan(lengths, np.arange(21), num_ranks=1, max_tokens=200, balance=balance, flops=model)[0]
    assert ([0] in _lists(step)[0]) == alone


def test_ranks_are_balanced_by_flops():
    lengths, model = np.array([100] + [10] * 20), FlopsModel(per_token=1.0, per_pair=1.0)
    step = plan(lengths, np.arange(21), num_ranks=3, max_tokens=400, balance="flops", flops=model)[0]
    costs = [model.cost(lengths[np.concatenate(rank)]).sum() for rank in step.micro_batches]
    assert sorted(costs) == [1100.0, 1100.0, 10100.0]


def test_flops_of_zero_still_fill_every_micro_batch():
    step = plan(np.full(8, 5), np.arange(8), num_ranks=2, max_tokens=10, balance="flops", flops=FlopsModel(0.0, 0.0))[0]
    assert [[len(rows) for rows in rank] for rank in step.micro_batches] == [[2, 2], [2, 2]]


def test_every_sample_is_in_the_part_of_one_rank_whose_micro_batches_are_rows_of_it():
    batch = random_batch(0)
    parts = split_batch(batch, algo=AlgoFlags(), packing=Packing(global_batch_size=3), num_ranks=3)
    assert sorted(i for part in parts for i in part.batch.sample_ids.tolist()) == sorted(batch.sample_ids.tolist())
    for part in parts:
        assert [part.num_rollouts, len(part.steps), len(part.sizes)] == [[3, 3, 3], 3, 3]
        rows = [row for step in part.steps for micro in step for row in micro.tolist()]
        assert sorted(rows) == list(range(len(part.batch)))


def test_largest_differencing_beats_round_robin():
    costs = np.array([9.0, 8, 7, 6, 5, 4, 3, 2])
    sets = karmarkar_karp(costs, 2)
    assert [len(s) for s in sets] == [4, 4]
    assert [sum(costs[s]) for s in sets] == [22.0, 22.0]
    with pytest.raises(ValueError, match="7 items"):
        karmarkar_karp(costs[:7], 2)


def test_micro_batches_with_the_same_index_have_similar_costs():
    lengths = np.random.default_rng(0).integers(10, 1000, 400)
    step = plan(lengths, np.arange(400), num_ranks=4, max_tokens=2000, balance="tokens")[0]
    tokens = np.array([[lengths[rows].sum() for rows in rank] for rank in step.micro_batches])
    assert tokens.max(axis=0).sum() < 1.02 * tokens.mean(axis=0).sum()


def test_65536_samples_need_no_quadratic_pass():
    lengths = np.random.default_rng(0).integers(50, 4000, 65536)
    step = plan(lengths, np.arange(65536), num_ranks=64, max_tokens=16384)[0]
    num_bins = sum(len(rank) for rank in step.micro_batches)
    assert len(step.rows) == 65536
    assert num_bins * 16384 < 1.02 * lengths.sum()
