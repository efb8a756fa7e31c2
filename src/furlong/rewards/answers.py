r"""The texts that verifiers compare: the label, and the answer in `\boxed{}`."""

from __future__ import annotations

import re
from typing import Any

from furlong.errors import DataError

_BOX = re.compile(r"\\f?boxed\s*\{")
_BRACE = re.compile(r"(?P<box>\\f?boxed\s*\{)|(?P<escaped>\\.)|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last complete `\boxed{...}`, or None if there is none.

    Braces inside are matched, ignoring escaped ones (`\{`); among nested boxes the innermost is used. A box that is
    never closed (a truncated response) does not count. Linear time.

    >>> last_boxed(r"first \boxed{1}, then \boxed{\frac{1}{2}} and \boxed{3")
    '\\frac{1}{2}'
    """
    opened: list[int | None] = []  # for each brace that is open, where its box begins; None for a plain brace
    last: tuple[int, int] | None = None
    for found in _BRACE.finditer(text):
        if found["box"]:
            opened.append(found.end())
        elif found[0] == "{":
            opened.append(None)
        elif found[0] == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, found.start())
    return None if last is None else text[slice(*last)].strip()


def has_box(text: str) -> bool:
    r"""Whether the text opens a `\boxed{`, closed or not."""
    return _BOX.search(text) is not None


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>`, or the whole text if there is none."""
    return text.rsplit("</think>", 1)[-1]


def text_label(label: Any) -> str:
    """Return a label as text. Raises DataError for one that is missing or empty: nothing can be verified against it."""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise DataError(
            f"the label is {label!r} of type {type(label).__name__}, a verifier needs text or a number; "
            "check --label-key"
        )
    text = str(label).strip()
    if not text:
        raise DataError("the label is empty, nothing can be verified against it; check --label-key")
    return text
