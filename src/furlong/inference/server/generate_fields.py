"""Fields that requests for completions share, on every server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from furlong.inference.request_error import RequestError
from furlong.inference.server.field_rules import MAX_SAMPLES
from furlong.inference.server.fields import integer


def num_samples(name: str, value: Any) -> int:
    """Samples per prompt; 1 by default. Raises RequestError for anything but an integer up to `MAX_SAMPLES`."""
    return integer({name: value}, name, low=1, high=MAX_SAMPLES, default=1)


def prompts_of(body: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """Return the texts or lists of ids, which are not yet checked, and whether there may be several."""
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise RequestError("give either input_ids or text")
    if text is not None:
        is_list = isinstance(text, list)
        texts: list[Any] = text if is_list else [text]
        if not texts or not all(isinstance(t, str) for t in texts):
            raise RequestError("text must be a string or a list of strings")
        return texts, is_list
    is_list = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    return (list(ids) if isinstance(ids, list) and is_list else [ids]), is_list


def check_rows(name: str, rows: Sequence[Any]) -> None:
    """Raise RequestError unless these are lists of integers."""
    for row in rows:
        if not isinstance(row, list) or not all(type(t) is int for t in cast("list[Any]", row)):
            raise RequestError(f"{name} must be a list of integers, or a list of such lists")


def token_log_probs(tokens: list[int], log_probs: list[float]) -> list[list[Any]]:
    """SGLang's [log-prob, token id, text] triples."""
    return [[log_prob, token, None] for token, log_prob in zip(tokens, log_probs, strict=True)]
