"""Replies in JSON: `tool_choice` that requires a call, and `response_format`. The engine samples within a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from furlong.chat.parsers import ParsedReply, call_from_value, read_json
from furlong.inference.request_error import RequestError
from furlong.inference.server.schemas import quote

_REFERENCES = ("#/$defs/", "#/definitions/")


@dataclass(frozen=True)
class JsonReply:
    """A reply that is an answer of `schema` (None for no answers), or `{"name", "arguments"}` for one of `calls`."""

    schema: Mapping[str, Any] | None = None
    calls: Sequence[str] = ()

    def text(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the schema of the reply as JSON text."""
        options: list[Any] = []
        definitions: dict[str, Any] = {}
        for i, tool in enumerate(tools):
            function: Mapping[str, Any] = tool["function"]
            if function["name"] in self.calls:
                parameters = {"type": "object", **(function.get("parameters") or {})}
                properties = {
                    "name": {"const": function["name"]},
                    "arguments": _with_shared_definitions(parameters, f"{i}.", definitions),
                }
                call = {"type": "object", "properties": properties, "required": list(properties)}
                options.append({**call, "additionalProperties": False})
        if self.schema is not None:
            options.append(_with_shared_definitions(self.schema, "", definitions))
        whole = options[0] if len(options) == 1 else {"anyOf": options}
        return json.dumps({**whole, "$defs": definitions} if definitions else whole)

    def parse(self, text: str) -> ParsedReply:
        """Return the call of a reply, or the reply as content. A cut call is ill-formed."""
        try:
            value, _ = read_json(text.strip())
        except ValueError:
            return ParsedReply(text, num_ill_formed=int(self.schema is None))
        call = call_from_value(value)
        if call is not None and call.name in self.calls and set(value) == {"name", "arguments"}:
            return ParsedReply("", None, [call])
        return ParsedReply(text)


def _with_shared_definitions(schema: Any, prefix: str, shared: dict[str, Any], *, is_root: bool = True) -> Any:
    """Return a schema that is part of another one: its definitions move to `shared`, under names with `prefix`."""
    if isinstance(schema, list):
        return [_with_shared_definitions(each, prefix, shared, is_root=False) for each in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    changed: dict[str, Any] = {}
    for key, value in cast("Mapping[str, Any]", schema).items():
        start = next((each for each in _REFERENCES if key == "$ref" and str(value).startswith(each)), None)
        if start is not None:
            changed[key] = f"#/$defs/{prefix}{value[len(start) :]}"
        elif is_root and key in ("$defs", "definitions") and isinstance(value, Mapping):
            for name, each in cast("Mapping[str, Any]", value).items():
                shared[prefix + name] = _with_shared_definitions(each, prefix, shared, is_root=False)
        else:
            changed[key] = _with_shared_definitions(value, prefix, shared, is_root=False)
    return changed


def read_tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[bool, tuple[str, ...]]:
    """Return whether tool calls are parsed, and the tools of which one must be called. Raises RequestError."""
    if choice in (None, "auto", "none"):
        return choice != "none", ()
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice in ("required", "any"):
        if not names:
            raise RequestError(f"tool_choice is {quote(choice)}, but the request has no tools; add tools, or remove it")
        return True, names
    fields = cast("dict[str, Any]", choice) if isinstance(choice, dict) else {}
    kind = fields.get("type")
    if kind in ("auto", "none", "any", "required"):
        return read_tool_choice(kind, tools)
    name: Any = fields.get("name") or (fields.get("function") if isinstance(fields.get("function"), dict) else {})
    name = cast("dict[str, Any]", name).get("name") if isinstance(name, dict) else name
    if kind not in ("function", "tool", "custom") or name not in names:
        raise RequestError(
            f"tool_choice is {quote(choice)}, must be 'auto', 'none', 'required', or name one of the tools of the "
            f"request: {', '.join(names)[:200] or 'none'}"
        )
    return True, (name,)


def read_format(name: str, given: Any) -> Mapping[str, Any] | None:
    """Return the schema of a `response_format`, in the form of any protocol; None for text. Raises RequestError."""
    fields = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    kind = fields.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    nested: Any = fields.get("json_schema", fields)
    schema: Any = cast("dict[str, Any]", nested).get("schema") if isinstance(nested, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise RequestError(f"{name} is {quote(given)}, must be of type text, json_object, or json_schema with a schema")
    return cast("dict[str, Any]", schema)


def json_reply(
    schema: Mapping[str, Any] | None, forced: Sequence[str], tools: Sequence[Mapping[str, Any]], *, reads_calls: bool
) -> JsonReply | None:
    """Return the form of the reply; None for free text. With tools and a schema, the policy may call or answer."""
    if forced:
        return JsonReply(None, forced)
    if schema is None:
        return None
    return JsonReply(schema, [tool["function"]["name"] for tool in tools] if reads_calls else ())
