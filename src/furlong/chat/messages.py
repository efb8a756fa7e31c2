"""Chat messages as clients send them: checks, text, size, and keys that tell whether two messages are the same.

A client echoes the assistant's messages back in each request. Its libraries change ids, add fields, drop the reasoning
and write the arguments of tool calls anew, so messages are compared by key and never by their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import xxhash

from furlong.errors import RolloutError

Message = dict[str, Any]
Match = Literal["strict", "echo"]
KeyFunction = Callable[[Message], str]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
REASONING_FIELDS = ("reasoning_content", "reasoning")  # of DeepSeek, SGLang and vLLM, and of newer vLLM
_OTHER_TEXTS = ("name", "tool_call_id", "refusal")
_UNSUPPORTED_FIELDS = ("function_call", "audio")  # before tool_calls, and of models that speak
_TEXT_PARTS = ("text", "input_text", "output_text")
_END_OF_THOUGHT = "</think>"
LEAST_LONGEST = 16  # characters of the longest token


class TextParts(str):
    """The texts of several parts, joined by blanks as SGLang does; templates that loop over parts get `texts`."""

    __slots__ = ("texts",)
    texts: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> str:
        """Return the text of parts; that of a single part is plain text."""
        if len(texts) < 2:
            return "".join(texts)
        joined = cls(" ".join(texts))
        joined.texts = tuple(texts)
        return joined


class MessageError(RolloutError):
    """A message of a request is invalid. `status` is that of an HTTP reply."""

    status = 400


class CheckedMessages(list[Message]):
    """Messages that `checked_messages` returned; it does not check them again."""


def checked_messages(value: Any, name: str = "messages") -> CheckedMessages:
    """Return messages whose content is text, with reasoning under one name. Raises MessageError naming the field.

    >>> checked_messages([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    [{'role': 'user', 'content': 'Hi'}]
    """
    if isinstance(value, CheckedMessages):
        return value
    if not isinstance(value, list | tuple) or not value:
        raise MessageError(f"{name} must be a list with at least one message")
    return CheckedMessages(_checked(message, f"{name}[{i}]") for i, message in enumerate(cast("Sequence[Any]", value)))


def _checked(value: Any, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise MessageError(f"{name} is {_shown(value)}, must be an object with role and content")
    message: Message = {key: each for key, each in cast("Mapping[str, Any]", value).items() if each is not None}
    role = message.get("role")
    if role not in ROLES:
        raise MessageError(f"{name}.role is {_shown(role)}, must be one of {', '.join(ROLES)}")
    message["content"] = text_of(message.get("content"), f"{name}.content", is_answer=role == "assistant")
    check_extras(message, name)
    for field in REASONING_FIELDS:
        if (thought := message.pop(field, None)) is not None:
            message["reasoning_content"] = thought
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    return message


def check_extras(message: Message, name: str) -> None:
    """Raise MessageError for a wrong value beside role and content. Unknown fields are left alone: clients add some."""
    for field in (*REASONING_FIELDS, *_OTHER_TEXTS):
        if message.get(field) is not None and not isinstance(message[field], str):
            raise MessageError(f"{name}.{field} is {_shown(message[field])}, must be text")
    for field in _UNSUPPORTED_FIELDS:
        if message.get(field):
            raise MessageError(
                f"{name}.{field} is {_shown(message[field])}, which is not supported; use tool_calls and text"
            )
    if (calls := message.get("tool_calls")) is not None:
        _check_calls(calls, f"{name}.tool_calls")


def _check_calls(value: Any, name: str) -> None:
    if not isinstance(value, list):
        raise MessageError(f"{name} is {_shown(value)}, must be a list of calls")
    for i, call in enumerate(cast("list[Any]", value)):
        given = cast("dict[str, Any]", call) if isinstance(call, dict) else {}
        function: Any = given.get("function")
        if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
            raise MessageError(f"{name}[{i}] is {_shown(call)}, must be an object with function.name and arguments")
        if given.get("type") not in (None, "function"):
            raise MessageError(f"{name}[{i}].type is {_shown(given['type'])}, must be 'function'")
        if given.get("id") is not None and not isinstance(given["id"], str):
            raise MessageError(f"{name}[{i}].id is {_shown(given['id'])}, must be text")
        arguments: Any = cast("dict[str, Any]", function).get("arguments")
        if arguments is not None and not isinstance(arguments, str | dict):
            raise MessageError(
                f"{name}[{i}].function.arguments is {_shown(arguments)}, must be JSON as text, or an object"
            )


def text_of(content: Any, name: str = "content", *, is_answer: bool = False) -> str:
    """Return the text of a message's content: joined parts, "" for null. Raises MessageError for images and audio.

    is_answer: parts are pieces of a text that the policy sampled, and have nothing between them.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise MessageError(f"{name} is {_shown(content)}, must be text or a list of parts of type text")
    texts: list[str] = []
    for i, part in enumerate(cast("list[Any]", content)):
        fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        if fields.get("type") not in _TEXT_PARTS or not isinstance(fields.get("text"), str):
            kind = fields.get("type", part)
            raise MessageError(f"{name}[{i}] has type {_shown(kind)}; only parts of type text are supported")
        texts.append(fields["text"])
    return "".join(texts) if is_answer else TextParts.of(texts)


def key_of(message: Message, match: Match = "echo") -> str:
    """Return the key of a checked message: role, text, tool calls, and with "strict" the reasoning.

    Not in the key: ids, `name` and unknown fields. With "echo", an assistant's text is compared without its reasoning
    and without whitespace at its ends, because clients drop both.
    """
    text, role = message["content"], message["role"]
    values: list[Any] = [role]
    if role == "assistant" and match == "echo":
        values.append(text.rpartition(_END_OF_THOUGHT)[2].strip())
    else:
        values.append(text)
    if match == "strict":
        values.append(message.get("reasoning_content"))
    values += [[call["function"]["name"], _arguments_key(call["function"])] for call in message.get("tool_calls", ())]
    return json.dumps(values, ensure_ascii=False)


def _arguments_key(function: Mapping[str, Any]) -> Any:
    """Return the arguments as canonical JSON; the text itself if it is not JSON."""
    arguments: Any = function.get("arguments")
    if not isinstance(arguments, str):
        return canonical(arguments or {})
    try:
        return canonical(json.loads(arguments) if arguments.strip() else {})
    except (ValueError, RecursionError, MessageError):
        return arguments


def canonical(value: Any) -> str:
    """Return JSON that is the same for equal values: sorted keys, numbers by value, and no keys with null.

    JavaScript writes 1.0 as 1 and large integers as the nearest 64-bit float, and clients drop nulls. Raises
    MessageError if it is nested too deeply.

    >>> canonical({"b": 1e3, "a": None}) == canonical({"b": 1000})
    True
    """
    try:
        return json.dumps(_by_value(value), sort_keys=True, default=str)
    except RecursionError:
        raise MessageError("the tools or arguments of the request are nested too deeply; flatten them") from None


def _by_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _by_value(each) for key, each in cast("dict[Any, Any]", value).items() if each is not None}
    if isinstance(value, list | tuple):
        return [_by_value(each) for each in cast("Sequence[Any]", value)]
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value) + 0.0
        except OverflowError:
            return value
    return value + 0.0 if isinstance(value, float) else value  # -0.0 is 0


def same_reasoning(stored: Message, sent: Message) -> bool:
    """Return whether a client sent an assistant's reasoning back unchanged, or left it out."""
    thought = sent.get("reasoning_content")
    return thought is None or thought.strip() == str(stored.get("reasoning_content") or "").strip()


def chain(start: str, keys: Sequence[str]) -> list[str]:
    """Return the hash of each prefix of `keys`, the empty one first; equal prefixes have equal hashes."""
    hashes = [link("", start)]
    for key in keys:
        hashes.append(link(hashes[-1], key))
    return hashes


def link(before: str, key: str) -> str:
    """Return the next hash of a chain."""
    return xxhash.xxh3_128_hexdigest(f"{before}\n{key}".encode("utf-8", "surrogatepass"))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def longest_token(tokenizer: Any) -> int:
    """Return the characters of the longest token, at least 16."""
    if tokenizer is None or not hasattr(tokenizer, "get_vocab"):
        return LEAST_LONGEST
    return max(LEAST_LONGEST, max(map(len, tokenizer.get_vocab()), default=0))


def num_chars(*values: Any) -> int:
    """Return the number of characters in the strings of nested values, and one for each container."""
    total, left = 0, list(values)
    while left:
        value = left.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            left += value.keys()
            left += value.values()
            total += 1
        elif isinstance(value, list | tuple):
            left += value
            total += 1
    return total
