"""Size of messages in characters, by which a prompt that cannot fit is refused before it is tokenized."""

from __future__ import annotations

from typing import Any

LEAST_LONGEST = 16


def longest_token(tokenizer: Any) -> int:
    """Return the characters of the longest token, at least 16."""
    if tokenizer is None or not hasattr(tokenizer, "get_vocab"):
        return LEAST_LONGEST
    return max(LEAST_LONGEST, max(map(len, tokenizer.get_vocab()), default=0))


def num_chars(*values: Any) -> int:
    """Return the number of characters in the strings of nested values, and one for each container."""
    total, left = 0, list(values)
    while left:
        value = left.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            left += value.keys()
            left += value.values()
            total += 1
        elif isinstance(value, list | tuple):
            left += value
            total += 1
    return total
