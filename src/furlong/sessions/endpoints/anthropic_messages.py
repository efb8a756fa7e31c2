"""Anthropic's POST /v1/messages of a session, and the counting of its tokens."""

from __future__ import annotations

import json
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
        "input_schema": rules.an_object,
        "cache_control": rules.an_object,
        "eager_input_streaming": rules.flag,
        "strict": rules.flag,
    },
    required=("name",),
)
_ROLE = rules.one_of("user", "assistant", "system")
_MESSAGE = rules.object_of({"role": _ROLE}, required=("role",), others=rules.anything)
FIELDS: rules.Fields = {
    "model": rules.text,
    "messages": rules.list_of(_MESSAGE),
    "system": rules.text_or_parts,
    "max_tokens": rules.num_tokens,
    "tools": rules.list_of(rules.an_object),
    "tool_choice": rules.object_of({"type": rules.text, "name": rules.text, "disable_parallel_tool_use": rules.flag}),
    "temperature": rules.temperature,
    "top_p": rules.top_p,
    "top_k": rules.top_k,
    "stop_sequences": rules.stops,
    "stream": rules.flag,
    "thinking": rules.object_of(
        {"type": rules.one_of("enabled", "disabled", "adaptive"), "budget_tokens": rules.num_tokens},
        required=("type",),
    ),
    # Without an effect on the result:
    "metadata": rules.metadata,
    "betas": rules.list_of(rules.text),
    **dict.fromkeys(("service_tier", "anthropic_version", "inference_geo"), rules.text),
    **dict.fromkeys(("user_profile_id", "workspace_id"), rules.text),
    **dict.fromkeys(("cache_control", "diagnostics"), rules.an_object),
    # Not implemented:
    "mcp_servers": rules.only([]),
    **dict.fromkeys(("container", "context_management", "output_config"), rules.only()),
    "speed": rules.only("standard"),
}
_BLOCKS: Mapping[str, rules.Rule] = {
    "text": rules.object_of({"text": rules.text}, required=("text",), others=rules.anything),
    "thinking": rules.object_of(
        {"thinking": rules.text, "signature": rules.text}, required=("thinking",), others=rules.anything
    ),
    "tool_use": rules.object_of(
        {"id": rules.text, "name": rules.filled_text, "input": rules.an_object},
        required=("name",),
        others=rules.anything,
    ),
    "tool_result": rules.object_of({"tool_use_id": rules.text, "is_error": rules.flag}, others=rules.anything),
}


def read(body: Mapping[str, Any], *, counts_only: bool = False) -> ClientCall:
    """Check a request. Raises RequestError and MessageError naming the field."""
    rules.check_fields(body, FIELDS)
    if body.get("max_tokens") is None and not counts_only:
        raise RequestError("max_tokens is missing; it must be an integer of at least 1")
    choice: dict[str, Any] = body.get("tool_choice") or {"type": "auto"}
    given = objects(body, "tools")
    tools = [_tool(i, tool) for i, tool in enumerate(given)]
    overridden = strict_tools(given)
    kind = choice.get("type")
    thinking: dict[str, Any] | None = body.get("thinking")
    kwargs = {}
    if thinking is not None:
        overridden += ["budget_tokens"] if "budget_tokens" in thinking else []
        kwargs = {"enable_thinking": thinking["type"] != "disabled"}
    return ClientCall(
        messages=checked_messages(_messages(body)),
        tools=checked_tools(tools),
        template_kwargs=kwargs,
        sampling={
            **{name: body.get(name) for name in ("temperature", "top_p", "top_k")},
            "stop": body.get("stop_sequences"),
        },
        max_tokens=token_limit(body, "max_tokens"),
        is_stream=boolean(body, "stream"),
        reads_calls=read_tool_choice(kind if kind in ("auto", "none") else choice, has_tools=bool(tools)),
        max_calls=1 if choice.get("disable_parallel_tool_use") else None,
        overridden=overridden,
        body=body,
    )


def _tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise RequestError(f"tools[{i}].type is {quote(tool['type'])}; only tools with an input_schema are supported")
    _TOOL(f"tools[{i}]", tool)
    function = {key: tool[key] for key in ("name", "description") if key in tool}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}


def _messages(body: Mapping[str, Any]) -> list[Message]:
    """Return the messages in OpenAI's form."""
    system, given = body.get("system"), objects(body, "messages")
    if given and given[-1].get("role") == "assistant":
        raise MessageError(
            f"messages[{len(given) - 1}].role is 'assistant', but the policy does not continue an answer that a client "
            "began; end with a user's message"
        )
    messages: list[Message] = [{"role": "system", "content": text_of(system, "system")}] if system else []
    for i, message in enumerate(given):
        content: Any = message.get("content")
        name = f"messages[{i}].content"
        if not isinstance(content, list):
            messages.append({"role": message.get("role"), "content": text_of(content, name)})
        elif message.get("role") == "assistant":
            messages.append(_assistant(cast("list[Any]", content), name))
        else:
            messages += _user(cast("list[Any]", content), name, message.get("role"))
    return messages


def _assistant(blocks: list[Any], name: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for j, block in enumerate(blocks):
        match _kind(block, f"{name}[{j}]"):
            case "text":
                texts.append(block["text"])
            case "thinking":
                thoughts.append(block["thinking"])
            case "tool_use":
                function = {
                    "name": block["name"],
                    "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
                }
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case kind:
                raise MessageError(f"{name}[{j}] has type {kind!r}, which an assistant's message cannot have")
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _user(blocks: list[Any], name: str, role: Any) -> list[Message]:
    """Return the results of tools, each a message, and one with the text."""
    results: list[Message] = []
    texts: list[str] = []
    for j, block in enumerate(blocks):
        match _kind(block, f"{name}[{j}]"):
            case "text":
                texts.append(block["text"])
            case "tool_result":
                text = text_of(block.get("content"), f"{name}[{j}].content")
                result: Message = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
                results.append(result | ({"is_error": True} if block.get("is_error") else {}))  # for templates
            case kind:
                raise MessageError(f"{name}[{j}] has type {kind!r}; only text and tool_result are supported")
    if texts or not results:
        results.append({"role": role, "content": "".join(texts)})
    return results


def _kind(block: Any, name: str) -> str:
    kind: Any = cast("dict[str, Any]", block).get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise MessageError(f"{name} is {quote(block)}, must be an object with a type")
    if kind in _BLOCKS:
        _BLOCKS[kind](name, block)
    return kind


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
        "output_tokens": reply.num_tokens,
    }


def write(reply: Reply, model: str) -> dict[str, Any]:
    """Return the body of the reply."""
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


async def stream(model: str, parts: AsyncIterator[StreamPart], streams: Sequence[StreamHead]) -> AsyncGenerator[bytes]:
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
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def error(message: str, status: int) -> dict[str, Any]:
    """Return the body of an error."""
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
    }
    kind = kinds.get(status, "rate_limit_error" if status == 429 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
