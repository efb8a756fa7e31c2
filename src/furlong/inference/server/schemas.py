"""Requests as schema classes: types and ranges of fields, and what happens to fields that a server does not know.

Every refusal is a RequestError with the path of the field, which is answered with status 400.
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from furlong.inference.request_error import RequestError

QUOTED_CHARS = 200  # of a value in a message
MAX_INT32, MAX_INT64 = (1 << 31) - 1, (1 << 63) - 1
MAX_LABEL_CHARS = 128
_INTEGER = re.compile(r"[+-]?[0-9]+")
_PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]+\Z"

Temperature = Annotated[float, Meta(ge=0, le=1e6)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
MinP = Annotated[float, Meta(ge=0, le=1)]
NumTokens = Annotated[int, Meta(ge=1, le=MAX_INT32)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT32)]
NumSamples = Annotated[int, Meta(ge=1, le=1024)]  # of one prompt in one request
Seed = Annotated[int, Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)]
TokenIds = list[Annotated[int, Meta(ge=0, le=MAX_INT32)]]
StopIds = Annotated[TokenIds, Meta(max_length=1024)]
_Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
StopList = Annotated[list[_Stop], Meta(max_length=128)]
Stops = _Stop | StopList
FilledText = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(min_length=1, max_length=512, pattern=_PRINTABLE)]  # of requests, tensors and groups


class Schema(msgspec.Struct, kw_only=True):
    """The fields of a request, or of an object in one, that a server implements; None if absent or null.

    IGNORED: fields without an effect on the result, with any value. ONLY: fields that are not implemented, with the
    values that do not change the result.
    """

    IGNORED: ClassVar[tuple[str, ...]] = ()
    ONLY: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


S = TypeVar("S")
SchemaType = TypeVar("SchemaType", bound=Schema)


class Sampling(Schema):
    """What all protocols call by the same names."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None


class StreamOptions(Schema):
    """`stream_options`, also of chat completions."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


def read_fields(
    kind: type[SchemaType], body: Mapping[str, Any], path: str = "", *, ignored: list[str] | None = None
) -> SchemaType:
    """Check a request, or the object `path` of one. Raises RequestError naming the field.

    ignored: gets the names of fields that no schema has, which are then accepted; None refuses them.
    """
    known: dict[str, Any] = {}
    objects = _objects(kind)
    for name, value in body.items():
        if name in kind.__struct_fields__:
            is_object = name in objects and isinstance(value, dict)
            known[name] = read_fields(objects[name], value, f"{path}{name}.", ignored=ignored) if is_object else value  # pyright: ignore[reportUnknownArgumentType]
        elif name in kind.ONLY:
            if not (_is_off(value) and value is not False) and not any(_same(value, each) for each in kind.ONLY[name]):
                text = f"{path}{name} is {quote(value)}, which is not supported here; remove it"
                raise RequestError(text, f"{path}{name}")
        elif name not in kind.IGNORED and (ignored is None or not _is_off(value)):
            if ignored is None:
                check_unknown(f"{path}{name}", value)
            else:
                ignored.append(re.sub(r"\[\d+\]", "[]", quote(f"{path}{name}")[1:-1]))
    return convert(known, kind, path)


@functools.cache
def _objects(kind: type[Schema]) -> dict[str, type[Schema]]:
    hints = get_type_hints(kind)
    types = {name: get_args(hints[name]) for name in kind.__struct_fields__}
    return {
        name: each
        for name, parts in types.items()
        for each in parts
        if isinstance(each, type) and issubclass(each, Schema)
    }


def check_unknown(name: str, value: Any) -> None:
    """Decide about a field that no schema names: refuse it, unless its value asks for nothing.

    Routers send every field that they know, most of them null, false or empty.
    """
    if not _is_off(value):
        shown = quote(name)[1:-1]
        raise RequestError(f"{shown} is not a field of this endpoint; remove it", shown)


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def convert(value: Any, kind: type[S], path: str = "") -> S:
    """Return a decoded value as `kind`. Raises RequestError naming the field; `path` is what contains it."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RequestError(*_refusal(str(error), value, path)) from None
    except RecursionError:
        raise RequestError(f"{path or 'the body'} is nested too deeply; flatten it") from None


def _refusal(error: str, value: Any, path: str) -> tuple[str, str | None]:
    """Return msgspec's error in our form, field, value, what it must be; and the field."""
    text, _, at = error.partition(" - at `$")
    at = at.rstrip("`")
    name = (path + at.removeprefix(".")) if not at.startswith("[") else path.rstrip(".") + at
    if missing := re.match(r"Object missing required field `(\w+)`", text):
        name = f"{f'{name}.' if at else path}{missing[1]}"
        return f"{name} is missing", name
    for step in re.findall(r"\w+|\.\.\.", at):
        if isinstance(value, dict):
            value = value.get(step)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        elif isinstance(value, list) and step.isdecimal():
            value = value[int(step)]  # pyright: ignore[reportUnknownVariableType]
    param = name or path.rstrip(".") or None
    name = param or "the body"
    if not text.startswith("Expected "):
        return f"{name} is {quote(value)}, which is not supported here", param
    expected = text.removeprefix("Expected ").partition(", got")[0].replace(" | null", "").replace("`", "")
    if "regex" in expected:
        expected = "printable text"
    return f"{name} is {quote(value)}, must be {expected.replace('array', 'a list')}", param


_QUOTES = reprlib.Repr()
_QUOTES.maxlevel, _QUOTES.maxdict, _QUOTES.maxlist, _QUOTES.maxlong = 3, 6, 8, 40
_QUOTES.maxstring = _QUOTES.maxother = QUOTED_CHARS


def quote(value: Any) -> str:
    """Return the representation of a value in at most about `QUOTED_CHARS` characters.

    >>> quote({"n": "x"}), len(quote("a" * 10**6)) <= 203
    ("{'n': 'x'}", True)
    """
    return shorten(_QUOTES.repr(value), QUOTED_CHARS)


def shorten(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text, and an ellipsis if there are more."""
    return text if len(text) <= limit else text[:limit] + "..."


def stops_of(value: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a field that is one string or a list."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def check_model(asked: str | None, served: str) -> None:
    """Raise RequestError for a model that is not served; the last part of its path will do."""
    if asked not in (None, "", "default", "actor", served) and asked != PurePath(served).name:
        raise RequestError(f"model is {quote(asked)}, but this server has {quote(served)}; use that name, or 'default'")


def version_label(name: str, value: Any) -> str | None:
    """Return the label of a weight version; None if the field is absent.

    A label is an integer from 0 to 2**63 - 1, as a number or in digits, or a printable string of at most
    `MAX_LABEL_CHARS` characters that is not a number.
    """
    if value is None:
        return None
    label = str(value) if type(value) is int else value
    if isinstance(label, str) and 0 < len(label) <= MAX_LABEL_CHARS and label.isprintable():
        is_in_range = label.isdecimal() and int(label) <= MAX_INT64
        if label.strip() == label and (is_in_range or not _INTEGER.fullmatch(label)):
            return label
    raise RequestError(
        f"{name} is {quote(value)}; a weight version is an integer from 0 to {MAX_INT64}, or a name of 1 to "
        f"{MAX_LABEL_CHARS} printable characters"
    )
