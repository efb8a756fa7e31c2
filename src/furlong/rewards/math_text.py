r"""Mathematical answers as text: boxes, notation, plain numbers, and the parts of tuples, sets and matrices.

Everything here is linear in the length of the text and never evaluates an expression, so it runs in the driver.
`rewards.algebra` compares what remains with math-verify and sympy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

# Boxes

_BOX = re.compile(r"\\(?:boxed|fbox(?:ed)?)\s*\{")
_BRACE = re.compile(rf"(?P<box>{_BOX.pattern})|(?P<escaped>\\.)|[{{}}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last complete `\boxed{...}` or `\fbox{...}`, or None if there is none.

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
    r"""Return whether the text contains `\boxed{` or `\fbox{`, closed or not."""
    return _BOX.search(text) is not None


# Notation

_SIGNS = str.maketrans(
    {
        "π": r"\pi ",
        "∞": r"\infty ",
        "×": r"\times ",
        "·": r"\cdot ",
        "−": "-",
        "≤": r"\le ",
        "≥": r"\ge ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "÷": "/",
    }
)
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_DEGREE = r"\^\s?\\(?:circ|degree)(?![a-zA-Z])|\^\s?\{\s?\\(?:circ|degree)\s?\}|\\degree(?![a-zA-Z])|°"
_THOUSANDS = r"(?<=\d),\\!\s?(?=\d)"
_LAYOUT = r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\displaystyle|\\?\$"
_REMOVED = re.compile(rf"(\\\\)|{_THOUSANDS}|{_DEGREE}|{_LAYOUT}")  # \\ first: "\\ 3" is a new row, not "\ "
_ROOT = re.compile(r"√\s?(?:\(([^()]{1,40})\)|(\d{1,40}|[a-z]))")
_PI = re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])")
_STARS = re.compile(r"(?<=[\w)])\*\*(?=[\w({-])")
_LN = re.compile(r"\\log\s?_\s?(?:e|\{\s?e\s?\})")
_LOG_10 = re.compile(r"\\log\s?_\s?10(?!\d)")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d{1,40}(?:\.\d{1,40})?)[eE]([+-]?\d{1,3})(?![\w.])")


def tidy(text: str) -> str:
    r"""Rewrite notation that does not change the value.

    Removes `$`, `\left`, spacing, degree signs and a final period; writes `\frac` for `\dfrac`, `\ln` for `\log_e`,
    `\pi` for pi and `1 \times 10^{6}` for a 1e6 inside an expression. Row separators of matrices stay.

    >>> tidy(r"\left( \dfrac12,\, 3 \right).")
    '( \\frac{1}{2}, 3 )'
    """
    if _NUMBER.fullmatch(text):  # most answers, at a tenth of the time
        return text
    text = _REMOVED.sub(lambda match: match[1] or "", text).replace("{,}", ",").translate(_SIGNS)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s?(\d)\s?(\d)", r"\\frac{\1}{\2}", text)
    text = _ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text)
    text = _LOG_10.sub(r"\\log_{10}", _LN.sub(r"\\ln ", _STARS.sub("^", _PI.sub(r"\\pi ", text))))
    text = text.strip()
    if whole := _TEXT_MACRO.fullmatch(text):
        text = whole[1]
    text = text.rstrip(".").strip()
    return text if _NUMBER.fullmatch(text) else _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)


# Plain numbers and words

_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[+-]?\.\d+|[+-]?\d+(?:\.\d+)?[eE][+-]?\d{1,2}")
_FRACTION = re.compile(r"([+-]?)(?:(\d+)\s*(?:\s|(?=\\frac)))?(?:\\frac\{(\d+)\}\{(\d+)\}|(\d+)\s*/\s*(\d+))")
_SIGNED_FRACTION = re.compile(r"\\frac\{(-?\d+)\}\{(-?\d+)\}")
_POWER_OF_TEN = re.compile(
    r"([+-]?)(?:([\d,]{1,20}(?:\.\d{1,20})?)\s?(?:\\times|\\cdot|\*)\s?)?10\s?\^\s?(?:\{\s?([+-]?\d{1,2})\s?\}|(\d))"
)
_REPEATING = re.compile(r"([+-]?)(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\s?\{\s?(\d{1,20})\s?\}")
_PLAIN_WORDS = re.compile(r"[^\W\d_]{3,}(?:[ -][^\W\d_]+)*")
_PERCENT = re.compile(r"(.*\d)\s?\\?%", re.DOTALL)
_MAX_NUMBER_LEN = 60


def number_from(text: str) -> Fraction | None:
    r"""Read a plain number exactly, else return None.

    Such as 1,024 or -0.5 or 1e-3 or 3/4 or `2\frac{1}{3}` or "2 1/3" or `3 \times 10^{5}` or `0.\overline{3}`.
    """
    if len(text) > _MAX_NUMBER_LEN:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if match := _SIGNED_FRACTION.fullmatch(text):
        return Fraction(int(match[1]), int(match[2])) if int(match[2]) else None
    if match := _FRACTION.fullmatch(text):
        sign, whole, a, b, c, d = match.groups()
        if not int(b or d):
            return None
        value = Fraction(int(whole or 0)) + Fraction(int(a or c), int(b or d))
        return -value if sign == "-" else value
    if match := _POWER_OF_TEN.fullmatch(text):
        sign, factor, braced, bare = match.groups()
        if factor is not None and not _NUMBER.fullmatch(factor):
            return None
        value = Fraction((factor or "1").replace(",", "")) * Fraction(10) ** int(braced or bare)
        return -value if sign == "-" else value
    if match := _REPEATING.fullmatch(text):
        sign, whole, head, period = match.groups()
        value = Fraction(f"{whole or 0}.{head or 0}")
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(head))
        return -value if sign == "-" else value
    return None


def quick_equal(answer: str, label: str) -> float | None:
    """Compare two answers that are tidy: 1.0, 0.0, or None if that needs algebra.

    Numbers are compared exactly: 0.333333 is not 1/3. A percentage equals both its number and its fraction.
    """
    if not answer:
        return 0.0
    if answer == label:
        return 1.0
    values, truths = _readings(answer), _readings(label)
    if values and truths:
        return float(bool(values & truths))
    if _PLAIN_WORDS.fullmatch(answer) and _PLAIN_WORDS.fullmatch(label):
        return float(answer.casefold() == label.casefold())
    return None


def _readings(text: str) -> set[Fraction]:
    """Return the values that a plain number may have: 50% is 50, as most labels write it, or 1/2."""
    value = number_from(text)
    if value is not None:
        return {value}
    percent = _PERCENT.fullmatch(text)
    value = number_from(percent[1].strip()) if percent else None
    return set() if value is None else {value, value / 100}


# Tuples, sets, intervals and matrices

Kind = Literal["matrix", "set", "ordered"]


@dataclass(frozen=True)
class AnswerParts:
    r"""An answer that consists of parts: rows of a matrix, elements of a set or tuple.

    `brackets` are those of a tuple, list or interval, which order their elements: "(]" for `(1,2]`.
    """

    kind: Kind
    rows: tuple[tuple[str, ...], ...]
    brackets: str = ""


_MATRIX = re.compile(
    r"(?P<left>[(\[])?\s*\\begin\{(?P<name>[pbB]?(?:small)?matrix|array)\*?\}(?:\s*\{[clr|@{} ]*\})?"
    r"(?P<body>.*)\\end\{(?P=name)\*?\}\s*(?P<right>[)\]])?",
    re.DOTALL,
)
_RULES = re.compile(r"\\hline|\\cline\s?\{[^{}]*\}")
_TOKEN = re.compile(
    r"\\\\(?:\s?\[[^\[\]]{0,20}\])?|\\(?:begin|end)|\\[{}|]|\\cr(?![a-zA-Z])|[(\[{}\])&,]|\\.", re.DOTALL
)
_OPENING, _CLOSING = ("(", "[", "{", r"\{"), (")", "]", "}", r"\}")
_DEFINED_BY = re.compile(r"\\mid|\||:|\\in(?![a-z])|\\ldots|\\dots|\\cdots")


def parts_of(text: str) -> AnswerParts | None:
    r"""Take a tidy answer apart if all of it is one matrix, set, tuple, list or interval; else return None.

    >>> parts_of(r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}").rows
    (('1', '2'), ('3', '4'))
    """
    if (match := _MATRIX.fullmatch(text)) and match["body"].find(r"\begin") < 0:
        if bool(match["left"]) != bool(match["right"]):
            return None
        rows = [_split(row, "&") for row in _split(_RULES.sub("", match["body"]), "\\\\")]
        return AnswerParts("matrix", tuple(tuple(row) for row in rows if any(row)))
    if text.startswith(r"\{") and text.endswith(r"\}"):
        inner = text[2:-2]
        is_list = _is_group(text) and not _DEFINED_BY.search(inner)
        return AnswerParts("set", (tuple(_split(inner, ",")),) if inner.strip() else ()) if is_list else None
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _is_group(text):
        elements = _split(text[1:-1], ",")
        return AnswerParts("ordered", (tuple(elements),), text[0] + text[-1]) if len(elements) > 1 else None
    return None


def _is_group(text: str) -> bool:
    depth = 0
    for match in _TOKEN.finditer(text):
        if match[0] in _OPENING:
            depth += 1
        elif match[0] in _CLOSING:
            depth -= 1
            if depth == 0:
                return match.end() == len(text)
    return False


def _split(text: str, separator: str) -> list[str]:
    r"""Split at the separators outside of brackets; a separator `\\` includes `\\[2pt]` and `\cr`."""
    parts: list[str] = []
    start = depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in _OPENING:
            depth += 1
        elif token in _CLOSING:
            depth -= 1
        elif depth == 0 and (token == separator or (separator == "\\\\" and token.startswith(("\\\\", "\\cr")))):
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]
