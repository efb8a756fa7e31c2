"""A long list in a short message."""

from __future__ import annotations

from collections.abc import Sequence


def first_few(values: Sequence[object], count: int = 8, *, separator: str = ", ") -> str:
    """Join the first `count` values, and say how many more there are.

    >>> first_few(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = len(values) - count
    return separator.join(map(str, values[:count])) + (f" and {more} more" if more > 0 else "")
