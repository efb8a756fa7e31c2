"""Episodes end at limits of turns, tokens and time with what was sampled; infrastructure failures are repeated once."""

from __future__ import annotations

import asyncio

import pytest

from fakes_rollout import LabelReward, ListSource, ScriptedEngine
from furlong import InfraError
from furlong.config.hooks import Hooks
from furlong.config.sections import RolloutFlags
from furlong.core.metric import values
from furlong.core.sample import Group, Sample, Status
from furlong.interfaces import SamplingParams
from furlong.rollout.agent import policy
from furlong.rollout.engine_rollout import EngineRollout
from furlong.rollout.generate import Generation
from furlong.rollout.train_batch import Conversion


async def endless(args, sample, params):
    """Take turns until the policy ends the episode."""
    while True:
        turn = await policy().generate(sample.tokens, **{**params, "max_new_tokens": 2})
        if not turn.tokens:
            return sample
        sample.append_response_tokens(
            tokens=turn.tokens, log_probs=turn.log_probs, version=turn.versions, text=turn.text
        )


async def with_a_tool_that_hangs(args, sample, params):
    turn = await policy().generate(sample.tokens, **params)
    sample.append_response_tokens(tokens=turn.tokens, log_probs=turn.log_probs, version=turn.versions, text=turn.text)
    await asyncio.sleep(600)


async def slow(args, sample, params):
    while True:
        turn = await policy().generate(sample.tokens, **{**params, "max_new_tokens": 1})
        sample.append_response_tokens(
            tokens=turn.tokens, log_probs=turn.log_probs, version=turn.versions, text=turn.text
        )
        await asyncio.sleep(0.005)


async def idle(args, sample, params):
    await asyncio.sleep(600)


def produce(function, *, engine=None, count=2, n=2, batch_size=2, **limits):
    engine = engine or ScriptedEngine(lambda prompt, params: [7] * params.max_new_tokens)
    kept: list[Group] = []
    rollout = EngineRollout(
        source=ListSource(count, n),
        ledger=_Ledger(),
        generation=Generation(
            engine, None, LabelReward(), SamplingParams(max_new_tokens=4),
            hooks=Hooks(custom_generate_function=function), flags=RolloutFlags(**limits),
        ),
        flags=RolloutFlags(),
        batch_size=batch_size,
        conversion=Conversion(),
        on_groups=lambda rollout_id, groups: kept.extend(groups),
    )  # fmt: skip
    batch = asyncio.run(rollout.produce(0))
    assert batch is not None
    return values(batch.metrics), [sample for group in kept for sample in group.samples]


class _Ledger:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def test_a_limit_ends_the_episode_and_its_tokens_are_scored_and_trained():
    cases = [
        (endless, {"max_turns": 3}, "turns", 6), (endless, {"max_episode_tokens": 5}, "tokens", 5),
        (with_a_tool_that_hangs, {"tool_timeout": 0.05}, "tool_time", 4),
        (with_a_tool_that_hangs, {"episode_timeout": 0.05}, "episode_time", 4),
        (slow, {"episode_timeout": 0.2, "tool_timeout": 30.0}, "episode_time", None),
    ]  # fmt: skip
    for function, limits, name, length in cases:
        metrics, samples = produce(function, **limits)
        assert [sample.status for sample in samples] == [Status.TRUNCATED] * 4
        assert {sample.metadata["episode_limit"] for sample in samples} == {name}
        assert [sample.reward for sample in samples] == [0, 1, 0, 1]
        assert length is None or {sample.response_length for sample in samples} == {length}
        assert metrics[f"rollout/episodes/{'agent_error' if name == 'tool_time' else 'policy_limit'}"] == 4


def test_a_turn_that_takes_too_long_ends_the_episode_without_its_tokens():
    class Slow(ScriptedEngine):
        async def generate(self, prompt, params, *, session=None):
            if len(prompt) > 4:
                await asyncio.sleep(600)
            return await super().generate(prompt, params, session=session)

    engine = Slow(lambda prompt, params: [7] * params.max_new_tokens)
    metrics, samples = produce(endless, engine=engine, turn_timeout=0.05)
    assert {sample.metadata["episode_limit"] for sample in samples} == {"turn_time"}
    assert {sample.response_length for sample in samples} == {4}
    assert metrics["rollout/episodes/policy_limit"] == 4


def test_an_episode_that_sampled_nothing_in_time_fails_and_its_siblings_are_trained():
    async def one_idle(args, sample, params):
        return await (idle if sample.index == 1 else endless)(args, sample, params)

    metrics, samples = produce(one_idle, episode_timeout=0.05, max_turns=2)
    failed = [sample for sample in samples if sample.status is Status.FAILED]
    assert [sample.index for sample in failed] == [1]
    assert failed[0].outcome.kind == "timed_out"
    assert "episode_time" in failed[0].outcome.reason
    assert metrics["rollout/episodes/agent_error"] == 1


@pytest.mark.parametrize("failures", [1, 2])
def test_an_infrastructure_failure_starts_the_sample_once_more(failures):
    calls: list[int] = []

    async def flaky(args, sample, params):
        calls.append(sample.index)
        sample.metadata["seen"] = len(calls)
        if sample.index == 1 and calls.count(1) <= failures:
            sample.tokens.append(9)
            raise InfraError("the sandbox is gone")
        sample.append_response_tokens(tokens=[5], log_probs=[-0.5], version=0)
        sample.status = Status.COMPLETED
        return sample

    metrics, samples = produce(flaky)
    assert sorted(calls) == [0, 1, 1, 2, 3]
    assert metrics["rollout/episodes/reissued"] == 1
    [again] = [sample for sample in samples if sample.index == 1]
    if failures == 1:
        assert (again.status, again.tokens, again.reward) == (Status.COMPLETED, [0, 0, 5], 1)
    else:
        assert (again.status, again.outcome.kind, again.reward) == (Status.FAILED, "infra", None)
        assert metrics["rollout/episodes/infra"] == metrics["rollout/generate_infra"] == 1
    assert all(sample.status is Status.COMPLETED for sample in samples if sample.index != 1)


def test_a_function_that_ignores_one_cancellation_is_still_ended():
    async def stubborn(args, sample, params):
        try:
            return await with_a_tool_that_hangs(args, sample, params)
        except asyncio.CancelledError:
            await asyncio.sleep(600)

    _, samples = produce(stubborn, count=1, n=1, batch_size=1, episode_timeout=0.05)
    assert [type(sample) for sample in samples] == [Sample]
    assert samples[0].metadata["episode_limit"] == "episode_time"
