"""Every issued group ends exactly once, despite failures, filters, aborts and rollouts in flight."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_loop import FakeSync, FakeTrainer, ListTracker, Unobserved, World
from fakes_rollout import LabelReward, ListSource, MemoryLedger, ScriptedEngine
from furlong.config.hooks import Hooks
from furlong.config.sections import RolloutFlags
from furlong.core.outcome import Outcome
from furlong.core.sample import Sample, Status
from furlong.errors import DataError, EngineError, RolloutError
from furlong.interfaces import DeviceSharing, Parts, SamplingParams
from furlong.loop.checkpoints import Checkpoints
from furlong.loop.schedule import RunSchedule
from furlong.loop.train import train
from furlong.rollout.engine_rollout import EngineRollout
from furlong.rollout.filters import DynamicFilterOutput
from furlong.rollout.generate import Generation
from furlong.rollout.train_batch import Conversion

MAX_NEW = 6


class Erratic(ScriptedEngine):
    """Takes a random number of loop turns; the response depends only on the prompt."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(lambda prompt, params: [3] * (1 + prompt[0] % MAX_NEW))
        self.rng = rng

    async def generate(self, prompt, params, *, session=None):
        stop = self._running.setdefault(str(session), asyncio.Event())
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
            if stop.is_set():
                break
        return await super().generate(prompt, params, session=session)


class ErraticReward(LabelReward):
    """Takes a random number of loop turns, and fails at random."""

    def __init__(self, rng: random.Random, failing: float) -> None:
        self.rng, self.failing = rng, failing

    async def __call__(self, group):
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        scored = await super().__call__(group)
        return [Outcome.failed("bad luck") if self.rng.random() < self.failing else each for each in scored]


@st.composite
def situations(draw):
    batch = draw(st.integers(1, 4))
    return {
        "seed": draw(st.integers(0, 2**16)),
        "count": draw(st.integers(0, 30)),
        "n": draw(st.integers(1, 3)),
        "batch_size": batch,
        "submit_size": batch + draw(st.integers(0, 4)),
        "num_rollout": draw(st.integers(1, 5)),
        "ahead": draw(st.integers(0, 3)),
        "in_order": draw(st.booleans()),
        "partial": draw(st.booleans()),
        "mask_offpolicy": draw(st.booleans()),
        "filter": draw(st.sampled_from([None, "drop", "spare"])),
        "failing": draw(st.sampled_from([0.0, 0.3])),
        "custom": draw(st.sampled_from([None, "plain", "failing", "fan_out"])),
    }


def a_filter(kind, rng):
    if kind is None:
        return None

    def decide(args, samples, **kwargs):
        keep = samples[0].group_index % 3 != 0
        return DynamicFilterOutput(keep, "" if keep else "third", keep_when_insufficient=kind == "spare")

    return decide


def a_generate(kind, rng):
    if kind is None:
        return None

    async def generate(args, sample, params):
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        sample.append_response_tokens(tokens=[1, 2], log_probs=[-1.0, -1.0])
        sample.token_versions = [0, 0]
        if kind == "failing" and rng.random() < 0.3:
            raise ValueError("tool")
        return [sample, Sample.from_dict(sample.to_dict())] if kind == "fan_out" else sample

    return generate


def parts_of(how, ledger, source, rng):
    world = World(rng)
    engine = Erratic(rng)
    rollout = EngineRollout(
        source=source,
        ledger=ledger,
        generation=Generation(
            engine,
            None,
            ErraticReward(rng, how["failing"]),
            SamplingParams(max_new_tokens=MAX_NEW),
            hooks=Hooks(
                custom_generate_function=a_generate(how["custom"], rng),
                dynamic_sampling_filter=a_filter(how["filter"], rng),
            ),
            args=SimpleNamespace(reward_key=None),
        ),
        flags=RolloutFlags(
            over_sampling_batch_size=how["submit_size"],
            partial_rollout=how["partial"],
            mask_offpolicy_in_partial_rollout=how["partial"] and how["mask_offpolicy"],
        ),
        batch_size=how["batch_size"],
        in_order=how["in_order"] and not how["partial"],
        conversion=Conversion(),
    )
    return Parts(
        trainer=FakeTrainer(world),
        sync=FakeSync(world),
        rollout=rollout,
        source=source,
        ledger=ledger,
        device_sharing=DeviceSharing(),
        trackers=[ListTracker()],
        observer=Unobserved(),
        engine=engine,
    )


def run_loop(parts, plan):
    """Run the loop and return the number of trained rollouts, 0 if the data ended before the first was full."""
    try:
        return asyncio.run(train(parts, plan, Checkpoints()))
    except DataError as error:
        if not str(error).startswith("nothing was trained"):
            raise
        return 0


@settings(max_examples=200, deadline=None)
@given(situations())
def test_every_group_ends_exactly_once(how):
    rng = random.Random(how["seed"])
    ledger, source = MemoryLedger(), ListSource(how["count"], how["n"])
    trained: Counter[int] = Counter()

    class Watching(FakeTrainer):
        async def train(self, batch):
            assert len(set(batch.group_ids.tolist())) == how["batch_size"]
            trained.update(set(batch.group_ids.tolist()))
            sizes = Counter(batch.group_ids.tolist())
            fan_out = 2 if how["custom"] == "fan_out" else 1
            assert set(sizes.values()) == {how["n"] * fan_out}
            return await super().train(batch)

    parts = parts_of(how, ledger, source, rng)
    object.__setattr__(parts, "trainer", Watching(World(rng)))
    plan = RunSchedule(num_rollout=how["num_rollout"], ahead=how["ahead"])
    try:
        steps = run_loop(parts, plan)
    except RolloutError:  # only if everything fails
        assert how["failing"] or how["custom"] == "failing"
        return

    # MemoryLedger rejects invalid transitions: a group trained twice, dropped after training, lost and so on.
    by_state = {state: {g for g, s in ledger.states.items() if s == state} for state in set(ledger.states.values())}
    assert set(by_state) <= {"trained", "dropped", "returned"}
    assert by_state.get("trained", set()) == set(trained)
    assert set(trained.values()) <= {1}
    assert len(trained) == steps * how["batch_size"]
    assert sorted(g.index for g in source.returned) == sorted(by_state.get("returned", set()))
    assert set(ledger.states) == set(range(source.next))
    if steps < how["num_rollout"]:
        assert source.next == how["count"]
    for group in source.returned:
        assert len(group) == how["n"]
        for sample in group.samples:
            assert sample.status is not Status.FAILED or how["partial"]
            if not how["partial"] or how["custom"]:
                assert (sample.response_length, len(sample.tokens), sample.reward) == (0, 2, None)


@settings(max_examples=60, deadline=None)
@given(situations(), st.integers(0, 2**16))
def test_batches_do_not_depend_on_timing_where_groups_are_judged_in_order(how, other_seed):
    how = how | {"in_order": True, "partial": False, "failing": 0.0, "ahead": min(how["ahead"], 1)}
    if how["custom"] == "failing":
        how["custom"] = "plain"

    def run(seed):
        batches = []

        class Keeping(FakeTrainer):
            async def train(self, batch):
                batches.append((batch.tokens.tolist(), batch.group_ids.tolist(), batch.rewards.tolist()))
                return {}

        rng = random.Random(seed)
        parts = parts_of(how, MemoryLedger(), ListSource(how["count"], how["n"]), rng)
        object.__setattr__(parts, "trainer", Keeping(World(rng)))
        run_loop(parts, RunSchedule(num_rollout=how["num_rollout"], ahead=how["ahead"]))
        returned = parts.rollout._source.returned
        return batches, [g.index for g in returned]

    assert run(how["seed"]) == run(other_seed)


@pytest.mark.parametrize("ahead", [0, 2])
def test_engine_that_fails_ends_the_run_with_its_error_and_leaves_no_task(ahead):
    class Failing(Erratic):
        async def generate(self, prompt, params, *, session=None):
            if prompt[0] == 5:
                raise EngineError("out of memory")
            return await super().generate(prompt, params, session=session)

    async def run():
        how = {
            "batch_size": 3, "submit_size": 3, "in_order": True, "partial": False, "mask_offpolicy": False,
            "filter": None, "failing": 0.0, "custom": None,
        }  # fmt: skip
        rng = random.Random(0)
        parts = parts_of(how, MemoryLedger(), ListSource(20), rng)
        parts.rollout._generation = dataclasses.replace(parts.rollout._generation, engine=Failing(rng))
        with pytest.raises(EngineError, match="out of memory"):
            await train(parts, RunSchedule(num_rollout=6, ahead=ahead), Checkpoints())
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
