"""Values in the answers of engine servers and routers, checked before they are used.

Every function raises EngineError that names the request (`where`), the field, the value and what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import orjson

from furlong.core.text import redact_credentials, shortened
from furlong.errors import EngineError

EXPECTED = "furlong expects the protocol of SGLang 0.5.16"
REASON_CHARS = 500
SHOWN_BYTES = 200
MAX_WHOLE = (1 << 31) - 1  # of sizes and counts
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # would change the terminal that shows a message


def parse_answer(content: bytes, where: str) -> Any:
    """Return the value of a JSON body; {} for an empty one."""
    if not content:
        return {}
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        shown = content[:SHOWN_BYTES]
        size = f" ({len(content):,} bytes)" if len(content) > SHOWN_BYTES else ""
        raise EngineError(f"{where} did not answer JSON in UTF-8: {shown!r}{size}; {error}. {EXPECTED}") from error


def reason_in(content: bytes) -> str:
    """Return the server's message in an error reply, in any of the usual forms, shortened."""
    try:
        body: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        if title := re.search(rb"<title>(.{0,500}?)</title>", content[: 1 << 16], re.DOTALL | re.IGNORECASE):
            page = readable(title[1].decode(errors="replace"))
            return f"a web page ({page}): this is not the address of an inference server"
        return readable(content[:REASON_CHARS].decode(errors="replace")) or "no reason given"
    if isinstance(body, dict):
        for key in ("error", "message", "detail"):
            if value := body.get(key):
                value = value.get("message", value) if isinstance(value, dict) else value
                return readable(value if isinstance(value, str) else shortened(value))
    return readable(body if isinstance(body, str) else shortened(body))


def readable(text: str) -> str:
    """Return text of a server for a message: shortened, without control characters and credentials."""
    cut = text[:REASON_CHARS] + (f"... ({len(text):,} characters)" if len(text) > REASON_CHARS else "")
    return redact_credentials(_CONTROL.sub("\ufffd", cut)).strip()


def unexpected(where: str, name: str, value: Any, expected: str) -> EngineError:
    """Return the error for a value of another type or range."""
    shown = readable(value) if isinstance(value, str) else shortened(value)
    return EngineError(f"{where} answered {name} {shown!r}, expected {expected}; {EXPECTED}")


def as_object(answer: Any, where: str, name: str = "with") -> dict[str, Any]:
    """Return a JSON object."""
    if not isinstance(answer, dict):
        raise unexpected(where, name, answer, "a JSON object")
    return cast("dict[str, Any]", answer)


def as_objects(value: Any, where: str, name: str) -> list[dict[str, Any]]:
    """Return a list of JSON objects."""
    if not isinstance(value, list):
        raise unexpected(where, name, value, "a list of JSON objects")
    return [as_object(each, where, f"in {name}") for each in cast("list[Any]", value)]


def whole(answer: Mapping[str, Any], name: str, where: str, *, default: int, least: int = 0) -> int:
    """Return an integer from `least`; `default` if it is missing, null or 0."""
    value = answer.get(name)
    if value is None or value == 0:
        return default
    if type(value) is not int or not least <= value <= MAX_WHOLE:
        raise unexpected(where, name, value, f"an integer from {least} to {MAX_WHOLE}")
    return value


def label(answer: Mapping[str, Any], name: str, where: str) -> str:
    """Return a text; an integer is converted."""
    value = answer.get(name)
    if type(value) not in (str, int):
        raise unexpected(where, name, value, "a string or an integer")
    return str(value)


def optional_text(answer: Mapping[str, Any], name: str, where: str, default: str = "") -> str:
    """Return a text; `default` if it is missing, null or empty."""
    value = answer.get(name)
    if not value:
        return default
    if not isinstance(value, str):
        raise unexpected(where, name, value, "a string")
    return value


def read_workers(answer: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the workers that a router lists, each with the text `url`."""
    workers = as_objects(answer.get("workers"), where, "workers")
    for worker in workers:
        if not isinstance(worker.get("url"), str):
            raise unexpected(where, "the url of a worker", worker.get("url"), "a string")
    return workers
