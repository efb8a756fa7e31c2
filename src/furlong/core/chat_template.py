"""Rendering of chat messages with a tokenizer's template, from the forms in which clients and data files write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2

from furlong.core.text import shortened

# Raised by Python if the code that Jinja makes of a template is nested too deeply.
TOO_NESTED = (RecursionError, SyntaxError, MemoryError)
# Raised by templates for conversations that they do not support; other exceptions are bugs and propagate.
TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    *TOO_NESTED,
)

_HANDLES_TEXT = re.compile(r"arguments\s+is\s+(?:not\s+)?string")


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    """Call `tokenizer.apply_chat_template` with messages as templates expect them (`template_messages`).

    Arguments of tool calls that are JSON text become objects, unless the template tests whether they are text. A
    template that can only append text to text raises TypeError for objects and gets the text. Raises TEMPLATE_ERRORS.
    """
    source: Any = options.get("chat_template") or getattr(tokenizer, "chat_template", None)
    as_written = template_messages(messages, decodes_arguments=False)
    if _HANDLES_TEXT.search(str(source or "")):
        return tokenizer.apply_chat_template(as_written, **options)
    decoded = template_messages(messages)
    try:
        return tokenizer.apply_chat_template(decoded, **options)
    except TypeError:
        if decoded == as_written:
            raise
        return tokenizer.apply_chat_template(as_written, **options)


def demonstration_problem(prompt: str | Sequence[Mapping[str, Any]], label: Any) -> str | None:
    """Return why SFT cannot train on a row, which lacks an assistant turn or a response; None if it can."""
    if isinstance(prompt, str):
        if isinstance(label, str) and label:
            return None
        return (
            f"a plain prompt needs its response as a string in the label column, got {shortened(label)}; name the "
            "column with --label-key, or give conversations"
        )
    if any(message["role"] == "assistant" and message.get("step_loss_mask", 1) != 0 for message in prompt):
        return None
    count = f"{len(prompt)} message{'s' * (len(prompt) != 1)}"
    return f"a conversation of {count} has no assistant turn to train on; add one, or remove the row"


def template_messages(messages: Sequence[Mapping[str, Any]], *, decodes_arguments: bool = True) -> list[dict[str, Any]]:
    """Return messages whose content is text ("" for null) and whose tool calls have arguments as objects.

    Arguments that are not a JSON object stay text, and empty text is an empty object. Messages are copied where they
    change.

    >>> call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    >>> template_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])[0]["tool_calls"]
    [{'function': {'name': 'add', 'arguments': {'a': 1}}}]
    """
    return [_message(message, decodes_arguments=decodes_arguments) for message in messages]


def _message(message: Mapping[str, Any], *, decodes_arguments: bool) -> dict[str, Any]:
    changed = dict(message)
    if changed.get("content") is None:
        changed["content"] = ""
    calls: Any = changed.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [_call(call, decodes_arguments) for call in cast("list[Any]", calls)]
    return changed


def _call(call: Any, decodes_arguments: bool) -> Any:
    """Return a call, written as `{"function": {...}}` or as the function alone, with its arguments decoded."""
    if not isinstance(call, dict):
        return call
    fields = cast("dict[str, Any]", call)
    if isinstance(fields.get("function"), dict):
        return {**fields, "function": _call(fields["function"], decodes_arguments)}
    arguments = fields.get("arguments")
    if not isinstance(arguments, str):
        return fields
    if not arguments.strip():
        return {**fields, "arguments": {} if decodes_arguments else "{}"}
    if not decodes_arguments:
        return fields
    try:
        value: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return fields
    return {**fields, "arguments": value} if isinstance(value, dict) else fields
