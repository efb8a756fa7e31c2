from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

from furlong.core.outcome import Outcome
from furlong.core.sample import Sample
from furlong.environments import Episode, Rubric
from furlong.errors import ConfigError
from furlong.rewards.group_reward import GroupReward


def exact(episode: Episode) -> float:
    return float(episode.answer == episode.label)


async def style(episode: Episode) -> int:
    return len(episode.answer)


def rank(episodes: list[Episode]) -> list[float]:
    return [float(i) for i, _ in enumerate(episodes)]


def broken(episode: Episode) -> float:
    raise KeyError(episode.label)


def sample(answer: str, label: str = "3", **metadata: Any) -> Sample:
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": answer}]
    return Sample(label=label, metadata={"messages": messages, **metadata}, status=Sample.Status.COMPLETED)


def scored(rubric: Rubric, *samples: Sample) -> list[float | Outcome]:
    return asyncio.run(rubric.of_group(None, samples))


def test_the_reward_is_the_weighted_sum_and_each_part_is_recorded():
    first = sample("3")
    assert scored(Rubric(exact, (style, 0.1)), first) == [pytest.approx(1.1)]
    assert first.metadata["rewards"] == {"exact": 1.0, "style": 1.0}


def test_rewards_of_steps_are_added():
    assert scored(Rubric(exact), sample("3", step_rewards=[0.5, 0.25])) == [1.75]


def test_a_function_of_a_group_gets_all_episodes():
    samples = [sample("3"), sample("4"), sample("5")]
    rubric = Rubric(exact, (rank, 2.0))
    assert rubric.has_group_parts
    assert scored(rubric, *samples) == [1.0, 2.0, 4.0]


def test_a_failed_part_is_named_and_fails_its_sample_only_with_a_weight():
    (outcome,) = scored(Rubric(exact, broken), first := sample("3"))
    assert isinstance(outcome, Outcome)
    assert outcome.kind == "failed"
    assert "broken" in outcome.reason
    assert "KeyError" in outcome.reason
    assert list(first.metadata["rewards_failed"]) == ["broken"]
    assert scored(Rubric(exact, metrics=[broken]), second := sample("3")) == [1.0]
    assert list(second.metadata["rewards_failed"]) == ["broken"]


@pytest.mark.parametrize("value", [None, float("nan"), "1", 10**400, [1.0]])
def test_a_part_that_returns_no_number_is_named(value: Any):
    def odd(episode: Episode) -> Any:
        return value

    (outcome,) = scored(Rubric(odd), sample("3"))
    assert isinstance(outcome, Outcome)
    assert "odd returned" in outcome.reason


def test_a_group_function_with_another_number_of_values_fails_the_group():
    def one(episodes: list[Episode]) -> list[float]:
        return [1.0]

    outcomes = scored(Rubric(one), sample("3"), sample("4"))
    assert [isinstance(each, Outcome) and "one returned" in each.reason for each in outcomes] == [True, True]


def test_parts_that_cannot_be_called_are_refused():
    cases = [
        ("exact",), ((exact, "1"),), ((exact, float("inf")),), (exact, exact), (lambda episode: 0.0,), (print,),
    ]  # fmt: skip
    for parts in cases:
        with pytest.raises(ConfigError, match="rubric"):
            Rubric(*parts)


def test_an_episode_has_the_answers_and_tool_calls_of_the_policy():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "assistant", "content": "3"}]
    episode = Episode.of(Sample(metadata={"messages": messages, "info": {"tries": 2}}))
    assert episode.answer == "3"
    assert episode.tool_calls == [{"name": "add", "arguments": '{"a": 1}'}]
    assert episode.info == {"tries": 2}
    assert Episode.of(Sample(response="4")).answer == "4"


@pytest.mark.parametrize(("name", "rewards"), [("Env.rubric", [1.0, 0.0]), ("Env.ranked.of_group", [1.0, 1.0])])
def test_reward_workers_load_the_rubric_of_a_class(tmp_path: Path, name: str, rewards: list[float]):
    (tmp_path / "env.py").write_text(
        textwrap.dedent("""
        from furlong.environments import Rubric

        def exact(episode):
            return float(episode.answer == episode.label)

        def rank(episodes):
            return range(len(episodes))

        class Env:
            rubric = Rubric(exact)
            ranked = Rubric(exact, rank)
        """)
    )
    samples = [sample("3"), sample("4")]
    for each in samples:
        each.custom_rm_path = f"{tmp_path}/env.py:{name}"

    async def run() -> list[Outcome]:
        reward = GroupReward(num_workers=1)
        try:
            return await reward(samples)
        finally:
            await reward.close()

    assert [outcome.reward for outcome in asyncio.run(run())] == rewards
    assert samples[0].metadata["rewards"]["exact"] == 1.0
