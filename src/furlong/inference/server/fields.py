"""Values of requests: checks of type and range at the edge of the server, and short quotes of them in messages.

Every check raises RequestError, which is answered with status 400.
"""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from furlong.inference.request_error import RequestError

QUOTED_CHARS = 200  # of a value in a message
MAX_NAME_CHARS = 512  # of request ids, tensors and process groups
MAX_LABEL_CHARS = 128
MAX_INT64 = (1 << 63) - 1
_INTEGER = re.compile(r"[+-]?[0-9]+")


class _Quotes(reprlib.Repr):
    """`reprlib` with a bounded amount of work: it does not sort the keys of a large object."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxlong = 3, 6, 8, 40
        self.maxstring = self.maxother = QUOTED_CHARS

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        pairs = [
            f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}"
            for key, value in itertools.islice(x.items(), self.maxdict)
        ]
        return "{" + ", ".join([*pairs, *(["..."] if len(x) > self.maxdict else [])]) + "}"


_QUOTES = _Quotes()


def quote(value: Any) -> str:
    """Return the representation of a value in at most about `QUOTED_CHARS` characters.

    >>> quote({"n": "x"}), len(quote("a" * 10**6)) <= 203
    ("{'n': 'x'}", True)
    """
    return shorten(_QUOTES.repr(value), QUOTED_CHARS)


def shorten(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text, and an ellipsis if there are more."""
    return text if len(text) <= limit else text[:limit] + "..."


def required(body: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """Return a field of exactly this type."""
    if type(body.get(name)) is not kind:
        raise RequestError(f"{name} is {quote(body.get(name))}, must be {kind.__name__}")
    return body[name]


def boolean(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return a field that is true, false or absent."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {quote(value)}, must be true or false")
    return value


def integer(body: Mapping[str, Any], name: str, *, low: int, high: int, default: int | None = None) -> int:
    """Return an integer field from `low` to `high`; absent is an error without a `default`."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"{name} is {quote(value)}, must be an integer from {low} to {high}")
    return value


def name_of(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return a field with a printable name of at most `MAX_NAME_CHARS` characters."""
    value: Any = default if body.get(name) is None else body[name]
    check_name(name, value)
    return value


def check_name(field: str, value: Any) -> None:
    """Raise RequestError unless `value` is a printable string of 1 to `MAX_NAME_CHARS` characters."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS or not value.isprintable():
        raise RequestError(f"{field} is {quote(value)}, must be a printable string of 1 to {MAX_NAME_CHARS} characters")


def version_label(body: Mapping[str, Any], name: str) -> str | None:
    """Return the label of a weight version; None if the field is absent.

    A label is an integer from 0 to 2**63 - 1, as a number or in digits, or a printable string of at most
    `MAX_LABEL_CHARS` characters that is not a number.
    """
    value = body.get(name)
    if value is None:
        return None
    label = str(value) if type(value) is int else value
    if isinstance(label, str) and _is_label(label):
        return label
    raise RequestError(
        f"{name} is {quote(value)}; a weight version is an integer from 0 to {MAX_INT64}, or a name of 1 to "
        f"{MAX_LABEL_CHARS} printable characters"
    )


def _is_label(label: str) -> bool:
    if not 0 < len(label) <= MAX_LABEL_CHARS or not label.isprintable() or label.strip() != label:
        return False
    return not _INTEGER.fullmatch(label) or (label.isdecimal() and int(label) <= MAX_INT64)
