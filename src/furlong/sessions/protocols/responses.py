"""OpenAI's POST /v1/responses of a session."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from furlong.chat.messages import Message, MessageError, checked_messages, text_of
from furlong.inference.request_error import RequestError
from furlong.inference.server.schemas import (
    FilledText,
    NumTokens,
    Schema,
    StreamOptions,
    Temperature,
    TopP,
    convert,
    quote,
    read_fields,
)
from furlong.inference.server.web import sse
from furlong.sessions.open_session import ClientCall, StreamPart
from furlong.sessions.protocols.chat import read_tool_choice
from furlong.sessions.session import Reply, ReplyStream


class _Tool(Schema):
    name: FilledText
    type: Literal["function"]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Reasoning(Schema):
    """The reasoning itself is returned, so there is no summary of it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesFields(Schema):
    """The body of a request."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: NumTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    previous_response_id: str | None = None
    reasoning: _Reasoning | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Any = None  # echoed

    IGNORED: ClassVar = (
        *("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store"),
        *("client_metadata", "prompt_cache_options"),
    )
    ONLY: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "text": ({"format": {"type": "text"}}, {"verbosity": "medium"},
                 {"format": {"type": "text"}, "verbosity": "medium"}),
        "truncation": ("disabled",),
        "include": (["reasoning.encrypted_content"],),
        "background": (False,),
        "top_logprobs": (0,),
        **dict.fromkeys(("max_tool_calls", "conversation", "prompt", "moderation"), ()),
        **dict.fromkeys(("context_management", "background_options"), ()),
    }  # fmt: skip


class _MessageItem(msgspec.Struct):
    role: str | None = None
    content: Any = None


class _Thought(msgspec.Struct):
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class _ReasoningItem(msgspec.Struct):
    summary: list[dict[str, Any]] | None = None
    content: list[_Thought] | None = None


class _CallItem(msgspec.Struct):
    name: FilledText
    arguments: str | None = None
    call_id: str | None = None


class _OutputItem(msgspec.Struct):
    call_id: str | None = None
    output: Any = None


_ITEMS: Mapping[Any, type[msgspec.Struct]] = {
    "message": _MessageItem,
    "reasoning": _ReasoningItem,
    "function_call": _CallItem,
    "function_call_output": _OutputItem,
}


def read(body: Mapping[str, Any], earlier: Sequence[Message] = ()) -> ClientCall:
    """Check a request. `earlier` is the conversation of its `previous_response_id`, without instructions.

    Raises RequestError and MessageError naming the field.
    """
    fields = read_fields(ResponsesFields, body)
    tools: list[dict[str, Any]] = []
    is_strict = False
    for i, given in enumerate(fields.tools or ()):
        if given.get("type") != "function":
            raise RequestError(f"tools[{i}].type is {quote(given.get('type'))}; only functions are supported")
        tool = read_fields(_Tool, given, f"tools[{i}].")
        named = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        tools.append({"type": "function", "function": {k: v for k, v in named.items() if v is not None}})
        is_strict = is_strict or bool(tool.strict)
    messages: list[Message] = []
    if fields.instructions:
        messages.append({"role": "system", "content": text_of(fields.instructions, "instructions")})
    messages += earlier
    if fields.input is None:
        raise MessageError("input is missing; it must be text or a list of items")
    items: list[Message] = []
    if isinstance(fields.input, str):
        items.append({"role": "user", "content": fields.input})
    else:
        for i, item in enumerate(fields.input):
            _add_item(items, item, f"input[{i}]")
    effort = None if fields.reasoning is None else fields.reasoning.effort
    return ClientCall(
        messages=checked_messages([*messages, *items], "input"),
        tools=tools or None,
        template_kwargs={} if effort is None else {"reasoning_effort": effort},
        sampling={"temperature": fields.temperature, "top_p": fields.top_p},
        max_tokens=fields.max_output_tokens,
        model=fields.model,
        is_stream=bool(fields.stream),
        reads_calls=read_tool_choice(fields.tool_choice),
        max_calls=1 if fields.parallel_tool_calls is False else None,
        overridden=["strict"] if is_strict else [],
        request=fields,
    )


def _add_item(messages: list[Message], item: Mapping[str, Any], name: str) -> None:
    """Add an item: parts of one answer (reasoning, message, calls) are joined to one message."""
    kind: Any = "message" if item.get("type") is None else item["type"]
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise MessageError(f"{name}.type is {quote(kind)}, which is not supported")
    answer = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match convert(item, _ITEMS[kind], f"{name}."):
        case _MessageItem(role="assistant", content=content):
            text = text_of(content, f"{name}.content")
            if answer is None or answer["content"] or answer.get("tool_calls"):
                messages.append({"role": "assistant", "content": text})
            else:
                answer["content"] = text
        case _MessageItem(role=role, content=content):
            messages.append({"role": role, "content": text_of(content, f"{name}.content")})
        case _ReasoningItem(content=parts):
            thought = "".join(part.text for part in parts or ())
            messages.append({"role": "assistant", "content": ""} | ({"reasoning_content": thought} if thought else {}))
        case _CallItem() as call:
            if answer is None:
                answer = Message(role="assistant", content="")
                messages.append(answer)
            function = {"name": call.name, "arguments": call.arguments}
            answer.setdefault("tool_calls", []).append({"id": call.call_id, "type": "function", "function": function})
        case _OutputItem() as result:
            text = text_of(result.output, f"{name}.output")
            messages.append({"role": "tool", "tool_call_id": result.call_id, "content": text})
        case _:
            raise AssertionError(kind)


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


def write(call: ClientCall, replies: Sequence[Reply], model: str) -> dict[str, Any]:
    """Return the body of the reply."""
    (reply,) = replies
    is_cut = reply.finish_reason != "stop"
    sampled = len(reply.tokens)
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
    fields: ResponsesFields = call.request
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "metadata": fields.metadata or {},
        "usage": None,
    }


async def stream(
    call: ClientCall, model: str, parts: AsyncIterator[StreamPart], streams: Sequence[ReplyStream]
) -> AsyncGenerator[bytes]:
    """Yield the events of a reply while it is sampled."""
    (source,) = streams
    pending = {**_shell(call, f"resp_{source.response_id}", model), "status": "in_progress"}
    events = _StreamEvents(source.response_id)
    yield events.event("created", response=pending)
    yield events.event("in_progress", response=pending)
    async for _, part in parts:
        if isinstance(part, Reply):
            whole = write(call, [part], model)
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
        self._number += 1
        return sse({"type": name, "sequence_number": self._number - 1, **fields}, name)

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
