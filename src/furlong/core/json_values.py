"""Parse JSON that a person wrote, such as the value of a flag."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from furlong.core.text import shortened


def parse_written_json(text: str) -> Any:
    """Return the value of JSON that a person wrote.

    Raises ValueError, also for a key that is given twice and for numbers that are not finite.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)


def written_value(text: str) -> Any:
    """Return the value of `text` if it is JSON, else `text`. Raises ValueError as `parse_written_json` does."""
    try:
        return parse_written_json(text)
    except json.JSONDecodeError:
        return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shortened(twice)} is given twice")
    return values


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shortened(text)} is not a finite number")
    return number
