"""OpenAI's POST /v1/responses of a session."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import orjson

from furlong.chat.messages import Message, MessageError, checked_messages, text_of
from furlong.inference.embedded.request import RequestError
from furlong.inference.server.fields import boolean, quote
from furlong.sessions.endpoints.chat_completions import read_tool_choice
from furlong.sessions.endpoints.client_call import ClientCall, check_fields, checked_tools, objects, token_limit
from furlong.sessions.session import Reply, Session

HONORED = {
    *("model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "temperature", "top_p", "stream"),
    *("previous_response_id", "parallel_tool_calls", "reasoning"),
}
NEUTRAL = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("stream_options", "client_metadata"),
}
OFF: Mapping[str, Sequence[Any]] = {
    "text": (
        {"format": {"type": "text"}},
        {"verbosity": "medium"},
        {"format": {"type": "text"}, "verbosity": "medium"},
    ),
    "truncation": ("disabled",),
    "include": (["reasoning.encrypted_content"],),
    "background": (False,),
    "top_logprobs": (0,),
    "max_tool_calls": (),
    "conversation": (),
    "prompt": (),
}


def read(body: Mapping[str, Any], session: Session) -> ClientCall:
    """Check a request. Raises RequestError and MessageError naming the field."""
    check_fields(body, honored=HONORED, neutral=NEUTRAL, off=OFF)
    tools = checked_tools([_tool(i, tool) for i, tool in enumerate(objects(body, "tools"))])
    reasoning: Any = body.get("reasoning") or {}
    effort = cast("dict[str, Any]", reasoning).get("effort") if isinstance(reasoning, dict) else None
    instructions: list[Message] = []
    if body.get("instructions"):
        instructions.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
    messages = [*instructions, *_earlier(body.get("previous_response_id"), session), *_input(body.get("input"))]
    return ClientCall(
        messages=checked_messages(messages, "input"),
        tools=tools,
        template_kwargs={} if effort is None else {"reasoning_effort": effort},
        sampling={name: body.get(name) for name in ("temperature", "top_p")},
        max_tokens=token_limit(body, "max_output_tokens"),
        is_stream=boolean(body, "stream"),
        reads_calls=read_tool_choice(body.get("tool_choice"), has_tools=tools is not None),
        max_calls=None if boolean(body, "parallel_tool_calls", default=True) else 1,
        body=body,
    )


def _tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(f"tools[{i}].type is {quote(tool.get('type'))}; only functions are supported")
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _earlier(response_id: Any, session: Session) -> list[Message]:
    """Return the conversation of an earlier response, without its instructions."""
    if response_id is None:
        return []
    node = next((n for n in session.tree.nodes if f"resp_{n.response_id}" == response_id), None)
    if node is None:
        raise RequestError(f"previous_response_id is {quote(response_id)}, which this session has not")
    messages = node.conversation()
    return messages[1:] if messages and messages[0]["role"] == "system" else messages


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
    match item.get("type", "message"):
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
            thought = "".join(str(part.get("text", "")) for part in parts)
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
        case kind:
            raise MessageError(f"{name}.type is {quote(kind)}, which is not supported")


def _items(reply: Reply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": content})
    if reply.content or not reply.tool_calls:
        text = {"type": "output_text", "text": reply.content, "annotations": []}
        message = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "content": [text]}
        items.append(message | {"status": "completed"})
    for call in reply.tool_calls:
        fields = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
        items.append(fields | call["function"])
    return items


def write(call: ClientCall, reply: Reply, model: str) -> dict[str, Any]:
    """Return the body of the reply."""
    body, is_cut = call.body, reply.finish_reason != "stop"
    sampled = len(reply.tokens)
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.get("instructions"),
        "model": model,
        "output": _items(reply),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "metadata": body.get("metadata") or {},
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + sampled,
        },
    }


def stream(call: ClientCall, reply: Reply, model: str) -> Iterator[bytes]:
    """Yield the events of a finished reply."""
    whole = write(call, reply, model)
    pending = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[tuple[str, dict[str, Any]]] = [
        ("created", {"response": pending}),
        ("in_progress", {"response": pending}),
    ]
    for index, item in enumerate(whole["output"]):
        events += _item_events(index, item)
    events.append((whole["status"], {"response": whole}))
    for number, (kind, fields) in enumerate(events):
        name = f"response.{kind}"
        event = {"type": name, "sequence_number": number, **fields}
        yield b"event: " + name.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


def _item_events(index: int, item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    at = {"output_index": index, "item_id": item["id"]}
    opened = {**item, "status": "in_progress"} | ({"content": []} if "content" in item else {"arguments": ""})
    events: list[tuple[str, dict[str, Any]]] = [("output_item.added", {"output_index": index, "item": opened})]
    if item["type"] == "function_call":
        events.append(("function_call_arguments.delta", {**at, "delta": item["arguments"]}))
        events.append(("function_call_arguments.done", {**at, "arguments": item["arguments"]}))
    else:
        part = item["content"][0]
        kind = part["type"].removesuffix("_text") + "_text"
        at |= {"content_index": 0}
        events.append(("content_part.added", {**at, "part": {**part, "text": ""}}))
        events.append((f"{kind}.delta", {**at, "delta": part["text"]}))
        events.append((f"{kind}.done", {**at, "text": part["text"]}))
        events.append(("content_part.done", {**at, "part": part}))
    events.append(("output_item.done", {"output_index": index, "item": item}))
    return events
