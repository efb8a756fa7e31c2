"""Messages between the driver and sandbox workers: JSON frames, changes of samples, and the read-only `args`.

A frame is a length in four bytes (big-endian) followed by that many bytes of JSON. Nothing is pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import orjson

from furlong.core.sample import Sample, Status

HEADER = struct.Struct(">I")
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_OUTCOME_FIELDS = ("reward", "outcome")  # returned in the outcome


def encode_frame(message: Any) -> bytes:
    """Encode one message. Raises TypeError with the type that JSON cannot represent."""
    body = orjson.dumps(message, default=_json_value, option=_OPTIONS)
    return HEADER.pack(len(body)) + body


def decode_message(body: bytes) -> Any:
    """Decode the body of a frame."""
    return orjson.loads(body)


def changed_fields(sample: Sample, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a reward function changed in its copy of a sample."""
    after = sample.to_dict()
    return {name: value for name, value in after.items() if value != before[name] and name not in _OUTCOME_FIELDS}


def apply_changes(sample: Sample, changes: Mapping[str, Any]) -> None:
    """Apply the result of `changed_fields` to the sample in the driver."""
    for name, value in changes.items():
        setattr(sample, name, Status(value) if name == "status" else value)


def split_args(args: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Split `args` (a mapping, or an object with `as_dict` or attributes) into JSON values and types of the rest."""
    if args is None:
        return {}, {}
    if isinstance(args, Mapping):
        items = dict(args)
    elif hasattr(args, "as_dict"):
        items = dict(args.as_dict())
    else:
        names = [n for n in (vars(args) if hasattr(args, "__dict__") else dir(args)) if not n.startswith("_")]
        items = {name: getattr(args, name) for name in names}
    values: dict[str, Any] = {}
    omitted: dict[str, str] = {}
    for name, value in items.items():
        try:
            values[str(name)] = orjson.loads(orjson.dumps(value, default=_json_value, option=_OPTIONS))
        except TypeError:
            omitted[str(name)] = type(value).__name__
    return values, omitted


class SandboxArgs:
    """The options of the run for user code, as read-only attributes.

    >>> args = SandboxArgs({"rm_type": "math"})
    >>> args.rm_type, getattr(args, "no_such", 1)
    ('math', 1)
    """

    def __init__(self, values: Mapping[str, Any], omitted: Mapping[str, str] | None = None) -> None:
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_omitted", dict(omitted or {}))

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = object.__getattribute__(self, "_values")
        if name in values:
            return values[name]
        if kind := object.__getattribute__(self, "_omitted").get(name):
            raise AttributeError(f"args.{name} is a {kind}, which cannot be values to the reward sandbox")
        raise AttributeError(f"there is no option {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args is read-only; args.{name} cannot be set to {value!r}")

    def __contains__(self, name: str) -> bool:
        return name in object.__getattribute__(self, "_values")

    def __repr__(self) -> str:
        return f"Args({object.__getattribute__(self, '_values')!r})"


def _json_value(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
