"""Messages between processes of one machine: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, cast


def encode_line(message: Any) -> bytes:
    """Encode one message; arrays become lists, sets sorted lists, paths text.

    Raises TypeError with the type that JSON cannot represent.
    """
    return json.dumps(message, default=_json_value).encode() + b"\n"


def decode_line(line: bytes) -> dict[str, Any]:
    """Decode one message. Raises ValueError if it is not a JSON object."""
    value: Any = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"a line is {type(value).__name__}, not a JSON object")
    return cast("dict[str, Any]", value)


def _json_value(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(cast("set[Any]", value))
    if isinstance(value, Mapping):
        return dict(cast("Mapping[Any, Any]", value))
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
