r"""Text of labels and of answers in `\boxed{}`."""

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
    opened: list[int | None] = []  # per open brace: start of its box, None for a plain brace
    last: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        if match["box"]:
            opened.append(match.end())
        elif match[0] == "{":
            opened.append(None)
        elif match[0] == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[slice(*last)].strip()


def has_box(text: str) -> bool:
    r"""Return whether the text contains `\boxed{`, closed or not."""
    return _BOX.search(text) is not None


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>`, or all of it if there is none."""
    return text.rsplit("</think>", 1)[-1]


def text_label(label: Any) -> str:
    """Return a label as stripped text. Raises DataError unless it is a number or non-empty text."""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise DataError(
            f"the label is {label!r} of type {type(label).__name__}, a verifier needs text or a number; "
            "check --label-key"
        )
    text = str(label).strip()
    if not text:
        raise DataError("the label is empty, nothing can be verified against it; check --label-key")
    return text
