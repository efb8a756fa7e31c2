"""A tokenizer whose ids are the bytes of a conversation, for models behind chat endpoints, whose ids are unknown.

A conversation is a sequence of records, each ended by the byte `END`: tools as T + JSON, messages as M + JSON, and
answers of the model as A + text, with tool calls in Hermes' form. Sessions extend it as any other chat template, and
`conversation_of` turns it back into messages for a request.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from furlong.chat.parsers import parse_hermes, parse_reply

END = "\x1e"  # the record separator of ASCII, which ends an answer
TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}\x1e{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}A{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\x1e"
    "{% else %}M{{ m | tojson }}\x1e{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


class WireTokenizer:
    """Encodes text as its UTF-8 bytes. `decode` without special tokens returns text as a person reads it."""

    chat_template = TEMPLATE
    eos_token_id = pad_token_id = ord(END)
    eos_token = pad_token = END
    all_special_ids = (ord(END),)
    all_special_tokens = (END,)
    added_tokens_decoder: Mapping[int, str] = {}

    def __len__(self) -> int:
        return 256

    def __call__(self, text: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        """Return the bytes of several texts."""
        return {"input_ids": [self.encode(each) for each in text]}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the bytes of a text."""
        del add_special_tokens
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of bytes; without special tokens, the contents of the records."""
        text = bytes(token_ids).decode("utf-8", "replace")
        if not skip_special_tokens:
            return text
        return "\n".join(_readable(record) for record in text.split(END) if record)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **_: Any,
    ) -> Any:
        """Return the records of a conversation, as text or as ids."""
        records = ["T" + json.dumps(tools)] if tools else []
        for message in conversation:
            is_answer = message.get("role") == "assistant"
            records.append("A" + answer_text(message) if is_answer else "M" + json.dumps(dict(message)))
        text = "".join(record + END for record in records) + ("A" if add_generation_prompt else "")
        return self.encode(text) if tokenize else text


def answer_text(message: Mapping[str, Any]) -> str:
    """Return the text of an answer of the model, with reasoning in tags and calls in Hermes' form."""
    reasoning: Any = message.get("reasoning_content") or message.get("reasoning")
    text = f"<think>{reasoning}</think>" if reasoning else ""
    text += str(message.get("content") or "")
    for call in cast("list[dict[str, Any]]", message.get("tool_calls") or []):
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        with contextlib.suppress(ValueError):  # kept as the model wrote it; the parser counts the call as ill-formed
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        text += f"<tool_call>{json.dumps({'name': function.get('name'), 'arguments': arguments})}</tool_call>"
    return text.replace(END, "")


def conversation_of(ids: Sequence[int]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages and tools of a prompt. Tool calls and their results are numbered anew, in order."""
    messages: list[dict[str, Any]] = []
    tools: list[Any] = []
    waiting: list[str] = []
    for record in bytes(ids).decode("utf-8", "replace").split(END)[:-1]:
        kind, text = record[:1], record[1:]
        if kind == "T":
            tools = json.loads(text)
        elif kind == "M":
            message: dict[str, Any] = json.loads(text)
            if message.get("role") == "tool" and waiting:
                message["tool_call_id"] = waiting.pop(0)
            messages.append(message)
        else:
            parsed = parse_reply(text, tools, parse_hermes)
            answer: dict[str, Any] = {"role": "assistant", "content": parsed.content}
            waiting = [f"call_{len(messages)}_{i}" for i in range(len(parsed.calls))]
            if parsed.calls:
                answer["tool_calls"] = [
                    {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for id, call in zip(waiting, parsed.calls, strict=True)
                ]
            messages.append(answer)
    return messages, tools


def _readable(record: str) -> str:
    if record[:1] != "M":
        return record.removeprefix("A")
    try:
        return str(json.loads(record[1:]).get("content", ""))
    except ValueError:
        return record
