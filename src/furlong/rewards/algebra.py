"""Verifiers that parse LaTeX and compare with sympy, which can hang: run them in the sandbox.

A separate module, because importing sympy takes 0.7 s; sandbox workers import it before the first time limit starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from math_verify import parse, verify

from furlong.errors import DataError
from furlong.rewards.verifiers import answer_text, final_part, labels_from, quick_deepscaler, quick_math, tidy

# The library warns on every call whose time limit (an alarm signal) is disabled, as all of them are below.
logging.getLogger("math_verify").setLevel(logging.ERROR)


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
    """Return 1.0 if the answer in `text` equals one of the labels, else 0.0.

    An answer that cannot be parsed scores 0.0. Raises DataError for a label that cannot be parsed, and whatever sympy
    raises in the comparison: neither means that the answer is wrong.
    """
    parsed = parse(text, parsing_timeout=0)
    if not parsed:
        return 0.0
    for label in labels:
        gold = parse(f"${tidy(label)}$", parsing_timeout=0) or parse(label, parsing_timeout=0)
        if not gold:
            raise DataError(f"the label {label!r} cannot be parsed as a mathematical answer; check --label-key")
        if verify(gold, parsed, timeout_seconds=None, raise_on_error=True):
            return 1.0
    return 0.0
