"""Verifiers that parse LaTeX and compare with sympy, which can hang: run them in the sandbox.

A separate module because importing sympy takes 0.7 s; a sandbox worker imports it before its first time limit starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from math_verify import parse, verify

from furlong.errors import DataError
from furlong.rewards import deepscaler, math

# The library limits time by an alarm signal, which is disabled below; it would log a warning on every call.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the answer of the response equals one of the labels, else 0.0; see `compare`."""
    certain = math.quick(response, label, metadata)
    return compare(math.said_in(response), math.labels_from(label)) if certain is None else certain


def deepscaler_score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the box after the thinking equals one of the labels, else 0.0; see `compare`."""
    certain = deepscaler.quick(response, label, metadata)
    if certain is not None:
        return certain
    return compare(math.said_in(deepscaler.final_part(response) or ""), math.labels_from(label))


def compare(said: str, labels: Sequence[str]) -> float:
    """Find the answer in a text and compare it with the labels.

    An answer that cannot be parsed is wrong. Raises DataError for a label that cannot be parsed, and any exception
    of sympy's comparison: neither means that the answer is wrong.
    """
    parsed = parse(said, parsing_timeout=0)
    if not parsed:
        return 0.0
    for label in labels:
        gold = parse(f"${math.tidy(label)}$", parsing_timeout=0) or parse(label, parsing_timeout=0)
        if not gold:
            raise DataError(f"the label {label!r} cannot be read as a mathematical answer; check --label-key")
        if verify(gold, parsed, timeout_seconds=None, raise_on_error=True):
            return 1.0
    return 0.0
