"""Verifiers that parse LaTeX and compare with sympy, which can hang: run them in the sandbox.

A separate module, because importing sympy takes 0.7 s; sandbox workers import it before the first time limit starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from math_verify import parse, verify
from sympy import And, Basic, Float, MatrixBase, Rational

from furlong.errors import DataError
from furlong.rewards.math_text import AnswerParts, parts_of, quick_equal, tidy
from furlong.rewards.verifiers import answer_text, final_part, labels_from, quick_deepscaler, quick_math

# The library warns on every call whose time limit (an alarm signal) is disabled, as all of them are below.
logging.getLogger("math_verify").setLevel(logging.ERROR)

DIGITS = 40  # significant digits to which two numbers are compared: more than any answer or rounding error has
MAX_NESTING = 4  # levels of tuples and sets that are taken apart


def math_score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the answer of the response equals one of the labels, else 0.0; see `compare`."""
    score = quick_math(response, label, metadata)
    return compare(answer_text(response), labels_from(label)) if score is None else score


def deepscaler_score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the box after the thinking equals one of the labels, else 0.0; see `compare`."""
    score = quick_deepscaler(response, label, metadata)
    if score is not None:
        return score
    return compare(answer_text(final_part(response) or ""), labels_from(label))


def compare(text: str, labels: Sequence[str]) -> float:
    r"""Return 1.0 if the answer in `text` equals one of the labels, else 0.0.

    Matrices, sets, tuples and intervals are equal if they are of one kind and their parts are equal: `(1,2)` is not
    `\{1,2\}`. Numbers are exact: 0.333333 is not 1/3. Everything else is as math-verify defines it.

    An answer that cannot be parsed scores 0.0. Raises DataError for a label that cannot be parsed, and whatever sympy
    raises in the comparison, which counts as 0.0 (`GroupReward`).
    """
    parsed: list[Any] = parse(text, parsing_timeout=0)
    if not parsed:
        return 0.0
    answer = tidy(parsed[-1]) if isinstance(parsed[-1], str) else ""  # the text that was parsed comes last
    return float(any(_equal(answer, parsed, tidy(label), label) for label in labels))


def _equal(answer: str, parsed: list[Any], label: str, raw_label: str, depth: int = 0) -> bool:
    """Compare an answer, as tidy text and parsed, with a label, as tidy text and as written."""
    if (score := quick_equal(answer, label)) is not None and answer:
        return score == 1.0
    a, b = parts_of(answer), parts_of(label)
    if a is not None and b is not None and depth < MAX_NESTING:
        return _equal_parts(a, b, depth)
    gold: list[Any] = parse(f"${label}$", parsing_timeout=0) or parse(raw_label, parsing_timeout=0)
    if not gold:
        raise DataError(f"the label {raw_label!r} cannot be parsed as a mathematical answer; check --label-key")
    return _equal_expressions(gold, parsed)


def _equal_parts(a: AnswerParts, b: AnswerParts, depth: int) -> bool:
    def same(answer: str, label: str) -> bool:
        return _equal(answer, parse(f"${answer}$", parsing_timeout=0), label, label, depth + 1)

    if (a.kind, a.brackets) != (b.kind, b.brackets):
        return False
    if a.kind == "set":
        answers, labels = sum(a.rows, ()), sum(b.rows, ())
        return all(any(same(x, y) for y in labels) for x in answers) and all(
            any(same(x, y) for x in answers) for y in labels
        )
    return [len(row) for row in a.rows] == [len(row) for row in b.rows] and all(
        same(x, y) for row, truth in zip(a.rows, b.rows, strict=True) for x, y in zip(row, truth, strict=True)
    )


def _equal_expressions(gold: list[Any], parsed: list[Any]) -> bool:
    if not parsed:
        return False
    gold, parsed = [_exact(each) for each in gold], [_exact(each) for each in parsed]
    numeric = _equal_numbers(gold[0], parsed[0])
    return verify(gold, parsed, timeout_seconds=None, raise_on_error=True) if numeric is None else numeric


def _equal_numbers(a: Any, b: Any) -> bool | None:
    """Compare two expressions without symbols to 40 digits; None if one of them is not such an expression.

    math-verify compares to 15 decimals, where 2^-60 equals 2^-61.
    """
    if not (isinstance(a, Basic) and isinstance(b, Basic)) or a.free_symbols or b.free_symbols:
        return None
    x, y = _value(a), _value(b)
    if x is None or y is None:
        return None
    return bool(abs(x - y) <= max(abs(x), abs(y)) * Float(10) ** (5 - DIGITS))


def _value(expression: Any) -> Any:
    """Return a number, real or complex, to 40 digits; None for anything else, and if cancellation leaves no digit."""
    try:
        value = expression.doit().evalf(DIGITS)
        is_known = value.is_number and value.is_finite and not any(part._prec == 1 for part in value.atoms(Float))
        return value if is_known else None
    except (AttributeError, TypeError):  # relations, sets and matrices have no value
        return None


def _exact(expression: Any) -> Any:
    """Replace decimals, which sympy reads as rounded binary numbers, by the fractions that they spell."""
    if isinstance(expression, Float):
        return Rational(str(expression))
    if isinstance(expression, MatrixBase):
        return expression.applyfunc(_exact)
    if isinstance(expression, Basic) and expression.has(Float):
        parts = [_exact(each) for each in getattr(expression, "_unsorted_args", expression.args)]
        if isinstance(expression, And) and not isinstance(joined := And(*parts), And):  # x = 0.5 = 1/2 is one equation,
            return joined  # which the And of latex2sympy2 cannot be
        return expression.func(*parts)
    return expression
