"""`RewardWait` counts the seconds in which samples are scored and none is generated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fakes_rollout import LabelReward, ListSource, MemoryLedger, ScriptedEngine
from furlong.config.hooks import Hooks
from furlong.config.sections import RolloutFlags
from furlong.core.metric import values
from furlong.interfaces import SamplingParams
from furlong.rollout import timers
from furlong.rollout.engine_rollout import EngineRollout
from furlong.rollout.evaluate import EvalSet
from furlong.rollout.filters import DynamicFilterOutput
from furlong.rollout.generate import Generation
from furlong.rollout.timers import RewardWait
from furlong.rollout.train_batch import Conversion


class Clock:
    """Seconds that pass when something says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def goes_on(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(timers, "perf_counter", clock)
    return clock


def test_seconds_count_while_scoring_without_generation(clock: Clock) -> None:
    wait = RewardWait()
    with wait.generating():
        clock.goes_on(1)  # generated
    clock.goes_on(2)  # neither
    with wait.scoring():
        with wait.generating():
            clock.goes_on(4)  # both
        clock.goes_on(8)  # only scored
        with wait.scoring():
            clock.goes_on(16)  # two of them are one wait
    assert wait.seconds == 24


def test_an_exception_ends_the_timed_block(clock: Clock) -> None:
    wait = RewardWait()
    for phase in (wait.generating, wait.scoring):
        with pytest.raises(ValueError, match="mine"), phase():
            raise ValueError("mine")
    with wait.scoring():
        clock.goes_on(1)
    clock.goes_on(2)
    with wait.generating():
        clock.goes_on(4)
    assert wait.seconds == 1


def timed(clock: Clock, *, generate_s: float, reward_s: float, **hooks):
    """A rollout whose requests take `generate_s` and whose reward calls `reward_s` each, one after the other."""

    class SlowReward(LabelReward):
        async def __call__(self, group):
            for _ in range(8):  # until all requests have been answered
                await asyncio.sleep(0)
            clock.goes_on(reward_s)
            return await super().__call__(group)

    def answer(prompt: list[int], params: SamplingParams) -> list[int]:
        clock.goes_on(generate_s)
        return [1]

    args = SimpleNamespace(reward_key=None)
    how, reward = Generation(SamplingParams(max_new_tokens=4), hooks=Hooks(**hooks), args=args), SlowReward()
    return EngineRollout(
        engine=ScriptedEngine(answer),
        tokenizer=None,
        source=ListSource(8),
        reward=reward,
        ledger=MemoryLedger(),
        generation=how,
        flags=RolloutFlags(),
        batch_size=2,
        in_order=True,
        conversion=Conversion(),
        eval_sets=[EvalSet("held_out", lambda: ListSource(3).next_groups(3), how, reward)],
    )


def test_a_rollout_has_the_seconds_after_its_last_generation(clock: Clock) -> None:
    seen = values(asyncio.run(timed(clock, generate_s=1, reward_s=10).produce(0)).metrics)
    assert seen["perf/reward_wait_time"] == 20


def test_rewards_between_two_rounds_of_groups_count(clock: Clock) -> None:
    def not_the_first(args, samples):
        return DynamicFilterOutput(samples[0].group_index > 1)

    seen = values(
        asyncio.run(timed(clock, generate_s=1, reward_s=10, dynamic_sampling_filter=not_the_first).produce(0)).metrics
    )
    assert seen["perf/reward_wait_time"] == 40


def test_an_evaluation_is_timed_separately(clock: Clock) -> None:
    seen = values(asyncio.run(timed(clock, generate_s=1, reward_s=10).evaluate(0)))
    assert seen["perf/eval_reward_wait_time"] == 30
