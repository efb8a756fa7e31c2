"""Parse JSON from files and flags, and limit how deeply values are nested.

Code that walks values recursively, such as `copy.deepcopy` and JSON encoders, fails on deep ones wherever it meets
them. Values are therefore checked where they enter the program.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

from furlong.core.text import shortened

MAX_DEPTH = 100  # levels of lists and objects
TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} levels deep"


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON in UTF-8, or nested too deeply."""
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_depth(value)
    return value


def parse_written_json(text: str) -> Any:
    """Return the value of JSON that a person wrote, such as a flag's.

    Raises ValueError as `parse_json` does, and for a key that is given twice and for numbers that are not finite.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_depth(value)
    return value


def written_value(text: str) -> Any:
    """Return the value of `text` if it is JSON, else `text` itself.

    Raises ValueError for JSON that `parse_written_json` refuses.
    """
    try:
        return parse_written_json(text)
    except json.JSONDecodeError:
        return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"the key {shortened(duplicate_key(pairs))} is given twice")
    return values


def duplicate_key(pairs: Sequence[tuple[str, Any]]) -> str:
    """Return the first key of a JSON object that occurs several times."""
    return next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shortened(text)} is not a finite number")
    return number


def check_depth(value: Any) -> None:
    """Raise ValueError if lists and objects are nested more than `MAX_DEPTH` levels deep, or contain themselves."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = {id(item): item for item in level if isinstance(item, (dict, list, tuple))}  # shared ones once
        if not containers:
            return
        level = [child for container in containers.values() for child in _children(container)]
    raise ValueError(TOO_DEEP)


def _children(container: Any) -> Iterable[Any]:
    if isinstance(container, dict):
        return cast("dict[Any, Any]", container).values()
    return cast("Iterable[Any]", container)
