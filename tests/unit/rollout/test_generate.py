"""Concurrency of generation and scoring, and its timers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fakes_rollout import LabelReward, ListSource, MemoryLedger, ScriptedEngine
from furlong.config.hooks import Hooks
from furlong.config.sections import RolloutFlags
from furlong.core.metric import values
from furlong.interfaces import Completion, SamplingParams
from furlong.rollout import episodes
from furlong.rollout.engine_rollout import EngineRollout
from furlong.rollout.episodes import EpisodeLoad, RewardWait
from furlong.rollout.filters import DynamicFilterOutput
from furlong.rollout.generate import EvalSet, Generation
from furlong.rollout.policy import Policy
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
    monkeypatch.setattr(episodes, "perf_counter", clock)
    return clock


def test_seconds_count_while_scoring_without_generation(clock: Clock) -> None:
    wait = RewardWait()
    with wait.phase(generating=1):
        clock.goes_on(1)  # generated
    clock.goes_on(2)  # neither
    with wait.phase(scoring=1):
        with wait.phase(generating=1):
            clock.goes_on(4)  # both
        clock.goes_on(8)  # only scored
        with wait.phase(scoring=1):
            clock.goes_on(16)  # two of them are one wait
    assert wait.seconds == 24


def test_an_exception_ends_the_timed_block(clock: Clock) -> None:
    wait = RewardWait()
    for phase in ("generating", "scoring"):
        with pytest.raises(ValueError, match="mine"), wait.phase(**{phase: 1}):
            raise ValueError("mine")
    with wait.phase(scoring=1):
        clock.goes_on(1)
    clock.goes_on(2)
    with wait.phase(generating=1):
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
    params = SamplingParams(max_new_tokens=4)
    how = Generation(ScriptedEngine(answer), None, SlowReward(), params, hooks=Hooks(**hooks), args=args)
    return EngineRollout(
        source=ListSource(8),
        ledger=MemoryLedger(),
        generation=how,
        flags=RolloutFlags(),
        batch_size=2,
        in_order=True,
        conversion=Conversion(),
        eval_sets=[EvalSet("held_out", lambda: ListSource(3).next_groups(3), how)],
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


def timed_call(function):
    """What a function answers, and the seconds that it blocked."""
    timer = EpisodeLoad()

    async def body():
        return await timer.timed(function)

    return asyncio.run(body()), timer.take_blocked()


async def blocks():
    time.sleep(0.06)
    await asyncio.sleep(0)
    time.sleep(0.06)
    return "made"


async def waits():
    await asyncio.sleep(0.2)
    return "made"


def test_blocking_sleep_is_counted_and_awaited_sleep_is_not():
    answer, seconds = timed_call(blocks)
    assert answer == "made"
    assert seconds >= 0.12
    assert timed_call(waits)[0] == "made"

    async def both():
        timer = EpisodeLoad()
        await asyncio.gather(*(timer.timed(waits) for _ in range(8)))
        return timer.take_blocked()

    assert asyncio.run(both()) < 8 * 0.2  # for so long they waited


def test_errors_and_cancellation_reach_the_function_and_its_caller():
    seen = []

    async def raises():
        await asyncio.sleep(0)
        raise ValueError("mine")

    async def is_cancelled():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(ValueError, match="mine"):
        timed_call(raises)

    async def body():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await EpisodeLoad().timed(is_cancelled)

    asyncio.run(body())
    assert seen == ["cancelled"]


def test_the_prefix_hit_fraction_is_that_of_all_episodes_since_the_last_step():
    load = EpisodeLoad()
    load.prefixes(10, 10)
    load.prefixes(30, 0)
    assert values(load.take())["rollout/prefix_cache_hit_frac"] == 0.25
    assert "rollout/prefix_cache_hit_frac" not in load.take()


def test_a_turn_repeats_an_earlier_prompt_of_its_episode_under_the_same_weights():
    calls = [  # prompt, weights of the answer, cached tokens
        ([1, 2, 3], 4, 0),
        ([9, 9], 4, 0),  # another role
        ([1, 2, 3, 7, 8], 4, 2),
        ([9, 9, 7], 4, 2),
        ([1, 2, 3, 7, 8, 9], 5, 0),  # new weights
        ([1, 2, 3, 7, 8, 9, 10], 5, 4),
    ]
    answers = iter(calls)

    class Engine:
        caches_prefixes, scored_temperatures = True, None

        async def generate(self, *_: object, **__: object) -> Completion:
            _, version, cached = next(answers)
            return Completion([7], [-1.0], [version], "stop", cached_tokens=cached)

    policy = Policy(Engine(), None, "s")  # pyright: ignore[reportArgumentType]

    async def episode() -> None:
        for ids, *_ in calls:
            await policy.generate(ids)

    asyncio.run(episode())
    assert values(policy.load.take())["rollout/prefix_cache_hit_frac"] == pytest.approx((2 + 2 + 4) / (3 + 2 + 6))
