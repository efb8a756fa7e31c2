"""What the protocols have in common: a checked call, its sampling parameters, and fields that are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, cast

from furlong.chat.messages import Message
from furlong.inference.request_error import RequestError
from furlong.inference.server.field_rules import (
    MAX_INT32,
    Rule,
    an_object,
    anything,
    filled_text,
    flag,
    list_of,
    object_of,
    text,
)
from furlong.inference.server.fields import integer, quote

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", "conversation")
FUNCTION: Rule = object_of(
    {"name": filled_text, "description": text, "parameters": an_object, "strict": flag},
    required=("name",),
    others=anything,  # templates show the whole tool
)


@dataclass(frozen=True)
class ClientCall:
    """A request in any protocol. `messages` are in OpenAI's form; a request of token ids, or of plain text, has `ids`.

    sampling: sampling parameters that the client sent, under SGLang's names. reads_calls: tool calls are parsed.
    overridden: fields that constrain sampling in other ways; the policy samples freely, and the session counts them.
    wants_texts: the text of each token. wants_prompt_ids: the ids that the engine read.
    """

    messages: Sequence[Message] = ()
    ids: Sequence[int] | str | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_tokens: int | None = None
    n: int = 1
    is_stream: bool = False
    reads_calls: bool = True
    max_calls: int | None = None
    overridden: Sequence[str] = ()
    wants_texts: bool = False
    wants_prompt_ids: bool = False
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def wants_tokens(self) -> bool:
        """Whether the reply has token ids, log-probs or versions."""
        return self.ids is not None or self.wants_texts or self.wants_prompt_ids


def check_model(asked: Any, served: str) -> None:
    """Raise RequestError for a model that is not served; the last part of its path will do."""
    if asked not in (None, "", "default", "actor", served) and asked != PurePath(served).name:
        raise RequestError(f"model is {quote(asked)}, but this server has {quote(served)}; use that name, or 'default'")


def token_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first limit of new tokens that the body has."""
    name = next((name for name in names if body.get(name) is not None), None)
    return None if name is None else integer(body, name, low=1, high=MAX_INT32)


def objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a field that is a list of objects; [] if it is absent."""
    value: Any = body.get(name)
    if value is None:
        return []
    list_of(an_object)(name, value)
    return cast("list[dict[str, Any]]", value)


def template_kwargs(name: str, value: Any) -> None:
    """Accept an object of values for the chat template."""
    an_object(name, value)
    if wrong := next((key for key in value if not key.isidentifier() or key in RESERVED), None):
        raise RequestError(f"{name}.{wrong} is not a value that a request may set; remove it")


def strict_tools(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `overridden` for tools whose calls the client wants to be constrained to their schema."""
    is_strict = any(tool.get("strict") or cast("Any", tool.get("function") or {}).get("strict") for tool in tools)
    return ["strict"] if is_strict else []


def checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return tools in OpenAI's form. Raises RequestError for a tool that is not a function with a name."""
    for i, tool in enumerate(tools):
        function: Any = tool.get("function")
        if tool.get("type", "function") != "function":
            raise RequestError(f"tools[{i}].type is {quote(tool.get('type'))}; only functions are supported")
        FUNCTION(f"tools[{i}].function", function)
    return tools or None
