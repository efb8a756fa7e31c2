"""Conversion of a flag's value from command-line words and YAML, and back to words."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from furlong.config.compat import VALUES
from furlong.config.flag_spec import FlagSpec
from furlong.core.json_values import parse_written_json
from furlong.core.text import did_you_mean, shortened

_LOOKS_LIKE_A_FLAG = re.compile(r"--[A-Za-z]")
_NAMES: dict[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "an object",
}


def looks_like_a_flag(word: str) -> bool:
    """Whether a word of the command line is a flag; `-1`, `--` and `---` are values."""
    return _LOOKS_LIKE_A_FLAG.match(word) is not None


def value_from_words(spec: FlagSpec, words: Sequence[str]) -> Any:
    """Convert the words of a flag. Raises ValueError with the given and the expected value."""
    match spec.kind:
        case "many":
            return tuple(_scalar(spec, word) for word in words)
        case "json":
            return _object(words[0])
        case _:
            return _scalar(spec, words[0])


def value_from_yaml(spec: FlagSpec, value: Any) -> Any:
    """Check a YAML value against the type of the flag. Raises ValueError as `value_from_words` does."""
    if value is None:
        if spec.optional:
            return None
        raise ValueError(f"has no value, expected {_NAMES[spec.type]}; give a value or remove the key")
    if spec.kind in ("many", "append"):
        items = value if isinstance(value, list) else [value]
        return tuple(_typed(spec, item) for item in items)
    return _typed(spec, value)


def words_from_value(spec: FlagSpec, value: Any) -> list[str]:
    """Return the words that `value_from_words` converts to `value`; [] for the default."""
    if value == spec.default:
        return []
    match spec.kind:
        case "switch" | "off_switch":
            return [spec.flag]
        case "tristate":
            return [spec.flag if value else spec.flag.replace("--", "--no-", 1)]
        case "append":
            return [f"{spec.flag}={item}" for item in value]
        case "many":
            if value and not any(looks_like_a_flag(str(item)) for item in value):
                return [spec.flag, *map(str, value)]
            return [f"{spec.flag}={json.dumps(list(value))}"]
        case "json":
            return [f"{spec.flag}={json.dumps(value)}"]
        case _:
            return [f"{spec.flag}={value}"]


def many_from_equals(spec: FlagSpec, text: str) -> list[str]:
    """Return the values of `--flag=TEXT`: the items of a JSON array of the flag's type, else [TEXT]."""
    if text.startswith("["):
        try:
            items = json.loads(text)
        except ValueError:
            return [text]
        if isinstance(items, list) and all(type(item) is spec.type for item in items):
            return [str(item) for item in items]
    return [text]


def _scalar(spec: FlagSpec, word: str) -> Any:
    if spec.type is str:
        return _choice(spec, word)
    try:
        number = spec.type(word)
    except ValueError:
        fix = f"; write {meant}" if (meant := _number_meant(spec, word)) else ""
        raise ValueError(f"got {word!r}, expected {_NAMES[spec.type]}{fix}") from None
    return _finite(number)


def _number_meant(spec: FlagSpec, word: str) -> str:
    """Return the number that `1e3`, `1,000`, `0,5`, `8k` or `1e-5,` stands for, as the flag accepts it; "" for none."""
    text = re.sub(r"(?<=\d)[kK]$", "e3", word.rstrip(",;."))
    has_thousands = re.match(r"-?[1-9]\d{0,2}(,\d{3})+(?!\d)", text)
    text = text.replace(",", "" if has_thousands else ".")
    with contextlib.suppress(ValueError, OverflowError):
        number = float(text)
        if spec.type is float:
            return text
        if number.is_integer():
            return str(int(number))
    return ""


def _typed(spec: FlagSpec, value: Any) -> Any:
    if spec.type is float and type(value) is int:
        value = float(value)
    if spec.type is float and type(value) is str and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        value = float(value)  # YAML 1.1 reads 1e-6 as a string, because it has no point
    if type(value) is not spec.type:
        is_quoted = type(value) is str and re.fullmatch(r"[-+\d.eE]+|true|false", value) is not None
        fix = "; remove the quotes" if is_quoted and spec.type in (int, float, bool) else ""
        raise ValueError(f"got {shortened(value)} ({type(value).__name__}), expected {_NAMES[spec.type]}{fix}")
    if spec.type is str:
        return _choice(spec, value)
    if spec.type is dict:
        return _json_object(value)
    return _finite(value) if spec.type is float else value


def _choice(spec: FlagSpec, word: str) -> str:
    if re.fullmatch(r"DIR.*|(\[NAME\] )?FILE", spec.metavar or "") and re.match(r"~/|\$\{?[A-Za-z_]", word):
        why = "a shell replaces ~ and $NAME before a command sees them, except in quotes and, for ~, after ="
        raise ValueError(f"got {word!r}: {why}; write the whole path")
    if (why := VALUES.get((spec.flag, word))) is not None:
        raise ValueError(why.message(f"{spec.flag} {word}"))
    if spec.choices and word not in spec.choices:
        same = [choice for choice in spec.choices if choice.lower() == word.lower()]
        hint = f"did you mean {same[0]}?" if same else did_you_mean(word, spec.choices)[1]
        raise ValueError(f"got {word!r}, expected one of {', '.join(spec.choices)}{hint and '; '}{hint}")
    return word


def _finite(number: Any) -> Any:
    if not math.isfinite(number):
        raise ValueError(f"got {number}, expected a finite number")
    return number


def _json_object(value: Any) -> dict[str, Any]:
    """Reject values that JSON cannot represent, such as dates, as they are written to command lines and files."""
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ValueError(
            f"got {shortened(value)}, expected a JSON object; quote dates and keys that are not strings, and use "
            "finite numbers"
        )
    return value


def _object(text: str) -> dict[str, Any]:
    try:
        value = parse_written_json(text)
    except ValueError as error:
        raise ValueError(
            f"got {shortened(text)}, which is not JSON ({error}); expected an object such as '{{\"a\": 1}}'"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"got {shortened(text)}, expected a JSON object such as '{{\"a\": 1}}'")
    return value
