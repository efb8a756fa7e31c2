from __future__ import annotations

import pytest

from furlong.core.sample import Sample
from furlong.errors import ConfigError, DataError
from furlong.rewards import algebra
from furlong.rewards.math_text import last_boxed, number_from
from furlong.rewards.verifiers import (
    dapo_score,
    f1_score,
    find_verifier,
    gpqa_score,
    quick_deepscaler,
    quick_math,
    random_score,
)


def test_last_boxed_is_the_last_complete_box():
    cases = [
        (r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{if } x \in \{1, 2\}}", r"\text{if } x \in \{1, 2\}"), (r"\boxed{a \} b}", r"a \} b"),
        (r"\boxed{outer \boxed{inner}}", "inner"), (r"\fbox{3}", "3"), (r"\box{3}", None), (r"\fboxed{3}", "3"),
        (r"\boxed {4}", "4"), (r"\boxed{1}, so \boxed{2", "1"), (r"\boxed{2", None), (r"\boxed{}", ""),
        ("no box", None),
    ]  # fmt: skip
    for text, content in cases:
        assert last_boxed(text) == content


CHOICES = {"choices": ["red", "green", "blue", "dark blue"]}

EQUAL = [
    (r"\frac{1}{2}", "0.5"), (r"\dfrac{1}{2}", r"\tfrac12"), ("1/2", r"\frac{1}{2}"), (r"2\frac{1}{3}", "7/3"),
    ("1 1/2", "1.5"), ("1,024", "1024"), (r"1{,}024", "1024"), ("7.0", "7"), ("1e3", "1000"),
    (r"\sqrt{8}", r"2\sqrt{2}"), (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"), ("[1,2)", r"\left[1, 2\right)"),
    (r"(-\infty, 3) \cup (5, \infty)", r"(5,\infty)\cup(-\infty,3)"), (r"\{1,2,3\}", r"\{3, 2, 1\}"),
    (r"\emptyset", r"\{\}"), (r"5\text{ cm}", "5"), (r"90^\circ", "90"), (r"\$5", "5"), ("0.1", r"10\%"),
    (r"\text{Monday}", "monday"), (r"\text{(A)}", "A"), ("x^2+2x+1", "(x+1)^2"), ("p - q", "-q + p"),
    ("y=2x+3", "y = 3 + 2x"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ("7", "7."),
]  # fmt: skip

DIFFERENT = [
    ("1/3", "0.333"), ("1/3", "0.3333333"), ("[1,2)", "(1,2)"), (r"\{1,2\}", r"\{1,2,3\}"), ("5", "-5"),
    ("12", "1,2"), ("1024", "1025"), (r"\text{even}", r"\text{odd}"), ("evil", "live"), (r"\pi", "3.14"),
    ("5", ""), ("5", r"\frac{"), ("2^{10}", "2^{11}"),
]  # fmt: skip


def test_math_accepts_equal_answers():
    for label, answer in EQUAL:
        assert algebra.math_score(f"So the answer is \\boxed{{{answer}}}.", label, {}) == 1.0
        assert quick_math(f"\\boxed{{{answer}}}", label, {}) in (1.0, None)


def test_math_rejects_different_answers():
    for label, answer in DIFFERENT:
        assert algebra.math_score(f"So the answer is \\boxed{{{answer}}}.", label, {}) == 0.0
        assert quick_math(f"\\boxed{{{answer}}}", label, {}) in (0.0, None)


def test_math_reads_plain_answers():
    cases = [
        ("The answer is 42.", 1.0), ("6 * 7 = 42\n#### 42", 1.0), ("6 * 7 = 42\n#### 43", 0.0),
        ("It follows that $x = 42$.", 1.0), ("<think>maybe 41</think>The final answer is 42", 1.0),
        ("<think>\\boxed{42}</think>", 1.0), (r"First 42. So \boxed{4", 0.0),
        ("42 cats, 41 dogs. The answer is 41", 0.0), ("<think>42</think>", 0.0), ("", 0.0), ("I do not know", 0.0),
        ("42", 1.0), ("42<|im_end|>", 1.0), ("</think>\n\n42.\n</s>", 1.0), ("41<|endoftext|>", 0.0), ("84/2", 1.0),
    ]  # fmt: skip
    for response, score in cases:
        assert algebra.math_score(response, "42", {}) == score


def test_plain_numbers_do_not_need_the_sandbox():
    for response in ("42", "41<|im_end|>", "I do not know", r"\boxed{42}", "#### 7", "-3.5", "</think>"):
        assert quick_math(response, "42", {}) is not None


def test_math_reads_labels_of_every_form():
    for label in (42, 42.0, "$42$", r"\boxed{42}", "6 * 7 = 42\n#### 42", ["41", "42"]):
        assert algebra.math_score(r"\boxed{42}", label, {}) == 1.0
        assert algebra.math_score(r"\boxed{40}", label, {}) == 0.0


@pytest.mark.parametrize("label", [None, "", "  ", {"a": 1}, True, []])
@pytest.mark.parametrize("verify", [quick_math, f1_score, dapo_score, gpqa_score, quick_deepscaler])
def test_a_missing_label_is_an_error_and_not_a_wrong_answer(verify, label):
    with pytest.raises(DataError, match="label"):
        verify("Answer: 4", label, {})


def test_hostile_numbers_are_not_evaluated_in_the_driver():
    for text in ("9" * 5000, "1e999999999", "1/0", "0." + "3" * 5000, "\\frac{1}{0}"):
        assert number_from(text) is None


@pytest.mark.parametrize("verify", [quick_math, f1_score, dapo_score, gpqa_score, quick_deepscaler])
@pytest.mark.parametrize(
    "unit", [r"\boxed{", "answer ", "answer" + " " * 9_000, "{", "}", "</think>", r"\frac ", "A ", "answer is (((("]
)
def test_degenerate_responses_are_scored_at_once(verify, unit):
    # These run in the driver without a time limit; quadratic work on 200,000 characters would take minutes.
    score = verify(unit * (200_000 // len(unit)), "B", CHOICES)
    assert score is None or isinstance(score, float | dict)


def test_dapo_compares_the_line_after_answer():
    cases = [
        ("Answer: 42", "42", 1.0), ("Answer: \\boxed{42}", 42, 1.0),
        ("... Answer: $\\boxed{1{,}024}$ square units.", "1024", 1.0),
        ("Answer: 41\nno wait\nanswer : 42", "42", 1.0), ("**Answer:** 42", "42", 1.0),
        ("Answer: x = 42", "42", 1.0), ("Answer: 007", "7", 1.0), ("Answer: 7.0", "7", 1.0),
        ("Answer: \\frac{1}{2}", "\\frac12", 1.0), ("Answer: the 12 dollars", "12", 1.0),
        ("\\boxed{42}", "42", -1.0), ("Answer: 43", "42", -1.0), ("Answer: ", "42", -1.0),
        ("Answer: 42" + " and so on" * 40, "42", -1.0),
    ]  # fmt: skip
    for response, label, score in cases:
        result = dapo_score(response, label, {})
        assert result["score"] == score
        assert result["acc"] is (score == 1.0)
        assert isinstance(result["pred"], str)


def test_dapo_without_an_answer_line_is_invalid():
    assert dapo_score("I give up", "42", {}) == {"score": -1.0, "acc": False, "pred": "[INVALID]"}


def test_deepscaler_requires_a_box_after_the_thinking():
    cases = [
        (r"<think>hm</think>So \boxed{\frac{2}{4}}", 1.0), (r"thoughts ###Response so \boxed{0.5}", 1.0),
        (r"<think>hm</think>So \boxed{3}", 0.0), (r"<think>\boxed{1/2}</think>So it is 1/2", 0.0),
        (r"\boxed{1/2}", 0.0), (r"<think>never ends \boxed{1/2}", 0.0),
    ]  # fmt: skip
    for response, score in cases:
        assert algebra.deepscaler_score(response, r"\frac{1}{2}", {}) == score


def test_f1_measures_shared_words():
    cases = [
        ("The Eiffel Tower!", "eiffel tower", 1.0), ("in Paris, France", "Paris", 0.5), ("London", "Paris", 0.0),
        ("no", "no", 1.0), ("no, it is not", "no", 0.0), ("", "Paris", 0.0), ("a b b", "b b c", 0.8),
        ("Rome", ["Paris", "rome"], 1.0), ("1879", 1879, 1.0), ("", "a", 0.0), ("", "The An", 0.0), ("an", "A", 0.0),
        ("A", "a", 1.0), ("the an", "The An", 1.0), ("", "?", 0.0), ("the", "Paris", 0.0),
        ("", ["the", "Paris"], 0.0),
    ]  # fmt: skip
    for response, label, score in cases:
        assert f1_score(response, label, {}) == pytest.approx(score)


def test_gpqa_finds_the_chosen_letter():
    cases = [
        ("The answer is B.", "B"), ("Answer: (C)", "C"), ("**Answer: D**", "D"), ("answer is $\\boxed{B}$", "B"),
        (r"\boxed{\text{(C)}}", "C"), ("The answer is A? No: the answer is C", "C"),
        ("A is tempting but B is correct.", "B"), ("<think>The answer is A</think>The answer is D", "D"),
        ("I would say (C)", "C"), ("B", "B"), ("I choose D", "D"), ("The correct option is B) green", "B"),
        ("it must be green", "B"), (r"\boxed{green}", "B"),
        ("The answer is a matter of definition. B is correct.", "B"),
        ("B is correct. This answer is a good one", "B"),
        ("The best choice is a combination, thus C is correct", "C"), ("the answer is a", "A"),
        ("The correct option: a) red", "A"), ("the answer is a because of x", "A"),
        ("The answer is a good question", None), ("The answer is Zebra", None), ("A or B or C", None),
        ("Not B, not C: A", "A"), ("It is neither A nor B. C is wrong. So D", "D"),
        ("Not (A), rule out B, and C isn't possible: D", "D"),
        ("We eliminate B and eliminate C; D can't be; hence A", "A"), ("not A, not B, not C, not D", None),
        ("The answer among A, B, C and D is A", "A"), ("The correct option among A, B, C, and D is B.", "B"),
        ("The answer (A, B, C or D) is C", "C"), ("Of the options A, B, C and D, A is correct", "A"),
        ("Choosing between (A) and (B), the answer is (B)", "B"), ("The answer is B and C is wrong", "B"),
        ("It is one of A or B", None), ("The answer is A and I am sure", "A"), ("", None),
    ]  # fmt: skip
    for response, chosen in cases:
        scores = {letter: gpqa_score(response, letter, CHOICES) for letter in "ABCD"}
        assert [letter for letter, score in scores.items() if score == 1.0] == ([chosen] if chosen else [])


def test_gpqa_distinguishes_the_pronoun_i_from_option_i():
    assert gpqa_score("The option I would choose: B", "B", {}) == 1.0
    assert gpqa_score("The answer is I", "I", {}) == 1.0


def test_gpqa_reads_labels_of_every_form():
    cases = [
        (1, {}), ("b", {}), ("(B)", {}), ("Green", CHOICES), (None, {"correct_letter": "b"}),
        ("green", {"choices": {"A": "red", "B": "green"}}), ("B", {"valid_letters": ["A", "B"]}),
    ]  # fmt: skip
    for label, metadata in cases:
        assert gpqa_score("The answer is B", label, metadata) == 1.0
        assert gpqa_score("The answer is A", label, metadata) == 0.0


def test_gpqa_rejects_a_label_that_is_not_an_option():
    with pytest.raises(DataError, match=r"'purple'.*'A', 'B', 'C', 'D'.*'dark blue'"):
        gpqa_score("B", "purple", CHOICES)


def test_random_reward_depends_only_on_the_sample():
    samples = [Sample(index=i, seed=i, response="x") for i in range(400)]
    scores = [random_score(s) for s in samples]
    assert scores == [random_score(Sample.from_dict(s.to_dict())) for s in samples]
    assert 150 < sum(scores) < 250


def test_an_unknown_rm_type_is_rejected_with_the_closest_name():
    with pytest.raises(ConfigError, match="did you mean gpqa"):
        find_verifier("gqpa")
    with pytest.raises(ConfigError, match="--custom-rm-path"):
        find_verifier("zzzzzz")


def test_boxed_verifiers_that_could_never_score_are_rejected():
    for name in ("boxed_dapo", "boxed_deepscaler", "boxed_ifbench"):
        with pytest.raises(ConfigError, match=name):
            find_verifier(name)


def test_boxed_prefix_reduces_the_response_to_its_last_box():
    verifier = find_verifier("boxed_f1")
    assert verifier.cut(r"a long story \boxed{Paris}") == "Paris"
    assert verifier.cut("a long story") == ""
    assert find_verifier("boxed_math").cut(r"x = 4, \boxed{5}") == r"\boxed{5}"
    assert find_verifier("f1").cut("a long story") == "a long story"
