"""Samples of user functions: unusable ones are named, and those that train other tokens than the engine's fail."""

from __future__ import annotations

import pytest

from furlong.core.sample import Sample, Status, scalar_reward
from furlong.errors import DataError, RolloutError
from furlong.interfaces import Completion
from furlong.rollout.user_samples import check_sample, foreign_tokens

PROMPT = [1, 2, 3]


def completed(**changes):
    sample = Sample(index=3, group_index=1, rollout_id=3, tokens=[5, 6], label="x")
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-0.5, -0.25], text="ab", version=2)
    sample.status = Status.COMPLETED
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def test_an_unusable_field_is_named_with_its_sample_and_function():
    wrong = [
        ("rollout_log_probs", [0.5, -1.0], "log-prob of 0.5"),
        ("rollout_log_probs", [float("nan"), -1.0], "not finite"),
        ("response_length", 4, "response_length 4"),
        ("loss_mask", [1], "loss_mask has 1 entries"),
        ("tokens", [5, 6, 7, 800], "ids 0 to 99"),
        ("tokens", [5, 6, 7, "8"], "str among its tokens"),
        ("status", "done", "status 'done'"),
    ]
    for name, value, shown in wrong:
        with pytest.raises(RolloutError, match=f"mine: sample 3 has .*{shown}"):
            check_sample(completed(**{name: value}), "mine", vocab_size=100)


def test_usable_samples_pass():
    sample = completed(status="truncated", rollout_log_probs=[1e-6, 0.0])
    check_sample(sample, "mine", vocab_size=100)
    assert sample.status is Status.TRUNCATED


def test_a_reward_that_is_not_a_number_is_named_with_its_key():
    for value in ("high", [1], {"a": 1}, None):
        sample = completed(reward={"score": value})
        with pytest.raises(DataError, match="sample 3"):
            scalar_reward(sample, "score")


def problem(parts: list[tuple[list[int], int]], *answered: tuple[list[int], list[int]], masked: bool = True) -> str:
    """The problem of a sample of the prompt and parts (tokens, loss mask); `answered`: input ids and completions."""
    response = [token for tokens, _ in parts for token in tokens]
    mask = [each for tokens, trained in parts for each in [trained] * len(tokens)] if masked else None
    sample = Sample(tokens=[*PROMPT, *response], response_length=len(response), loss_mask=mask)
    return foreign_tokens(sample, [(ids, Completion(done, [], [], "stop")) for ids, done in answered])


def test_tokens_of_the_engine_in_their_context_pass():
    turns = [([10, 11], 1), ([20], 0), ([12, 13], 1)]
    assert problem(turns, (PROMPT, [10, 11]), ([*PROMPT, 10, 11, 20], [12, 13])) == ""
    assert problem([([10, 11, 12], 1)], (PROMPT, [10, 11]), ([*PROMPT, 10, 11], [12]), masked=False) == ""
    equal = [([10], 1), ([20], 0), ([10], 1)]  # belongs to the request with the right context
    assert problem(equal, ([9], [10]), (PROMPT, [10]), ([*PROMPT, 10, 20], [10])) == ""
    assert problem([([10, 11], 1), ([20], 0)], (PROMPT, [10, 11, 12, 13])) == "", "a completion that was cut"


def test_another_context_is_named_with_its_place_and_lengths():
    turns = [([10, 11], 1), ([20], 0), ([12, 13], 1)]
    cut = problem(turns, (PROMPT, [10, 11]), ([*PROMPT, 20], [12, 13]))  # the first answer was left out
    assert "tokens 3 to 5 were sampled after 4 tokens and are trained after 6 (the first 3 are equal)" in cut
    assert "tokens 0 to 2 " in problem([([10, 11], 1)], ([99, *PROMPT], [10, 11]), masked=False)
    assert "tokens 2 to 3 " in problem([([10, 11, 12], 1)], (PROMPT, [10, 11]), (PROMPT, [12]), masked=False)


def test_text_that_was_encoded_again_is_named_with_its_place():
    assert "tokens from 0 on which the engine did not sample" in problem([([50, 51], 1)], (PROMPT, [10, 11]))
    assert "tokens from 0 on which" in problem([([10, 50], 1)], (PROMPT, [10, 11]))
