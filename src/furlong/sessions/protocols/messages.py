"""Anthropic's POST /v1/messages of a session, and the counting of its tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from furlong.chat.messages import Message, MessageError, TextParts, checked_messages, text_of
from furlong.inference.request_error import RequestError
from furlong.inference.server.schemas import (
    FilledText,
    NumTokens,
    Schema,
    StopList,
    Temperature,
    TopK,
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

HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")  # run by Anthropic


class _Text(msgspec.Struct, tag="text"):
    text: str


class _Thinking(msgspec.Struct, tag="thinking"):
    thinking: str
    signature: str | None = None


class _ToolUse(msgspec.Struct, tag="tool_use"):
    name: FilledText
    id: str | None = None
    input: dict[str, Any] | None = None


class _ToolResult(msgspec.Struct, tag="tool_result"):
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None


class _RedactedThinking(msgspec.Struct, tag="redacted_thinking"):
    data: str = ""


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Text | _Thinking | _RedactedThinking | _ToolUse | _ToolResult] | None = None


class _Tool(Schema):
    name: FilledText
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    IGNORED: ClassVar = ("cache_control", "eager_input_streaming")


class _ToolChoice(Schema):
    type: str = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _OutputConfig(Schema):
    """`effort` is counted; it is no parameter of chat templates."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class _ThinkingBudget(Schema):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NumTokens | None = None


class MessagesFields(Schema):
    """The body of a request."""

    messages: list[Any] | None = None
    model: str | None = None
    system: Any = None
    max_tokens: NumTokens | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: _ToolChoice | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: StopList | None = None
    stream: bool | None = None
    thinking: _ThinkingBudget | None = None
    output_config: _OutputConfig | None = None
    output_format: dict[str, Any] | None = None

    IGNORED: ClassVar = (
        *("metadata", "betas", "service_tier", "anthropic_version", "inference_geo", "user_profile_id"),
        *("workspace_id", "cache_control", "diagnostics", "speed"),
    )
    ONLY: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("container",), ()),
        **CONSTRAINTS,
    }


def read(body: Mapping[str, Any], *, counts_only: bool = False) -> ClientCall:
    """Check a request. Raises RequestError and MessageError naming the field."""
    ignored: list[str] = []
    fields = read_fields(MessagesFields, body, ignored=ignored)
    if fields.max_tokens is None and not counts_only:
        raise RequestError("max_tokens is missing; it must be an integer of at least 1")
    tools: list[dict[str, Any]] = []
    overridden: list[str] = []
    for i, given in enumerate(fields.tools or ()):
        kind: Any = given.get("type") or "custom"
        if str(kind).startswith(HOSTED):
            ignored.append(f"tools[].type {quote(kind)}")
            continue
        if kind != "custom":
            raise RequestError(f"tools[{i}].type is {quote(kind)}; only tools with an input_schema are supported")
        tool = read_fields(_Tool, given, f"tools[{i}].", ignored=ignored)
        description = {} if tool.description is None else {"description": tool.description}
        function = {"name": tool.name, **description, "parameters": tool.input_schema or {}}
        tools.append({"type": "function", "function": function})
        if tool.strict:
            overridden = ["strict"]
    kwargs: dict[str, Any] = {}
    if fields.thinking is not None:
        overridden += [] if fields.thinking.budget_tokens is None else ["budget_tokens"]
        kwargs = {"enable_thinking": fields.thinking.type != "disabled"}
    output = fields.output_config or _OutputConfig()
    overridden += [] if output.effort is None else ["effort"]
    schema = read_format("output_config.format", output.format or fields.output_format)
    choice = fields.tool_choice or _ToolChoice()
    reads_calls, forced = read_tool_choice({"type": choice.type, "name": choice.name}, tools)
    return ClientCall(
        messages=checked_messages(_messages(fields)),
        tools=tools or None,
        template_kwargs=kwargs,
        sampling={
            "temperature": fields.temperature,
            "top_p": fields.top_p,
            "top_k": fields.top_k or None,
            "stop": tuple(fields.stop_sequences or ()) or None,
        },
        max_tokens=fields.max_tokens,
        model=fields.model,
        is_stream=bool(fields.stream),
        reads_calls=reads_calls,
        json_reply=json_reply(schema, forced, tools, reads_calls=reads_calls),
        max_calls=1 if choice.disable_parallel_tool_use else None,
        overridden=overridden,
        ignored=ignored,
        request=fields,
    )


def _messages(fields: MessagesFields) -> list[Message]:
    given = [convert(each, _Message, f"messages[{i}].") for i, each in enumerate(fields.messages or ())]
    if given and given[-1].role == "assistant":
        raise MessageError(
            f"messages[{len(given) - 1}].role is 'assistant', but the policy does not continue an answer that a client "
            "began; end with a user's message"
        )
    system = text_of(fields.system, "system")
    if isinstance(system, TextParts):
        system = "\n".join(system.texts)  # as SGLang's
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(given):
        name = f"messages[{i}].content"
        if not isinstance(message.content, list):
            messages.append({"role": message.role, "content": message.content or ""})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, name))
        else:
            messages += _user(message.content, name, message.role)
    return messages


def _assistant(blocks: Sequence[Any], name: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for j, block in enumerate(blocks):
        match block:
            case _Text():
                texts.append(block.text)
            case _Thinking():
                thoughts.append(block.thinking)
            case _RedactedThinking():
                pass
            case _ToolUse():
                function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                raise MessageError(f"{name}[{j}] has type 'tool_result', which an assistant's message cannot have")
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _user(blocks: Sequence[Any], name: str, role: str) -> list[Message]:
    results: list[Message] = []
    texts: list[str] = []
    for j, block in enumerate(blocks):
        match block:
            case _Text():
                texts.append(block.text)
            case _ToolResult():
                text = text_of(block.content, f"{name}[{j}].content")
                result: Message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
                results.append(result | ({"is_error": True} if block.is_error else {}))  # for templates
            case _:
                raise MessageError(f"{name}[{j}].type is not supported here; only text and tool_result are")
    if texts or not results:
        results.append({"role": role, "content": TextParts.of(texts)})
    return results


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        function = call["function"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        )
    return blocks


def _stop_reason(reply: Reply) -> str:
    if reply.finish_reason != "stop":
        return "max_tokens"
    return "tool_use" if reply.tool_calls else "end_turn"


def _usage(reply: Reply) -> dict[str, int]:
    cached = reply.cached_tokens
    return {
        "input_tokens": reply.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": len(reply.tokens),
    }


def write(_call: ClientCall, replies: Sequence[Reply], model: str) -> dict[str, Any]:
    """Return the body of the reply."""
    (reply,) = replies
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(reply),
        "stop_reason": _stop_reason(reply),
        "stop_sequence": None,
        "usage": _usage(reply),
    }


async def stream(
    _call: ClientCall, model: str, parts: AsyncIterator[StreamPart], streams: Sequence[ReplyStream]
) -> AsyncGenerator[bytes]:
    """Yield the events of a reply while it is sampled."""
    (source,) = streams
    used = {"input_tokens": source.prompt_tokens, "output_tokens": 0}
    start = {"id": f"msg_{source.response_id}", "type": "message", "role": "assistant", "model": model, "content": []}
    yield _event("message_start", message={**start, "stop_reason": None, "stop_sequence": None, "usage": used})
    blocks = _OpenBlocks()
    async for _, part in parts:
        if isinstance(part, Reply):
            for event in (*blocks.end(part), *_end(part)):
                yield event
        else:
            for event in (*blocks.grow("thinking", part.reasoning), *blocks.grow("text", part.content)):
                yield event


class _OpenBlocks:
    """The blocks of a stream, of which the last may be open."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""

    def grow(self, kind: Literal["thinking", "text"], text: str) -> Iterator[bytes]:
        """Yield the events of more text."""
        if not text:
            return
        if kind != self._kind:
            yield from self._close()
            signature = {"signature": ""} if kind == "thinking" else {}
            yield from self._open(kind, {"type": kind, kind: "", **signature})
        yield _event("content_block_delta", index=self._index, delta={"type": f"{kind}_delta", kind: text})

    def end(self, reply: Reply) -> Iterator[bytes]:
        """Yield the events of the calls, which come last, and of an empty answer."""
        calls = [block for block in _blocks(reply) if block["type"] == "tool_use"]
        if not calls and self._kind != "text":
            yield from self._close()
            yield from self._open("text", {"type": "text", "text": ""})
        for block in calls:
            yield from self._close()
            yield from self._open("tool_use", {**block, "input": {}})
            partial = json.dumps(block["input"], ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": partial}
            yield _event("content_block_delta", index=self._index, delta=delta)
        yield from self._close()

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        self._index, self._kind = self._index + 1, kind
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._kind:
            yield _event("content_block_stop", index=self._index)
        self._kind = ""


def _end(reply: Reply) -> Iterator[bytes]:
    ended = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
    yield _event("message_delta", delta=ended, usage=_usage(reply))
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
