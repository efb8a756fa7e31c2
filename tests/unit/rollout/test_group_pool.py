"""Groups that rollouts share: admission, permits, age, and what a checkpoint contains of them."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_loop import FakeSync, FakeTrainer, ListTracker, Unobserved, World
from fakes_rollout import LabelReward, ListSource, MemoryLedger, ScriptedEngine
from furlong.config.hooks import Hooks
from furlong.config.sections import RolloutFlags
from furlong.core.sample import Status
from furlong.interfaces import DeviceSharing, Parts, SamplingParams
from furlong.loop.checkpoints import Checkpoints
from furlong.loop.schedule import RunSchedule
from furlong.loop.train import train
from furlong.rollout.agent import policy
from furlong.rollout.engine_rollout import EngineRollout
from furlong.rollout.episodes import EpisodeLoad
from furlong.rollout.generate import Generation
from furlong.rollout.group_pool import GroupPool, choose_groups
from furlong.rollout.train_batch import Conversion


class Episodes:
    """A generate function whose episodes have a number of turns that depends on the sample; counts its calls."""

    def __init__(self, engine, turns):
        self.engine, self.turns = engine, turns
        self.running = self.most = self.num_started = self.num_ended = 0
        self.lengths = {}

    async def __call__(self, args, sample, params):
        self.running += 1
        self.num_started += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(self.turns(sample.index)):
                turn = await policy().generate(sample.tokens, **{**params, "max_new_tokens": 1})
                sample.append_response_tokens(
                    tokens=turn.tokens, log_probs=turn.log_probs, version=turn.versions, text=turn.text
                )
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        self.num_ended += 1
        self.lengths[sample.index] = sample.response_length
        sample.status = Status.COMPLETED
        return sample


class Versioned(ScriptedEngine):
    """Pauses as an engine does: "finish" waits for requests, and new ones wait for the weights."""

    def __init__(self):
        super().__init__(lambda prompt, params: [7])
        self.gate, self.busy = asyncio.Event(), 0
        self.gate.set()
        self.longest_pause = 0

    async def generate(self, prompt, params, *, session=None):
        await self.gate.wait()
        self.busy += 1
        try:
            version = self.version
            done = await super().generate(prompt, params, session=session)
            return dataclasses.replace(done, versions=[version] * len(done.tokens))
        finally:
            self.busy -= 1

    async def pause(self, mode):
        self.gate.clear()
        turns = 0
        while self.busy:
            await asyncio.sleep(0)
            turns += 1
        self.longest_pause = max(self.longest_pause, turns)

    async def resume(self):
        self.gate.set()


class Sync(FakeSync):
    def __init__(self, world, engine):
        super().__init__(world, may_change_in_flight=True)
        self.engine = engine

    async def update_weights(self, version):
        assert not self.engine.busy
        self.engine.version = version
        return await super().update_weights(version)


def build(
    *, batch_size=4, n=1, permits=None, staleness=4, stale="pace", turns=lambda i: 1 + i % 7, count=1000,
    ledger=None, source=None, seed=0, dynamic_filter=None,
):  # fmt: skip
    """Return the parts of a run whose rollouts share their groups, and the generate function."""
    world, engine = World(random.Random(seed), delay=0.0), Versioned()
    episodes = Episodes(engine, turns)
    source, ledger = source or ListSource(count, n), ledger or MemoryLedger()
    hooks = Hooks(custom_generate_function=episodes, dynamic_sampling_filter=dynamic_filter)
    rollout = EngineRollout(
        source=source,
        ledger=ledger,
        generation=Generation(
            engine, None, LabelReward(), SamplingParams(max_new_tokens=400), hooks=hooks, load=EpisodeLoad(permits)
        ),
        flags=RolloutFlags(max_token_staleness=staleness, stale_tokens=stale),
        batch_size=batch_size,
        conversion=Conversion(),
        pool=GroupPool(batch_size=batch_size, max_staleness=staleness, stale=stale),
    )
    parts = Parts(
        trainer=FakeTrainer(world),
        sync=Sync(world, engine),
        rollout=rollout,
        source=source,
        ledger=ledger,
        device_sharing=DeviceSharing(),
        trackers=[ListTracker()],
        observer=Unobserved(),
        engine=engine,
        pool=rollout,
    )
    return parts, episodes


def run(parts, num_rollout, ahead, **changes):
    return asyncio.run(train(parts, RunSchedule(num_rollout=num_rollout, ahead=ahead, **changes), Checkpoints()))


def records(parts):
    return [metrics for step, metrics in parts.trackers[0].records if step]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**16), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(1, 2),
    st.integers(1, 5), st.sampled_from([None, 1, 3, 8]), st.booleans(),
)  # fmt: skip
def test_tokens_are_never_older_than_the_bound_and_nothing_is_cancelled(
    seed, ahead, n, slack, interval, batch_size, permits, filtered
):
    durations = random.Random(seed)
    turns = [1 + int(durations.lognormvariate(1, 1)) for _ in range(2000)]
    parts, episodes = build(
        batch_size=batch_size, n=n, permits=permits, staleness=ahead + interval - 1 + slack,
        turns=turns.__getitem__, seed=seed,
        dynamic_filter=(lambda args, samples, **kw: samples[0].group_index % 3 != 0) if filtered else None,
    )  # fmt: skip
    assert run(parts, 8, ahead, update_weights_interval=interval) == 8
    assert max(record["rollout/staleness/max"] for record in records(parts)) <= ahead + interval - 1 + slack
    assert permits is None or episodes.most <= permits
    assert episodes.num_started == episodes.num_ended, "an episode was cancelled"
    states = Counter(parts.ledger.states.values())
    assert states["trained"] == 8 * batch_size
    assert set(states) <= {"trained", "dropped"}
    assert not filtered or all(g % 3 for g, state in parts.ledger.states.items() if state == "trained")


def test_no_more_groups_are_issued_than_the_buffer_allows():
    issued = []

    class Counting(MemoryLedger):
        def issued(self, groups, rollout_id):
            super().issued(groups, rollout_id)
            states = Counter(self.states.values())
            issued.append(sum(states.values()) - states["trained"])

    parts, _ = build(ledger=Counting(), batch_size=4, staleness=9)
    run(parts, 10, ahead=2)
    assert max(issued) == 3 * 4


def test_long_episodes_do_not_stop_the_others_and_their_lengths_are_not_biased():
    turns = [40 if i % 20 == 3 else 2 for i in range(400)]
    parts, episodes = build(batch_size=5, staleness=20, turns=turns.__getitem__, permits=10)
    run(parts, 40, ahead=4)
    first = records(parts)[:3]
    assert all(record["rollout/response_len/max"] == 2 for record in first), "the first complete groups"
    assert episodes.num_started == 200
    assert sum(episodes.lengths.values()) == sum(turns[:200])


def test_finish_waits_for_requests_and_versions_never_decrease():
    parts, _ = build(batch_size=4, staleness=30, turns=lambda i: 120 if i == 1 else 3)
    seen = []

    class Watching(FakeTrainer):
        async def train(self, batch):
            for start, length in zip(batch.response_starts[:-1], batch.response_lengths, strict=True):
                seen.append(batch.columns["token_versions"][start : start + length].tolist())
            for _ in range(20):
                await asyncio.sleep(0)
            return await super().train(batch)

    object.__setattr__(parts, "trainer", Watching(parts.trainer.world))
    run(parts, 30, ahead=3)
    assert all(versions == sorted(versions) for versions in seen)
    longest = next(versions for versions in seen if len(versions) == 120)
    assert len(set(longest)) >= 5, "the episode did not span the weight updates"
    assert parts.engine.longest_pause <= 4, "more than one request"


@pytest.mark.parametrize("stale", ["mask", "drop"])
def test_old_tokens_are_masked_or_their_groups_dropped(stale):
    parts, _ = build(batch_size=4, staleness=2, stale=stale, turns=lambda i: 60 if i == 1 else 3)
    run(parts, 25, ahead=2)
    assert max(record.get("rollout/staleness/max", 0) for record in records(parts)) <= 2
    masked = sum(record.get("rollout/staleness/masked_frac", 0) for record in records(parts))
    assert (parts.ledger.states[1], parts.ledger.reasons.get(1)) == (
        ("trained", None) if stale == "mask" else ("dropped", "stale")
    )
    assert (masked > 0) == (stale == "mask")


def test_groups_are_chosen_so_that_all_can_be_trained_in_time():
    assert choose_groups([2, 2, 0], [], oldest=0, size=2) == [0, 2]
    assert choose_groups([2, 2], [0], oldest=0, size=2) is None
    assert choose_groups([2, 2, 2], [1, 1, 1], oldest=0, size=2) is None, "one of version 1 must be in this batch"
    assert choose_groups([2, 2, 1], [1, 1], oldest=0, size=2) == [0, 2]
    assert choose_groups([3, 3], [], oldest=0, size=2) == [0, 1]


def test_the_load_is_measured():
    parts, _ = build(batch_size=4, permits=3, staleness=4)
    run(parts, 4, ahead=1)
    for record in records(parts):
        assert 0 < record["perf/episodes_in_flight"] <= 3
        assert record["perf/episodes_in_flight_max"] <= 3
        assert 0 <= record["perf/env_wait_frac"] <= 1
        assert 0 <= record["perf/engine_idle_frac"] <= 1
