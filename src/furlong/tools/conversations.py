"""Conversations that a chat template is tested with: several turns, thinking, tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages and their tools; `name` describes the case. `thinks`: only for models with a thinking mode."""

    name: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    thinks: bool = False


def _tool(name: str, parameter: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    function = {"name": name, "description": f"Look up by {parameter}.", "parameters": schema}
    return {"type": "function", "function": function}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(
    text: str, *, thought: str | None = None, calls: list[tuple[str, dict[str, Any]]] | None = None
) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return message


def _result(text: str, *, call: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{call}", "content": text}


SYSTEM: Message = {"role": "system", "content": "You answer in one line."}
TOOLS = [_tool("weather", "city"), _tool("train", "station")]

CONVERSATIONS = (
    Conversation("one turn", [_user("Name a river."), _assistant("The Elbe.")]),
    Conversation(
        "several turns",
        [
            SYSTEM,
            _user("Name a river."),
            _assistant("The Elbe."),
            _user("Another."),
            _assistant("The Oder."),
            _user("Thanks."),
        ],
    ),
    Conversation(
        "thinking, several turns",
        [
            SYSTEM,
            _user("What is 17 + 25?"),
            _assistant("42", thought="7 + 5 is 12, so 42."),
            _user("And 42 + 9?"),
            _assistant("51", thought="2 + 9 is 11."),
            _user("Good."),
            _assistant("Anything else?"),
        ],
        thinks=True,
    ),
    Conversation(
        "thinking inside the text",
        [
            _user("What is 17 + 25?"),
            _assistant("<think>\n7 + 5 is 12.\n</think>\n\n42"),
            _user("And 42 + 9?"),
            _assistant("<think>\n2 + 9 is 11.\n</think>\n\n51"),
        ],
        thinks=True,
    ),
    Conversation(
        "a tool call",
        [
            _user("Weather in Riga?"),
            _assistant("", calls=[("weather", {"city": "Riga"})]),
            _result("rain"),
            _assistant("It rains."),
            _user("Thanks."),
            _assistant("You are welcome."),
        ],
        TOOLS,
    ),
    Conversation(
        "parallel tool calls",
        [
            SYSTEM,
            _user("Weather in Riga, and the next train?"),
            _assistant("I look.", calls=[("weather", {"city": "Riga"}), ("train", {"station": "Riga"})]),
            _result("rain"),
            _result("18:05", call=1),
            _assistant("Rain; 18:05."),
            _user("And in Oslo?"),
            _assistant("", calls=[("weather", {"city": "Oslo"})]),
            _result("snow"),
            _assistant("Snow."),
        ],
        TOOLS,
    ),
    Conversation(
        "thinking between tool calls",
        [
            _user("Is it warmer in Riga or in Oslo?"),
            _assistant("", thought="Riga first.", calls=[("weather", {"city": "Riga"})]),
            _result("4 degrees"),
            _assistant("", thought="Now Oslo.", calls=[("weather", {"city": "Oslo"})]),
            _result("-2 degrees"),
            _assistant("In Riga.", thought="4 is above -2."),
            _user("By how much?"),
            _assistant("6 degrees.", thought="4 + 2."),
        ],
        TOOLS,
        thinks=True,
    ),
)
