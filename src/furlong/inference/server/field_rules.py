"""Rules for the fields of requests: an endpoint has a table that says which fields there are, and what each may be.

A rule gets the name and the value of a field, and raises RequestError naming it. A field that is null is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, cast

from furlong.inference.request_error import RequestError
from furlong.inference.server.fields import MAX_INT64, quote

Rule = Callable[[str, Any], None]
Fields = Mapping[str, Rule]

MAX_INT32 = (1 << 31) - 1
MAX_SAMPLES = 1024  # of one prompt in one request
MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_IDS = 128, 1024, 1024  # stop strings, characters of one, stop token ids
MAX_TEMPERATURE = 1e6


def check_fields(body: Mapping[str, Any], fields: Fields, *, allows_off: bool = False) -> None:
    """Raise RequestError naming a field of a body that is unknown, or has a wrong value.

    allows_off: unknown fields may be false or empty. Routers send every field that they know.
    """
    for name, value in body.items():
        if value is None:
            continue
        if (rule := fields.get(name)) is not None:
            rule(name, value)
        elif not (allows_off and _is_off(value)):
            raise RequestError(f"{name} is not a field of this endpoint; remove it")


def _is_off(value: Any) -> bool:
    """Return whether the value of an unknown field asks for nothing."""
    return value is None or value is False or value in ("", [], {})


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise RequestError(f"{name} is {quote(value)}, must be {expected}")


def anything(name: str, value: Any) -> None:
    """Accept a value that is checked elsewhere, or passed on as it is."""


def flag(name: str, value: Any) -> None:
    """Accept true and false."""
    if not isinstance(value, bool):
        _refuse(name, value, "true or false")


def text(name: str, value: Any) -> None:
    """Accept text."""
    if not isinstance(value, str):
        _refuse(name, value, "text")


def filled_text(name: str, value: Any) -> None:
    """Accept text of at least one character."""
    if not isinstance(value, str) or not value:
        _refuse(name, value, "text of at least one character")


def whole(low: int, high: int) -> Rule:
    """Accept integers from `low` to `high`."""

    def rule(name: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            _refuse(name, value, f"an integer from {low} to {high}")

    return rule


def number(low: float, high: float, *, above_low: bool = False) -> Rule:
    """Accept numbers from `low`, or above it, to `high`."""

    def rule(name: str, value: Any) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above_low and value == low):
            _refuse(name, value, f"a number {'above' if above_low else 'from'} {low:g} to {high:g}")

    return rule


def list_of(rule: Rule, *, least: int = 0, most: int | None = None) -> Rule:
    """Accept lists of `least` to `most` values that `rule` accepts."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, list):
            _refuse(name, value, "a list")
        values = cast("list[Any]", value)
        if len(values) < least:
            _refuse(name, value, f"a list with at least {least} values")
        if most is not None and len(values) > most:
            raise RequestError(f"{name} has {len(values)} values, may have at most {most}")
        for i, each in enumerate(values):
            rule(f"{name}[{i}]", each)

    return check


def object_of(fields: Fields, *, required: Collection[str] = (), others: Rule | None = None) -> Rule:
    """Accept objects with these fields. others: the rule for all other fields, which are refused without one."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            _refuse(name, value, f"an object{' with ' + ', '.join(fields) if fields else ''}")
        given = cast("dict[str, Any]", value)
        for key, each in given.items():
            rule = fields.get(key, others)
            if rule is None and not _is_off(each):
                raise RequestError(f"{name}.{key} is {quote(each)}, which is not supported here; remove it")
            if rule is not None and each is not None:
                rule(f"{name}.{key}", each)
        for key in required:
            if given.get(key) is None:
                fields[key](f"{name}.{key}", None)

    return check


an_object = object_of({}, others=anything)


def either(expected: str, *rules: Rule) -> Rule:
    """Accept what one of the rules accepts. `expected` names all of it."""

    def check(name: str, value: Any) -> None:
        for rule in rules:
            try:
                return rule(name, value)
            except RequestError:
                continue
        _refuse(name, value, expected)

    return check


def one_of(*values: str) -> Rule:
    """Accept one of several words."""

    def rule(name: str, value: Any) -> None:
        if not isinstance(value, str) or value not in values:
            _refuse(name, value, f"one of {', '.join(values)}")

    return rule


def only(*values: Any) -> Rule:
    """Accept these values of a field that is not implemented: those that do not change the result."""

    def rule(name: str, value: Any) -> None:
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values):
            raise RequestError(f"{name} is {quote(value)}, which is not supported here; remove it")

    return rule


def token_ids(name: str, value: Any) -> None:
    """Accept lists of token ids. One pass in C for each check: they may be very long."""
    ids: Sequence[Any] = value if isinstance(value, list) else [None]
    if set(map(type, ids)) - {int} or (ids and not 0 <= min(ids) <= max(ids) <= MAX_INT32):
        _refuse(name, value, f"a list of token ids, integers from 0 to {MAX_INT32}")


def top_k(name: str, value: Any) -> None:
    """Accept -1 and numbers of tokens."""
    if type(value) is not int or not (value == -1 or 1 <= value <= MAX_INT32):
        _refuse(name, value, f"-1 for all tokens, or an integer from 1 to {MAX_INT32}")


def _stop(name: str, value: Any) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_STOP_CHARS:
        _refuse(name, value, f"text of 1 to {MAX_STOP_CHARS} characters")


def stop_ids(name: str, value: Any) -> None:
    """Accept a list of token ids that end an answer."""
    token_ids(name, value)
    list_of(anything, most=MAX_STOP_IDS)(name, value)


stops = list_of(_stop, most=MAX_STOPS)
one_or_more_stops = either(
    f"text of 1 to {MAX_STOP_CHARS} characters, or a list of at most {MAX_STOPS} of them", _stop, stops
)
text_or_parts = either("text or a list of parts of type text", text, list_of(anything))
metadata = object_of({}, others=text)
seed = whole(-MAX_INT64 - 1, MAX_INT64)
num_tokens = whole(1, MAX_INT32)
num_samples = whole(1, MAX_SAMPLES)
temperature = number(0, MAX_TEMPERATURE)
top_p = number(0, 1, above_low=True)
min_p = number(0, 1)
SAMPLING: Fields = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
