r"""Notation of mathematical answers, and what it is equal to."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from furlong.rewards import algebra
from furlong.rewards.math_text import number_from, parts_of, tidy
from furlong.rewards.verifiers import dapo_score, quick_math


def score(answer: str, label: str) -> float:
    return algebra.math_score(f"So \\boxed{{{answer}}}.", label, {})


def matrix(rows: list[list[str]], *, name: str = "pmatrix", gap: str = " ") -> str:
    body = f"{gap}\\\\{gap}".join(f"{gap}&{gap}".join(row) for row in rows)
    return f"\\begin{{{name}}}{gap}{body}{gap}\\end{{{name}}}"


CELL = st.one_of(
    st.integers(-99, 99).map(str),
    st.fractions(-9, 9, max_denominator=9).map(lambda f: f"\\frac{{{f.numerator}}}{{{f.denominator}}}"),
    st.sampled_from([r"\sqrt{2}", "x", r"\pi", "2.5"]),
)
ROWS = st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(CELL, min_size=n, max_size=n), min_size=1, max_size=3))


@settings(max_examples=25, deadline=None)
@given(rows=ROWS, name=st.sampled_from(["pmatrix", "bmatrix", "Bmatrix", "smallmatrix"]))
@pytest.mark.nightly
def test_a_matrix_equals_itself_however_it_is_spaced(rows, name):
    dense = matrix(rows, name="bmatrix", gap="")
    assert parts_of(tidy(matrix(rows, gap=" "))).rows == tuple(tuple(row) for row in rows)
    assert score(matrix(rows, name=name, gap=" "), dense) == 1.0
    assert score(matrix(rows, gap="\n"), dense) == 1.0
    array = f"\\left[{matrix(rows, name='array').replace('{array}', '{array}{ccc}', 1)}\\right]"
    assert score(array, dense) == 1.0


@settings(max_examples=25, deadline=None)
@given(rows=ROWS, data=st.data())
@pytest.mark.nightly
def test_a_matrix_with_another_cell_or_shape_is_different(rows, data):
    label = matrix(rows)
    i, j = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, len(rows[0]) - 1))
    changed = [list(row) for row in rows]
    changed[i][j] = "17/19"
    assert score(matrix(changed, gap=""), label) == 0.0
    assert score(matrix([*rows, rows[0]]), label) == 0.0
    assert score(rows[-1][-1], label) == 0.0
    if len(rows) != len(rows[0]):
        assert score(matrix([list(row) for row in zip(*rows, strict=True)]), label) == 0.0


def test_matrices_in_unusual_forms():
    cases = [
        (r"\begin{pmatrix}1\\[2pt] 2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1.0),
        (r"\begin{pmatrix} 1 \\ 2 \\ \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1.0),
        (r"\begin{pmatrix} 0.5 \\ -2 \end{pmatrix}", r"\begin{pmatrix} 1/2 \\ -2 \end{pmatrix}", 1.0),
        (r"\begin{pmatrix} (1,2) \\ 2 \end{pmatrix}", r"\begin{pmatrix} (1,3) \\ 2 \end{pmatrix}", 0.0),
        (r"2\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}2\\4\end{pmatrix}", 1.0),
        (r"2\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}2\\5\end{pmatrix}", 0.0),
        (r"(1, 2)", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 0.0),
        (r"\begin{array}{l} x=1 \\ y=2 \end{array}", r"\begin{array}{l}x=1\\y=2\end{array}", 1.0),
    ]  # fmt: skip
    for answer, label, expected in cases:
        assert score(answer, label) == expected


def test_dapo_keeps_the_row_separator():
    answer = r"Answer: \begin{pmatrix} 1 \\ 2 \end{pmatrix}"
    assert dapo_score(answer, r"\begin{pmatrix}1\\2\end{pmatrix}", {})["score"] == 1.0
    assert dapo_score(answer, r"\begin{pmatrix}12\end{pmatrix}", {})["score"] == -1.0


def test_tuples_sets_and_intervals_are_different():
    cases = [
        ("(1,2)", r"\{1,2\}", 0.0), (r"\{1,2\}", "(1,2)", 0.0), ("(1,2,3)", r"\{1,2,3\}", 0.0),
        (r"\{0,\infty\}", r"(0,\infty)", 0.0), ("[1,2]", "(1,2)", 0.0), ("[1,2)", "[1,2]", 0.0),
        ("[1,2,3]", "(1,2,3)", 0.0), ("(2,1)", "(1,2)", 0.0), (r"\{(1,2),(3,4)\}", r"\{\{1,2\},\{3,4\}\}", 0.0),
        (r"\{(3,4),(1,2)\}", r"\{(1,2),(3,4)\}", 1.0), (r"\{2,1,1\}", r"\{1,2\}", 1.0),
        (r"\{1,3\}", r"\{1,2\}", 0.0), ("1,2", r"\{1,2\}", 1.0), ("1,2", "(1,2)", 1.0),
        ("(1,2),(3,4)", "(3,4),(1,2)", 1.0), (r"\left( \tfrac12, 3 \right)", "(0.5,3)", 1.0),
        (r"(0.333333, 2)", r"(\frac13,2)", 0.0), (r"(\frac{1}{2}, (1, 2))", r"(0.5, (1, 2))", 1.0),
        (r"\{x : x > 1\}", r"\{x : x > 1\}", 1.0),
    ]  # fmt: skip
    for answer, label, expected in cases:
        assert score(answer, label) == expected


@settings(max_examples=60, deadline=None)
@given(value=st.fractions(-50, 50, max_denominator=99), digits=st.integers(0, 12))
def test_a_decimal_equals_a_fraction_only_if_it_is_exact(value, digits):
    scaled = round(value * 10**digits)
    sign, whole = "-" if scaled < 0 else "", f"{abs(scaled):0{digits + 1}d}"
    decimal = f"{sign}{whole[:-digits]}.{whole[-digits:]}" if digits else f"{sign}{whole}"
    fraction = f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    expected = float(Fraction(scaled, 10**digits) == value)
    assert quick_math(f"\\boxed{{{decimal}}}", fraction, {}) == expected
    assert quick_math(f"\\boxed{{{fraction}}}", decimal, {}) == expected


@settings(max_examples=25, deadline=None)
@given(a=st.integers(1, 200), b=st.integers(1, 200), base=st.sampled_from([2, 3, 10]))
def test_small_numbers_are_compared_relative_to_their_size(a, b, base):
    assume(a != b)
    assert score(f"\\frac{{1}}{{{base}^{{{a}}}}}", f"{base}^{{-{a}}}") == 1.0
    assert score(f"\\frac{{1}}{{{base}^{{{a}}}}}", f"{base}^{{-{b}}}") == 0.0


def test_notation_that_models_write():
    cases = [
        (r"45\degree", "45", 1.0), ("45", r"45\degree", 1.0), (r"45\degree", r"45^\circ", 1.0),
        (r"45^{\circ}", "45°", 1.0), (r"46\degree", "45", 0.0), (r"\sin 30^\circ", r"\sin 30\degree", 1.0),
        ("pi", r"\pi", 1.0), ("2pi", r"2\pi", 1.0), ("pi/2", r"\frac{\pi}{2}", 1.0), ("pi/3", r"\frac{\pi}{2}", 0.0),
        ("π", "pi", 1.0), ("1e6", "10^6", 1.0), ("10^{6}", "1e6", 1.0), ("1e7", "10^6", 0.0),
        (r"1.5 \times 10^{6}", "1.5e6", 1.0), ("2e-5 x", r"0.00002x", 1.0), ("1e6 x", "10^{7}x", 0.0),
        (r"\log_e 2", r"\ln 2", 1.0), (r"\ln(2)", r"\log_{e} 2", 1.0), (r"\log_e 3", r"\ln 2", 0.0),
        (r"\log_10 1000", "3", 1.0), (r"\log_2 8", "3", 1.0), (r"0.\overline{3}", "1/3", 1.0),
        (r"0.1\overline{6}", "1/6", 1.0), ("0.3", r"0.\overline{3}", 0.0), (r"11,\! 111,\! 100", "11111100", 1.0),
        ("−5", "-5", 1.0), ("√2", r"\sqrt{2}", 1.0), ("x**2", "x^2", 1.0), ("50%", "0.5", 1.0), ("7.5%", "7.5", 1.0),
        ("0.333333", "1/3", 0.0), ("1/3", "0.333333", 0.0), (r"\pi", "3.141593", 0.0), ("1.414214", r"\sqrt2", 0.0),
        ("0.0000001", "0.0000002", 0.0), (r"\sqrt{2}\cdot\sqrt{2}-2", "0", 1.0), (r"1.5x", r"\frac{3}{2}x", 1.0),
    ]  # fmt: skip
    for answer, label, expected in cases:
        assert score(answer, label) == expected
        assert algebra.deepscaler_score(f"<think>hm</think>\\boxed{{{answer}}}", label, {}) == expected


def test_every_box_is_read():
    for box in (r"\boxed{42}", r"\fbox{42}", r"\fboxed{42}", r"\boxed {42}"):
        assert quick_math(f"First 41. {box}", "42", {}) == 1.0
        assert quick_math(f"First 42. {box.replace('42', '41')}", "42", {}) == 0.0


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=r"0123456789.,-+eE^{}\ ()[]&frcodtpiglbexm%$_", max_size=60))
def test_any_text_can_be_tidied_and_taken_apart(text):
    once = tidy(text)
    parts_of(once)
    number_from(once)


def test_a_chain_of_equal_numbers_is_compared():
    assert score("x=0.5=1/2", "0.5") == score("x=0.5=1/2", "x=0.5") == 1.0
    assert score("x=0.5=1/2", "3") == 0.0
    assert algebra.math_score("$Total = 3.5 + 2 = 5.5$", "3", {}) == 0.0
