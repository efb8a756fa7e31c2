"""Reward functions get what their parameters name, and several are summed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from furlong.core.metric import mean
from furlong.core.outcome import Outcome
from furlong.core.sample import Sample
from furlong.errors import RewardError
from furlong.rewards.custom_reward import AsyncRewardSum, RewardSum, custom_reward
from furlong.rollout.metrics import part_metrics

SAMPLE = Sample(prompt="1+2=", response="3", label="3", metadata={"carry": False, "data_source": "sums"})


def score(function, sample=SAMPLE) -> Outcome:
    [outcome] = custom_reward(function, name="f", group=False).score(None, [sample])
    return outcome


@pytest.mark.parametrize(
    "function",
    [
        lambda response: response == "3",
        lambda response, label: response == label,
        lambda prompt, response, label, carry: (prompt, response, label, carry) == ("1+2=", "3", "3", False),
        lambda response, metadata: metadata["data_source"] == "sums",
        lambda response, sample: sample is SAMPLE,
        lambda response, *, carry, weight=1.0: weight * (not carry),
        lambda response, **columns: {"prompt", "label", "metadata", "carry", "sample"} <= columns.keys(),
        # a verifier, whatever the name of its third parameter
        lambda response, label, extra: extra["data_source"] == "sums",
        # verl's
        lambda data_source, solution_str, ground_truth, extra_info=None: (
            (data_source, solution_str, ground_truth, extra_info["carry"]) == ("sums", "3", "3", False)
        ),
        # slime's
        lambda args, sample: sample.response == "3",
        lambda args, samples: [sample.response == "3" for sample in samples],
        # TRL's
        lambda completions, carry, **columns: [
            completion == "3" and not each for completion, each in zip(completions, carry, strict=True)
        ],
    ],
)
def test_a_function_is_called_with_what_its_parameters_name(function):
    assert score(function) == Outcome.scored(1.0)


def test_a_column_of_verls_rows_is_its_extra_info():
    sample = Sample(response="3", label="3", metadata={"extra_info": {"index": 7}})
    assert score(lambda solution_str, ground_truth, extra_info: extra_info["index"], sample) == Outcome.scored(7.0)


def test_a_parameter_without_a_value_fails_the_sample_and_is_named():
    for function, columns in (
        (lambda response, answer: 1.0, "carry, data_source, prompt, response"),
        (lambda completions, answer, **columns: [1.0], "carry, data_source, label, prompts, completions"),
    ):
        outcome = score(function)
        assert outcome.kind == "failed"
        assert f"has the parameter answer, which is none of {columns}" in outcome.reason
        assert "--metadata-key" in outcome.reason


def test_the_columns_of_prompt_and_label_have_their_own_names_too():
    function = custom_reward(
        lambda question, response, answer: float(question + answer == "1+2=3"), name="f", group=False
    )
    [outcome] = function.score(SimpleNamespace(input_key="question", label_key="answer"), [SAMPLE])
    assert outcome == Outcome.scored(1.0)


def test_parameters_that_are_neither_the_response_nor_slimes_are_refused():
    for function in (lambda completion, answer: 1.0, lambda text: 1.0, lambda resp, gold, **kw: 1.0):
        with pytest.raises(RewardError, match=r"it must take \(response, label\)"):
            custom_reward(function, name="f", group=False)
    for function in (lambda _, sample: 1.0, lambda a, s: 1.0, lambda _args, item: 1.0, lambda *args: 1.0):
        assert custom_reward(function, name="f", group=False).style == "single"


def test_several_functions_are_summed_and_their_values_kept():
    def right(response, label):
        return float(response == label)

    def short(completions):
        return [-len(each) / 10 for each in completions]

    async def judged(response):
        return 0.5

    total = custom_reward(RewardSum({"right": right, "short": short}), name="sum", group=False)
    sample = Sample(response="3", label="3")
    assert total.score(None, [sample]) == [Outcome.scored(0.9)]
    assert part_metrics([sample]) == {"reward/right": mean(1.0, 1), "reward/short": mean(-0.1, 1)}
    both = custom_reward(AsyncRewardSum({"right": right, "judged": judged}), name="sum", group=False)
    assert both.is_async
    assert asyncio.run(both.score_async(None, [sample, sample], 10.0)) == [Outcome.scored(1.5)] * 2


def test_a_sample_that_one_of_several_functions_fails_to_score_is_not_scored():
    def broken(response):
        raise KeyError("answer")

    for wrong, reason in ((broken, "KeyError"), (lambda response: {"a": 1.0}, "returned a dict")):
        total = custom_reward(RewardSum({"right": lambda response: 1.0, "wrong": wrong}), name="sum", group=False)
        [outcome] = total.score(None, [SAMPLE])
        assert outcome.kind == "failed"
        assert reason in outcome.reason
