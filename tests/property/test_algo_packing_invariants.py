from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from furlong.core.batch import FlopsModel
from furlong.errors import ConfigError
from furlong.training.packing import Packing, karmarkar_karp, plan

QUICK = settings(max_examples=120, deadline=None)


@st.composite
def _requests(draw):
    longest = draw(st.sampled_from([5, 100]))
    lengths = np.array(draw(st.lists(st.integers(1, longest), min_size=1, max_size=60)))
    fan_out = draw(st.booleans())
    ids = np.array(draw(st.lists(st.integers(0, 40), min_size=len(lengths), max_size=len(lengths))))
    ids = ids if fan_out else np.arange(len(lengths)) * 7 % 997
    count = len(np.unique(ids))
    whole = [size for size in range(1, count + 1) if count % size == 0]
    return {
        "lengths": lengths,
        "rollout_ids": ids,
        "num_ranks": draw(st.integers(1, 5)),
        "global_batch_size": draw(st.none() | st.sampled_from(whole) | st.integers(1, 30)),
        "max_tokens": draw(st.none() | st.integers(1, 3 * longest)),
        "micro_batch_size": draw(st.integers(1, 6)),
        "balance": draw(st.sampled_from(["none", "tokens", "flops"])),
        "flops": FlopsModel(3.0, 0.1),
    }


def _plan(request):
    sizes = ("global_batch_size", "max_tokens", "micro_batch_size", "balance")
    packing = Packing(**{name: request[name] for name in sizes})
    rest = {name: value for name, value in request.items() if name not in sizes}
    return plan(packing=packing, **rest)


@QUICK
@given(_requests())
def test_every_sample_is_in_exactly_one_micro_batch_under_the_cap_and_ranks_are_in_step(request):
    try:
        p = _plan(request)
    except ConfigError:
        assume(False)
        return
    lengths, ids, cap = request["lengths"], request["rollout_ids"], request["max_tokens"]
    rows = [r for s in p for rank in s.micro_batches for m in rank for r in m.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    for step in p:
        assert len(step.micro_batches) == request["num_ranks"]
        assert len({len(rank) for rank in step.micro_batches}) == 1
        assert step.num_rollouts == len(np.unique(ids[step.rows]))
        for micro in (m for rank in step.micro_batches for m in rank):
            assert len(micro) > 0
            assert (np.diff(micro) > 0).all()
            if cap is None:
                assert len(micro) <= request["micro_batch_size"]
            else:
                assert lengths[micro].sum() <= cap or len(micro) == 1


@QUICK
@given(_requests())
def test_rollouts_are_whole_and_steps_are_full_in_first_seen_order(request):
    try:
        p = _plan(request)
    except ConfigError:
        assume(False)
        return
    ids, size = request["rollout_ids"], request["global_batch_size"]
    seen = list(dict.fromkeys(ids.tolist()))
    size = len(seen) if size is None else size
    for number, step in enumerate(p):
        assert set(ids[step.rows].tolist()) == set(seen[number * size : (number + 1) * size])
    assert [s.num_rollouts for s in p] == [size] * len(p)


@QUICK
@given(_requests())
def test_plan_is_refused_only_for_a_reason(request):
    try:
        _plan(request)
    except ConfigError as error:
        assert any(  # noqa: PT017  which message belongs to which request is what is tested
            text in str(error) for text in ("do not fill", "data-parallel ranks", "equally many", "cannot be increased")
        )
        if "do not fill" in str(error):
            assert len(np.unique(request["rollout_ids"])) % request["global_batch_size"]
        else:
            assert request["num_ranks"] > 1


@QUICK
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=12), st.integers(1, 4), st.randoms())
def test_equal_count_split_holds_every_item_once_and_is_close_to_even(values, num_sets, random):
    costs = np.array([v for v in values for _ in range(num_sets)])
    random.shuffle(costs)
    sets = karmarkar_karp(costs, num_sets)
    assert sorted(i for s in sets for i in s) == list(range(len(costs)))
    assert {len(s) for s in sets} == {len(values)}
    sums = [costs[s].sum() for s in sets]
    assert max(sums) - min(sums) <= costs.max() + 1e-9
