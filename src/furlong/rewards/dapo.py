"""The verifier of DAPO's recipe (arXiv:2503.14476): the line after "Answer:" must be the label, 1 or -1."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from furlong.rewards.answers import text_label

TAIL = 300  # characters at the end of the response in which the recipe looks for the answer

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_INLINE_MATH = re.compile(r"\$(.*?)\$|\\\((.*?)\\\)|\\\[(.*?)\\\]")
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|overline|boxed|fbox|mbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_UNIT = re.compile(
    r"\b(?:square|ways|integers?|dollars?|cents?|mph|inch(?:es)?|feet|hours?|minutes?|km|cm|gm|meters?|pounds?|units?|"
    r"points?|digits?|degrees?|meals|edges|students|multiples)\b",
    re.IGNORECASE,
)
_NOISE = re.compile(r"<\|im_end\|>|<\|endoftext\|>|</s>|\\[dl]?dots|\^\{?\\circ\}?|\\degree|\\[;,! ]|\\\$|\$|\"|\*")
_ARTICLE = re.compile(r"\b(?:an?|the)\s+", re.IGNORECASE)
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:(?:,|\{,\})\d{3})+")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]+)\}|(\w))\s*(?:\{([^{}]+)\}|(\w))")


def score(response: str, label: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"score": 1.0 or -1.0, "acc": bool, "pred": str}; pass `--reward-key score`.

    The answer is what follows the last "Answer:" in the last 300 characters, up to the end of the line, compared as
    text after normalization, which removes LaTeX wrappers, units, thousands separators and what is left of "=".
    Integers are compared as numbers ("007", "7.0"). A response without "Answer:" scores -1.0 with the prediction
    "[INVALID]".
    """
    del metadata
    truth = normalize_answer(text_label(label))
    answers = _ANSWER.findall(response[-TAIL:])
    pred = normalize_answer(answers[-1]) if answers else "[INVALID]"
    is_right = bool(answers) and pred != "" and pred == truth
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}


def normalize_answer(text: str) -> str:
    r"""Return a final answer in the normalized form in which answers are compared.

    >>> normalize_answer(r"the area is $A = \boxed{1,\!024}$ square units.")
    '1024'
    """
    inline = _INLINE_MATH.search(text)
    if inline is not None:
        text = next(part for part in inline.groups() if part is not None)
    text = text.rsplit("=", 1)[-1]
    text = _NOISE.sub("", text)
    for _ in range(3):  # nested wrappers, \boxed{\text{7}}
        text = _WRAPPER.sub(r"\1", text)
    text = _UNIT.sub("", text)
    text = _ARTICLE.sub("", text)
    text = _SHORT_FRACTION.sub(lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", text)
    text = (
        "".join(text.split()).rstrip(".,;:").strip("{}") if "\\" not in text else "".join(text.split()).rstrip(".,;:")
    )
    if _GROUPED.fullmatch(text):
        text = text.replace("{,}", "").replace(",", "")
    return str(int(float(text))) if re.fullmatch(r"[+-]?\d{1,15}(?:\.0*)?", text) else text
