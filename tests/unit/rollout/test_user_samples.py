"""Samples that user functions make unusable: the error names the sample and the function."""

from __future__ import annotations

import asyncio

import pytest

from fakes_rollout import ScriptedEngine
from furlong.core.outcome import Outcome
from furlong.core.sample import Sample, Status, scalar_reward
from furlong.errors import DataError, RolloutError
from furlong.interfaces import SamplingParams
from furlong.rollout.agent import check_group, check_sample
from furlong.rollout.generate import Generation, score


def completed(**changes):
    sample = Sample(index=3, group_index=1, rollout_id=3, tokens=[5, 6], label="x")
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-0.5, -0.25], text="ab", version=2)
    sample.status = Status.COMPLETED
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


WRONG = [
    ("metadata", None),
    ("metadata", ["a"]),
    ("train_metadata", "text"),
    ("rollout_log_probs", [0.5, -1.0]),
    ("token_versions", [10**30, 1]),
    ("token_versions", ["1", "2"]),
    ("token_versions", [-2, 1]),
    ("index", "three"),
    ("index", 10**30),
    ("response_length", 1.0),
    ("status", "done"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_an_unusable_field_is_named_with_its_sample_and_function(name, value):
    with pytest.raises(RolloutError, match=f"mine: (a )?sample.*{name if name != 'rollout_log_probs' else 'log-prob'}"):
        check_sample(completed(**{name: value}), "mine", vocab_size=100)


def test_usable_samples_pass():
    sample = completed(status="truncated", rollout_log_probs=[1e-6, 0.0])
    check_sample(sample, "mine", vocab_size=100)
    assert sample.status is Status.TRUNCATED
    check_group(sample, 1, "mine")
    with pytest.raises(RolloutError, match="mine changed group_index of sample 3 from 2 to 1"):
        check_group(sample, 2, "mine")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("status", Status.ABORTED),
        ("status", Status.PENDING),
        ("group_index", 2),
        ("metadata", None),
        ("token_versions", [10**30, 1]),
        ("rollout_log_probs", [2.0, 2.0]),
    ],
)
def test_a_reward_that_makes_its_sample_unusable_fails_it(name, value):
    async def reward(samples):
        for sample in samples[:1]:
            setattr(sample, name, value)
        return [Outcome.scored(1.0)] * len(samples)

    samples = [completed(), completed(index=4)]
    generation = Generation(engine=ScriptedEngine(), tokenizer=None, reward=reward, params=SamplingParams())
    asyncio.run(score(samples, generation))
    failed, scored = samples
    assert failed.status is Status.FAILED
    assert "the reward function" in failed.outcome.reason
    assert (failed.group_index, failed.index, failed.metadata, failed.tokens) == (1, 3, {}, [5, 6])
    assert (scored.status, scored.reward) == (Status.COMPLETED, 1.0)


@pytest.mark.parametrize("value", ["high", [1], {"a": 1}, None])
def test_a_reward_that_is_not_a_number_is_named_with_its_key(value):
    sample = completed(reward={"score": value})
    with pytest.raises(DataError, match="sample 3"):
        scalar_reward(sample, "score")
