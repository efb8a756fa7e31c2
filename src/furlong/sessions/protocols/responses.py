"""OpenAI's POST /v1/responses of a session."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from furlong.sessions.json_replies import json_reply, read_format, read_tool_choice
from furlong.sessions.open_session import ClientCall, StreamPart
from furlong.sessions.protocols.chat import CONSTRAINTS
from furlong.sessions.session import Reply, ReplyStream

# Run by OpenAI: the policy does not see them. Tools that the client runs under names of OpenAI are refused.
HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")


class _Tool(Schema):
    name: FilledText
    type: Literal["function"]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _CustomTool(Schema):
    """A tool whose input is text. A grammar is part of the description; the policy samples freely."""

    name: FilledText
    type: Literal["custom"]
    description: str | None = None
    format: dict[str, Any] | None = None


class _Namespace(Schema):
    """Tools of one origin, which the policy sees as `namespace.tool`."""

    name: FilledText
    type: Literal["namespace"]
    description: str | None = None
    tools: list[dict[str, Any]] | None = None


class _Reasoning(Schema):
    """The reasoning itself is returned, so there is no summary of it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _Text(Schema):
    verbosity: str | None = None
    format: dict[str, Any] | None = None


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
    text: _Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Any = None  # echoed

    IGNORED: ClassVar = (
        *("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store"),
        *("client_metadata", "prompt_cache_options", "truncation", "include"),
    )
    ONLY: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "top_logprobs": (0,),
        **dict.fromkeys(("conversation", "prompt"), ()),
        **CONSTRAINTS,
    }


class _MessageItem(msgspec.Struct):
    role: str | None = None
    content: Any = None


class _Thought(msgspec.Struct):
    text: str
    type: Literal["reasoning_text", "text"] = "reasoning_text"


class _ReasoningItem(msgspec.Struct):
    summary: list[dict[str, Any]] | None = None
    content: list[_Thought] | None = None


class _CallItem(msgspec.Struct):
    name: FilledText
    arguments: str | None = None
    call_id: str | None = None
    namespace: str | None = None


class _CustomCallItem(msgspec.Struct):
    name: FilledText
    input: str = ""
    call_id: str | None = None
    namespace: str | None = None


class _OutputItem(msgspec.Struct):
    call_id: str | None = None
    output: Any = None


_ITEMS: Mapping[Any, type[msgspec.Struct]] = {
    "message": _MessageItem,
    "reasoning": _ReasoningItem,
    "function_call": _CallItem,
    "function_call_output": _OutputItem,
    "custom_tool_call": _CustomCallItem,
    "custom_tool_call_output": _OutputItem,
}


class _Tools:
    """The tools of a request as functions. kinds: type, namespace and name of each by the name that the policy sees."""

    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        self.kinds: dict[str, tuple[str, str | None, str]] = {}
        self.ignored: list[str] = []
        self.is_strict = False

    def read(self, given: Sequence[dict[str, Any]], name: str, namespace: str | None = None) -> None:
        """Add tools. Raises RequestError naming the field."""
        for i, each in enumerate(given):
            kind, path = each.get("type"), f"{name}[{i}]."
            if kind == "namespace" and namespace is None:
                group = read_fields(_Namespace, each, path, ignored=self.ignored)
                self.read(group.tools or (), f"{path}tools", group.name)
            elif kind == "function":
                tool = read_fields(_Tool, each, path, ignored=self.ignored)
                self.is_strict = self.is_strict or bool(tool.strict)
                self._add(kind, namespace, tool.name, tool.description, tool.parameters)
            elif kind == "custom":
                custom = read_fields(_CustomTool, each, path, ignored=self.ignored)
                grammar: Any = (custom.format or {}).get("definition")
                texts = [custom.description, f"The input has this grammar:\n{grammar}" if grammar else None]
                self._add(kind, namespace, custom.name, "\n\n".join(filter(None, texts)) or None, _CUSTOM_PARAMETERS)
            elif isinstance(kind, str) and kind.startswith(HOSTED):
                self.ignored.append(f"tools[].type {quote(kind)}")
            else:
                raise RequestError(
                    f"{path}type is {quote(kind)}; only tools of type function, custom and namespace are supported"
                )

    def _add(
        self, kind: str, namespace: str | None, name: str, description: str | None, parameters: dict[str, Any] | None
    ) -> None:
        shown = name if namespace is None else f"{namespace}.{name}"
        values = {"name": shown, "description": description, "parameters": parameters}
        self.functions.append({"type": "function", "function": {k: v for k, v in values.items() if v is not None}})
        self.kinds[shown] = kind, namespace, name


_CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True)
class _Request:
    """A request, and the kinds of its tools (`_Tools.kinds`)."""

    fields: ResponsesFields
    kinds: Mapping[str, tuple[str, str | None, str]]


def read(body: Mapping[str, Any], earlier: Sequence[Message] = ()) -> ClientCall:
    """Check a request. `earlier` is the conversation of its `previous_response_id`, without instructions.

    Raises RequestError and MessageError naming the field.
    """
    tools = _Tools()
    fields = read_fields(ResponsesFields, body, ignored=tools.ignored)
    tools.read(fields.tools or (), "tools")
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
    reads_calls, forced = read_tool_choice(fields.tool_choice, tools.functions)
    schema = read_format("text.format", None if fields.text is None else fields.text.format)
    effort = None if fields.reasoning is None else fields.reasoning.effort
    return ClientCall(
        messages=checked_messages([*messages, *items], "input"),
        tools=tools.functions or None,
        template_kwargs={} if effort is None else {"reasoning_effort": effort},
        sampling={"temperature": fields.temperature, "top_p": fields.top_p},
        max_tokens=fields.max_output_tokens,
        model=fields.model,
        is_stream=bool(fields.stream),
        reads_calls=reads_calls,
        json_reply=json_reply(schema, forced, tools.functions, reads_calls=reads_calls),
        max_calls=1 if fields.parallel_tool_calls is False else None,
        overridden=["strict"] if tools.is_strict else [],
        ignored=tools.ignored,
        request=_Request(fields, tools.kinds),
    )


def _add_item(messages: list[Message], item: Mapping[str, Any], name: str) -> None:
    """Add an item: parts of one answer (reasoning, message, calls) are joined to one message."""
    kind: Any = "message" if item.get("type") is None else item["type"]
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise MessageError(f"{name}.type is {quote(kind)}, which is not supported")
    answer = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match convert(item, _ITEMS[kind], f"{name}."):
        case _MessageItem(role="assistant", content=content):
            text = text_of(content, f"{name}.content", is_answer=True)
            if answer is None or answer["content"] or answer.get("tool_calls"):
                messages.append({"role": "assistant", "content": text})
            else:
                answer["content"] = text
        case _MessageItem(role=role, content=content):
            messages.append({"role": role, "content": text_of(content, f"{name}.content")})
        case _ReasoningItem(content=parts):
            thought = "".join(part.text for part in parts or ())
            messages.append({"role": "assistant", "content": ""} | ({"reasoning_content": thought} if thought else {}))
        case (_CallItem() | _CustomCallItem()) as call:
            if answer is None:
                answer = Message(role="assistant", content="")
                messages.append(answer)
            shown = call.name if call.namespace is None else f"{call.namespace}.{call.name}"
            arguments = json.dumps({"input": call.input}) if isinstance(call, _CustomCallItem) else call.arguments
            function = {"name": shown, "arguments": arguments}
            answer.setdefault("tool_calls", []).append({"id": call.call_id, "type": "function", "function": function})
        case _OutputItem() as result:
            text = text_of(result.output, f"{name}.output")
            messages.append({"role": "tool", "tool_call_id": result.call_id, "content": text})
        case _:
            raise AssertionError(kind)


_CALL_TEXTS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


def _item_id(kind: str, response_id: str) -> str:
    return f"{'rs' if kind == 'reasoning' else 'msg'}_{response_id}"


def _text_item(kind: str, response_id: str, text: str) -> dict[str, Any]:
    item = {"type": kind, "id": _item_id(kind, response_id)}
    if kind == "reasoning":
        return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {**item, "role": "assistant", "content": content, "status": "completed"}


def _items(call: ClientCall, reply: Reply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        items.append(_text_item("reasoning", reply.id, reply.reasoning))
    if reply.content or not reply.tool_calls:
        items.append(_text_item("message", reply.id, reply.content))
    request: _Request = call.request
    for made in reply.tool_calls:
        name, arguments = made["function"]["name"], made["function"]["arguments"]
        kind, namespace, name = request.kinds.get(name, ("function", None, name))
        item = {"id": f"fc_{made['id']}", "call_id": made["id"], "status": "completed", "name": name}
        if namespace is not None:
            item["namespace"] = namespace
        if kind == "custom":
            text: Any = json.loads(arguments).get("input")
            items.append({**item, "type": "custom_tool_call", "input": text if isinstance(text, str) else arguments})
        else:
            items.append({**item, "type": "function_call", "arguments": arguments})
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
        "output": _items(call, reply),
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
    request: _Request = call.request
    fields = request.fields
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
            if item["type"] in _CALL_TEXTS:
                self._index += 1
                at = {"output_index": self._index, "item_id": item["id"]}
                field, kind = _CALL_TEXTS[item["type"]]
                opened = {**item, "status": "in_progress", field: ""}
                yield self.event("output_item.added", output_index=self._index, item=opened)
                yield self.event(f"{kind}.delta", **at, delta=item[field])
                yield self.event(f"{kind}.done", **at, **{field: item[field]})
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
