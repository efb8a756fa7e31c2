"""What the engine was asked with, compared with the context that a sample trains its tokens in."""

from __future__ import annotations

from furlong.core.sample import Sample
from furlong.rollout.asked_context import ContextDifference, context_differences

PROMPT = [1, 2, 3]


def sample_of(*parts: tuple[list[int], int], masked: bool = True) -> Sample:
    """A sample of the prompt and these parts, each tokens and their loss mask."""
    response = [token for tokens, _ in parts for token in tokens]
    mask = [each for tokens, trained in parts for each in [trained] * len(tokens)] if masked else None
    return Sample(tokens=[*PROMPT, *response], response_length=len(response), loss_mask=mask)


def test_turns_that_were_asked_with_the_whole_history_have_no_difference():
    sample = sample_of(([10, 11], 1), ([20], 0), ([12, 13], 1))
    asked = [PROMPT, [*PROMPT, 10, 11, 20]]
    assert context_differences(sample, asked, [[10, 11], [12, 13]]) == []


def test_a_turn_that_was_asked_with_a_cut_history_is_named_with_its_place_and_lengths():
    sample = sample_of(([10, 11], 1), ([20], 0), ([12, 13], 1))
    asked = [PROMPT, [*PROMPT, 20]]  # the first answer was left out
    [found] = context_differences(sample, asked, [[10, 11], [12, 13]])
    assert found == ContextDifference(start=3, stop=5, asked_len=4, trained_len=6, common_len=3)
    assert "response tokens 3 to 5" in str(found)


def test_a_prompt_that_is_not_kept_concerns_the_first_turn():
    sample = sample_of(([10, 11], 1), masked=False)
    [found] = context_differences(sample, [[99, *PROMPT]], [[10, 11]])
    assert (found.start, found.stop, found.common_len) == (0, 2, 0)


def test_completions_in_a_row_without_a_mask_are_followed():
    sample = sample_of(([10, 11, 12], 1), masked=False)
    right = [PROMPT, [*PROMPT, 10, 11]]
    assert context_differences(sample, right, [[10, 11], [12]]) == []
    [found] = context_differences(sample, [PROMPT, PROMPT], [[10, 11], [12]])
    assert (found.start, found.stop) == (2, 3)


def test_equal_completions_of_several_requests_belong_to_the_one_with_the_right_context():
    sample = sample_of(([10], 1), ([20], 0), ([10], 1))
    asked = [[9], PROMPT, [*PROMPT, 10, 20]]
    assert context_differences(sample, asked, [[10], [10], [10]]) == []


def test_a_completion_that_was_cut_and_tokens_of_unknown_origin_are_no_difference():
    cut = sample_of(([10, 11], 1), ([20], 0))
    assert context_differences(cut, [PROMPT], [[10, 11, 12, 13]]) == []
    assert context_differences(sample_of(([50, 51], 1)), [PROMPT], [[10]]) == []
    assert context_differences(sample_of(([50], 1)), [], []) == []
