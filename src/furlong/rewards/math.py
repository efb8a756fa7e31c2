r"""Mathematical equality of the answer in a response and the label.

Equal text, plain numbers and words are compared here, in the driver. Everything else needs `rewards.algebra`, which
parses LaTeX with math-verify and sympy in the sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from furlong.rewards.answers import after_thinking, has_box, last_boxed, text_label

TAIL = 2_000  # characters at the end of a response without a box that are searched for an answer
MIN_DIFFERENCE = Fraction(1, 10_000)  # math-verify rounds to 6 decimals: numbers further apart are never equal

_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[+-]?\.\d+|[+-]?\d+(?:\.\d+)?[eE][+-]?\d{1,2}")
_FRACTION = re.compile(r"([+-]?)(?:(\d+)\s*(?:\s|(?=\\frac)))?(?:\\frac\{(\d+)\}\{(\d+)\}|(\d+)\s*/\s*(\d+))")
_WORDS = re.compile(r"[^\W\d_]{3,}(?:[ -][^\W\d_]+)*")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_NOISE = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\displaystyle|\\?\$")
_SPECIAL = re.compile(r"<\|[\w ]{1,40}\|>|</?s>")
_NO_FORMULA = re.compile(r"[^\d\\$]*")
_INTEGER = re.compile(r"[+-]?\d{1,50}")
_MAX_NUMBER_LEN = 60


def labels_from(label: Any) -> list[str]:
    r"""Return the accepted answers: one for a text or number, several for a list.

    A label may be bare LaTeX, `$...$`, `\boxed{...}`, or a worked solution that ends in "#### answer" (GSM8K).
    """
    texts = [text_label(each) for each in (label if isinstance(label, list | tuple) and label else [label])]
    return [(last_boxed(text) or text).rsplit("####", 1)[-1].strip() for text in texts]


def quick(response: str, label: Any, metadata: Mapping[str, Any]) -> float | None:
    r"""Return 1.0 or 0.0 if the result is certain without algebra, else None.

    The answer is the last `\boxed{}`, the text after "####", or a response that is only a number. The score is 0.0
    for a response without text after its thinking, one cut off inside its only box, and one without a digit or
    formula if the label is an integer.
    """
    labels = labels_from(label)
    answer = answer_of(response)
    if answer is not None:
        return quick_answer(answer, labels, metadata)
    text = final_text(response)
    if has_box(response) or not text:
        return 0.0
    return 0.0 if _NO_FORMULA.fullmatch(text) and all(_INTEGER.fullmatch(tidy(each)) for each in labels) else None


def quick_answer(answer: str, labels: Sequence[str], metadata: Mapping[str, Any]) -> float | None:
    """Compare an extracted answer with the labels: 1.0, 0.0, or None if that needs algebra."""
    del metadata
    scores = [_quick(tidy(answer), tidy(label)) for label in labels]
    if 1.0 in scores:
        return 1.0
    return None if None in scores else 0.0


def answer_of(response: str) -> str | None:
    r"""Return the last `\boxed{}`, the text after "####", or a response that is only a number; else None."""
    boxed = last_boxed(response)
    if boxed is not None or has_box(response):
        return boxed
    text = final_text(response)
    if "####" in text:
        return text.rsplit("####", 1)[-1].strip().split("\n", 1)[0]
    return text if number_from(tidy(text)) is not None else None


def final_text(response: str) -> str:
    """Return the text after the thinking, without special tokens such as <|im_end|>."""
    return _SPECIAL.sub("", after_thinking(response)).strip()


def answer_text(response: str) -> str:
    r"""Return the part of a response that math-verify searches.

    That is the last box, else the last 2,000 characters after the thinking.
    """
    answer = answer_of(response)
    return final_text(response)[-TAIL:] if answer is None else f"\\boxed{{{tidy(answer)}}}"


def tidy(text: str) -> str:
    r"""Remove notation that does not change the value: `$`, `\left`, spacing, `\dfrac` for `\frac`, a final period.

    >>> tidy(r"\left( \dfrac12,\, 3 \right).")
    '( \\frac{1}{2}, 3 )'
    """
    text = re.sub(r"\\[dt]frac", r"\\frac", _NOISE.sub("", text).replace("{,}", ","))
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = text.strip()
    if whole := _TEXT.fullmatch(text):
        text = whole[1]
    return text.rstrip(".").strip()


def number_from(text: str) -> Fraction | None:
    r"""Read a plain number: 1,024 or -0.5 or 1e-3 or 3/4 or `2\frac{1}{3}` or "2 1/3"; else None."""
    if len(text) > _MAX_NUMBER_LEN:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if match := _FRACTION.fullmatch(text):
        sign, whole, a, b, c, d = match.groups()
        if not int(b or d):
            return None
        value = Fraction(int(whole or 0)) + Fraction(int(a or c), int(b or d))
        return -value if sign == "-" else value
    return None


def _quick(answer: str, label: str) -> float | None:
    if not answer:
        return 0.0
    if answer == label:
        return 1.0
    a, b = number_from(answer), number_from(label)
    if a is not None and b is not None:
        if a == b:
            return 1.0
        both_whole = a.denominator == 1 and b.denominator == 1
        return 0.0 if both_whole or abs(a - b) > MIN_DIFFERENCE else None
    if _WORDS.fullmatch(answer) and _WORDS.fullmatch(label):
        return float(answer.casefold() == label.casefold())
    return None
