"""Multiple choice: compare the option that a response chooses with the label."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from furlong.errors import DataError
from furlong.rewards.answers import after_thinking, last_boxed, text_label

# Repetitions are bounded, because a degenerate response with a thousand spaces would make the search quadratic.
# "a" and "I" before another word are words, except before a conjunction ("the answer is a because ...").
_WORD = r"(?-i:(?<=[aiI])\s{1,4}(?!(?:because|since|as|for|and|but|given|due)\b)[a-z])"
_LETTER = r"[\(\[*_\s$]{0,12}(?:\\text(?:bf)?\{)?\(?([A-Z])(?![A-Za-z'’])" f"(?!{_WORD})"
_STATED = re.compile(
    r"(?:answer|option|choice)(?:\s{1,4}(?:is|would be|must be))?\s{0,4}(?:option|choice)?\s{0,4}[:=]?" + _LETTER,
    re.IGNORECASE,
)
_IS_CORRECT = re.compile(r"\b([A-Z])\)?\*{0,4}\s{1,4}is\s{1,4}(?:the\s{1,4})?(?:correct|right|best)")
_ALONE = re.compile(r"(?<![A-Za-z0-9'’\-])([A-Z])(?![A-Za-z0-9'’\-])")
_MARKS = re.compile(r"[^a-z0-9]+")


def score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    r"""Return 1.0 if the response chooses the right option, else 0.0.

    The right option is `metadata["correct_letter"]`, or the label: a letter, an index from 0, or the text of one of
    `metadata["choices"]`. The choice is the first match after `</think>` of: `\boxed{B}`, the last "answer is B" or
    "Answer: (B)", the last "B is correct", the only letter in the response, the text of exactly one choice.
    Raises DataError if the label is not an option.
    """
    choices = _choices(metadata)
    letters = _letters(metadata, choices)
    right = _right_letter(label, metadata, choices, letters)
    return float(_chosen(after_thinking(response), choices, letters) == right)


def _choices(metadata: Mapping[str, Any]) -> list[str]:
    choices = metadata.get("choices") or []
    return [str(c) for c in (choices.values() if isinstance(choices, Mapping) else choices)]


def _letters(metadata: Mapping[str, Any], choices: Sequence[str]) -> list[str]:
    if valid := metadata.get("valid_letters"):
        return [str(letter).upper() for letter in valid]
    if isinstance(named := metadata.get("choices"), Mapping) and all(re.fullmatch("[A-Za-z]", str(k)) for k in named):
        return [str(k).upper() for k in named]
    return list(string.ascii_uppercase[: len(choices) or 10])


def _right_letter(label: Any, metadata: Mapping[str, Any], choices: Sequence[str], letters: Sequence[str]) -> str:
    if isinstance(correct := metadata.get("correct_letter"), str) and correct.strip().upper() in letters:
        return correct.strip().upper()
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    text = text_label(label)
    bare = text.strip("()[]. ").upper()
    if bare in letters:
        return bare
    plain = [_plain(choice) for choice in choices]
    if plain.count(_plain(text)) == 1:
        return letters[plain.index(_plain(text))]
    raise DataError(f"the label {label!r} is none of the options {letters} and none of the texts {list(choices)}")


def _chosen(text: str, choices: Sequence[str], letters: Sequence[str]) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None:
        bare = re.sub(r"\\text(?:bf)?|[{}()\[\].\s]", "", boxed).upper()
        return bare if bare in letters else _by_text(boxed, choices, letters)
    for pattern in (_STATED, _IS_CORRECT):
        stated = [letter.upper() for letter in pattern.findall(text) if letter.upper() in letters]
        if stated:
            return stated[-1]
    alone = {letter for letter in _ALONE.findall(text) if letter in letters}
    unambiguous = alone - {"A", "I"} or alone
    return unambiguous.pop() if len(unambiguous) == 1 else _by_text(text, choices, letters)


def _by_text(text: str, choices: Sequence[str], letters: Sequence[str]) -> str | None:
    plain = f" {_plain(text)} "
    matches = [letter for letter, choice in zip(letters, choices, strict=False) if f" {_plain(choice)} " in plain]
    return matches[0] if len(matches) == 1 else None


def _plain(text: str) -> str:
    return _MARKS.sub(" ", text.lower()).strip()
