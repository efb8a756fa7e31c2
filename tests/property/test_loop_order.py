from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_loop import FakeRollout, FakeSync, World, fake_parts
from furlong.errors import SyncError
from furlong.loop.checkpoints import Checkpoints
from furlong.loop.schedule import RunSchedule
from furlong.loop.train import train


def run(world: World, plan: RunSchedule, **changes):
    parts = fake_parts(world, **changes)
    steps = asyncio.run(train(parts, plan, Checkpoints()))
    return parts, steps


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.integers(1, 3), st.integers(0, 9), st.integers(0, 2**16), st.sampled_from([None, 1, 3]))
def test_rollouts_are_trained_in_order_and_never_staler_than_the_bound(ahead, every, n, seed, eval_every):
    world = World(random.Random(seed))
    plan = RunSchedule(num_rollout=n, ahead=ahead, update_weights_interval=every, eval_every=eval_every)
    parts, steps = run(world, plan)
    assert steps == n
    assert [i for kind, i in world.log if kind == "train"] == list(range(n))
    records = parts.trackers[0].records
    assert [step for step, metrics in records if "train/loss" in metrics] == list(range(1, n + 1))
    for _, metrics in records:
        assert metrics.get("rollout/staleness/max", 0) <= plan.max_staleness
    if eval_every:
        evaluated = {step: metrics["eval/fake"] for step, metrics in records if "eval/fake" in metrics}
        assert list(evaluated) == sorted({0, n} | set(range(0, n + 1, eval_every)))
        assert all(version == step for step, version in evaluated.items()), "of weights before that step"
    assert parts.ledger.trained_groups == [(i, i) for i in range(n)]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**16))
def test_hold_keeps_the_bound_while_weights_change_in_flight(ahead, seed):
    world = World(random.Random(seed))
    plan = RunSchedule(num_rollout=8, ahead=ahead, pause_mode="hold")
    parts, _ = run(world, plan, sync=FakeSync(world, may_change_in_flight=True))
    assert max(m["rollout/staleness/max"] for _, m in parts.trackers[0].records) <= plan.max_staleness
    assert [e for e in world.log if e[0] in ("pause", "resume")] == [("pause", "hold"), ("resume", None)] * 8


def test_synchronous_training_is_on_policy():
    world = World()
    parts, _ = run(world, RunSchedule(num_rollout=5))
    assert all(m["rollout/staleness/max"] == 0 for _, m in parts.trackers[0].records)


def test_a_rollout_that_fails_ends_the_run_with_its_error():
    world = World()
    with pytest.raises(RuntimeError, match="rollout 3 failed"):
        run(world, RunSchedule(num_rollout=9, ahead=2), rollout=FakeRollout(world, fail_at=3))


class Unproven(FakeSync):
    """Serves weights whose verification fails later."""

    wrong = 2

    async def finish_verification(self):
        self.world.log.append(("settle", self.world.version))
        if self.world.version == self.wrong:
            raise SyncError("version 2: 1 differ")
        return {}


@pytest.mark.parametrize("ahead", [0, 2])
def test_no_step_completes_with_unverified_weights(ahead):
    world = World()
    parts = fake_parts(world, sync=Unproven(world))
    with pytest.raises(SyncError, match="1 differ"):
        asyncio.run(train(parts, RunSchedule(num_rollout=9, ahead=ahead, eval_every=1), Checkpoints()))
    assert [i for kind, i in world.log if kind == "train"] == [0, 1]
    evaluated = [step for step, metrics in parts.trackers[0].records if "eval/fake" in metrics]
    assert evaluated == [0, 1]
    assert [i for kind, i in world.log if kind == "update"] == [0, 1, 2]


def test_a_run_ends_where_its_data_ends():
    world = World()
    parts, steps = run(world, RunSchedule(num_rollout=9, ahead=2), rollout=FakeRollout(world, end_at=4))
    assert steps == 4
    assert len(parts.ledger.trained_groups) == 4
