"""What a parser makes of a reply, and the values that parsers share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedReply:
    """Content, reasoning and tool calls of a reply. num_ill_formed: calls that could not be read and stay text."""

    content: str
    reasoning: str | None = None
    calls: Sequence[ToolCall] = field(default_factory=tuple[ToolCall, ...])
    num_ill_formed: int = 0


Tools = Sequence[Mapping[str, Any]]
ToolParser = Callable[[str, Tools], ParsedReply]
"""Reads the tool calls of a text, given the tools of the request."""


def call_from_json(text: str) -> ToolCall | None:
    """Return the call of a JSON object with `name` and `arguments` (or `parameters`); None if it is not one.

    >>> call_from_json('{"name": "add", "arguments": {"a": 1}}')
    ToolCall(name='add', arguments='{"a": 1}')
    """
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    return call_from_value(value)


def call_from_value(value: Any) -> ToolCall | None:
    """Return the call of a decoded object; None if it has no name, or arguments that are not an object."""
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, Any]", value)
    name: Any = fields.get("name")
    arguments: Any = fields.get("arguments", fields.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def typed_value(text: str, name: str, function: str, tools: Tools) -> Any:
    """Return the value of a parameter that a model wrote as bare text, by the type that its tool declares.

    A parameter of type string stays text; any other is read as JSON where it is JSON.
    """
    schema: Any = {}
    for tool in tools:
        declared: Any = tool.get("function", tool)
        if declared.get("name") == function:
            schema = ((declared.get("parameters") or {}).get("properties") or {}).get(name) or {}
    kind: Any = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
