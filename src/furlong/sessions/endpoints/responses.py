"""OpenAI's POST /v1/responses of a session."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import orjson

from furlong.chat.messages import Message, MessageError, checked_messages, text_of
from furlong.inference.request_error import RequestError
from furlong.inference.server import field_rules as rules
from furlong.inference.server.fields import boolean, quote
from furlong.sessions.endpoints.chat_completions import read_tool_choice
from furlong.sessions.endpoints.client_call import (
    ClientCall,
    checked_tools,
    objects,
    strict_tools,
    token_limit,
)
from furlong.sessions.endpoints.served_session import StreamHead, StreamPart
from furlong.sessions.reply import Reply

_TOOL = rules.object_of(
    {
        "type": rules.text,
        "name": rules.filled_text,
        "description": rules.text,
        "parameters": rules.an_object,
        "strict": rules.flag,
    },
    required=("name",),
)
FIELDS: rules.Fields = {
    "model": rules.text,
    "input": rules.text_or_parts,
    "instructions": rules.text_or_parts,
    "tools": rules.list_of(rules.an_object),
    "tool_choice": rules.anything,
    "max_output_tokens": rules.num_tokens,
    "temperature": rules.temperature,
    "top_p": rules.top_p,
    "previous_response_id": rules.text,
    # The reasoning itself is returned, so there is no summary of it.
    "reasoning": rules.object_of(dict.fromkeys(("effort", "summary", "generate_summary"), rules.text)),
    **dict.fromkeys(("stream", "parallel_tool_calls"), rules.flag),
    # Without an effect on the result:
    **dict.fromkeys(("user", "service_tier", "safety_identifier"), rules.text),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), rules.text),
    "store": rules.flag,
    "metadata": rules.metadata,
    "stream_options": rules.object_of({"include_obfuscation": rules.flag}),
    **dict.fromkeys(("client_metadata", "prompt_cache_options"), rules.an_object),
    # Not implemented:
    "text": rules.only(
        {"format": {"type": "text"}},
        {"verbosity": "medium"},
        {"format": {"type": "text"}, "verbosity": "medium"},
        {},
    ),
    "truncation": rules.only("disabled"),
    "include": rules.only(["reasoning.encrypted_content"], []),
    "background": rules.only(False),
    "top_logprobs": rules.only(0),
    **dict.fromkeys(("max_tool_calls", "conversation", "prompt", "moderation"), rules.only()),
    **dict.fromkeys(("context_management", "background_options"), rules.only()),
}
_THOUGHT = rules.object_of(
    {"type": rules.one_of("reasoning_text"), "text": rules.text}, required=("text",), others=rules.anything
)
_ITEMS: Mapping[Any, rules.Rule] = {
    "message": rules.object_of({"role": rules.text}, others=rules.anything),
    "reasoning": rules.object_of(
        {
            "summary": rules.list_of(rules.an_object),
            "content": rules.list_of(_THOUGHT),
        },
        others=rules.anything,
    ),
    "function_call": rules.object_of(
        {"name": rules.filled_text, "arguments": rules.text, "call_id": rules.text},
        required=("name",),
        others=rules.anything,
    ),
    "function_call_output": rules.object_of({"call_id": rules.text}, others=rules.anything),
}


def read(body: Mapping[str, Any], earlier: Sequence[Message] = ()) -> ClientCall:
    """Check a request. `earlier` is the conversation of its `previous_response_id`, without instructions.

    Raises RequestError and MessageError naming the field.
    """
    rules.check_fields(body, FIELDS)
    given = objects(body, "tools")
    tools = checked_tools([_tool(i, tool) for i, tool in enumerate(given)])
    effort: str | None = (body.get("reasoning") or {}).get("effort")
    instructions: list[Message] = []
    if body.get("instructions"):
        instructions.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
    messages = [*instructions, *earlier, *_input(body.get("input"))]
    return ClientCall(
        messages=checked_messages(messages, "input"),
        tools=tools,
        template_kwargs={} if effort is None else {"reasoning_effort": effort},
        sampling={name: body.get(name) for name in ("temperature", "top_p")},
        max_tokens=token_limit(body, "max_output_tokens"),
        is_stream=boolean(body, "stream"),
        reads_calls=read_tool_choice(body.get("tool_choice"), has_tools=tools is not None),
        max_calls=None if boolean(body, "parallel_tool_calls", default=True) else 1,
        overridden=strict_tools(given),
        body=body,
    )


def _tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(f"tools[{i}].type is {quote(tool.get('type'))}; only functions are supported")
    _TOOL(f"tools[{i}]", tool)
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _input(value: Any) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise MessageError(f"input is {quote(value)}, must be text or a list of items")
    messages: list[Message] = []
    for i, each in enumerate(cast("list[Any]", value)):
        if not isinstance(each, dict):
            raise MessageError(f"input[{i}] is {quote(each)}, must be an object")
        _add_item(messages, cast("dict[str, Any]", each), f"input[{i}]")
    return messages


def _add_item(messages: list[Message], item: Mapping[str, Any], name: str) -> None:
    """Add an item: parts of one answer (reasoning, message, calls) are joined to one message."""
    answer = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    kind: Any = "message" if item.get("type") is None else item["type"]
    if isinstance(kind, str) and kind in _ITEMS:
        _ITEMS[kind](name, item)
    match kind:
        case "message" if item.get("role") == "assistant":
            text = text_of(item.get("content"), f"{name}.content")
            if answer is None or answer["content"] or answer.get("tool_calls"):
                messages.append({"role": "assistant", "content": text})
            else:
                answer["content"] = text
        case "message":
            messages.append({"role": item.get("role"), "content": text_of(item.get("content"), f"{name}.content")})
        case "reasoning":
            parts: list[Any] = item.get("content") or []
            thought = "".join(part["text"] for part in parts)
            messages.append({"role": "assistant", "content": ""} | ({"reasoning_content": thought} if thought else {}))
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if answer is None:
                answer = Message(role="assistant", content="")
                messages.append(answer)
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
        case "function_call_output":
            text = text_of(item.get("output"), f"{name}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        case _:
            raise MessageError(f"{name}.type is {quote(kind)}, which is not supported")


_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


def _item_id(kind: str, response_id: str) -> str:
    return f"{'rs' if kind == 'reasoning' else 'msg'}_{response_id}"


def _text_item(kind: str, response_id: str, text: str) -> dict[str, Any]:
    """Return an item of the kind reasoning or message."""
    item = {"type": kind, "id": _item_id(kind, response_id)}
    if kind == "reasoning":
        return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {**item, "role": "assistant", "content": content, "status": "completed"}


def _items(reply: Reply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        items.append(_text_item("reasoning", reply.id, reply.reasoning))
    if reply.content or not reply.tool_calls:
        items.append(_text_item("message", reply.id, reply.content))
    for call in reply.tool_calls:
        fields = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        items.append(fields | call["function"])
    return items


def write(call: ClientCall, reply: Reply, model: str) -> dict[str, Any]:
    """Return the body of the reply."""
    is_cut = reply.finish_reason != "stop"
    sampled = reply.num_tokens
    return {
        **_shell(call, f"resp_{reply.id}", model),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(reply),
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + sampled,
        },
    }


def _shell(call: ClientCall, response_id: str, model: str) -> dict[str, Any]:
    """Return the fields that are known before the answer."""
    body = call.body
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "model": model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "metadata": body.get("metadata") or {},
        "usage": None,
    }


async def stream(
    call: ClientCall, model: str, parts: AsyncIterator[StreamPart], streams: Sequence[StreamHead]
) -> AsyncGenerator[bytes]:
    """Yield the events of a reply while it is sampled."""
    (source,) = streams
    pending = {**_shell(call, f"resp_{source.response_id}", model), "status": "in_progress"}
    events = _StreamEvents(source.response_id)
    yield events.event("created", response=pending)
    yield events.event("in_progress", response=pending)
    async for _, part in parts:
        if isinstance(part, Reply):
            whole = write(call, part, model)
            for event in events.end(whole["output"]):
                yield event
            yield events.event(whole["status"], response=whole)
        else:
            for event in (*events.grow("reasoning", part.reasoning), *events.grow("message", part.content)):
                yield event


class _StreamEvents:
    """Numbered events of a stream: one item of text may be open, with one part."""

    def __init__(self, response_id: str) -> None:
        self._id = response_id
        self._number, self._index = 0, -1
        self._kind, self._text = "", ""

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return the next event."""
        name = f"response.{kind}"
        data = orjson.dumps({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"

    def grow(self, kind: Literal["reasoning", "message"], text: str) -> Iterator[bytes]:
        """Yield the events of more text."""
        if not text:
            return
        if kind != self._kind:
            yield from self._close()
            yield from self._open(kind)
        self._text += text
        yield self.event(f"{_PARTS[kind]}.delta", **self._at, delta=text)

    def end(self, items: Sequence[dict[str, Any]]) -> Iterator[bytes]:
        """Yield the events of the calls, which come last, and of an empty message."""
        if self._kind != "message" and any(item["type"] == "message" for item in items):
            yield from self._close()
            yield from self._open("message")
        yield from self._close()
        for item in items:
            if item["type"] == "function_call":
                self._index += 1
                at = {"output_index": self._index, "item_id": item["id"]}
                opened = {**item, "status": "in_progress", "arguments": ""}
                yield self.event("output_item.added", output_index=self._index, item=opened)
                yield self.event("function_call_arguments.delta", **at, delta=item["arguments"])
                yield self.event("function_call_arguments.done", **at, arguments=item["arguments"])
                yield self.event("output_item.done", output_index=self._index, item=item)

    @property
    def _at(self) -> dict[str, Any]:
        return {"output_index": self._index, "item_id": _item_id(self._kind, self._id), "content_index": 0}

    def _open(self, kind: Literal["reasoning", "message"]) -> Iterator[bytes]:
        self._index, self._kind, self._text = self._index + 1, kind, ""
        item = {**_text_item(kind, self._id, ""), "content": []}
        yield self.event("output_item.added", output_index=self._index, item={**item, "status": "in_progress"})
        yield self.event("content_part.added", **self._at, part=_text_item(kind, self._id, "")["content"][0])

    def _close(self) -> Iterator[bytes]:
        if not self._kind:
            return
        item = _text_item(self._kind, self._id, self._text)
        yield self.event(f"{_PARTS[self._kind]}.done", **self._at, text=self._text)
        yield self.event("content_part.done", **self._at, part=item["content"][0])
        yield self.event("output_item.done", output_index=self._index, item=item)
        self._kind = ""
