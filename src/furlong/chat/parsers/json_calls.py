"""Parsers of calls that models write as JSON: Hermes and Qwen3, Llama 3, Mistral, DeepSeek."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from furlong.chat.parsers.parsed_reply import ParsedReply, ToolCall, Tools, call_from_json, call_from_value

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_DEEPSEEK_CALLS = re.compile(r"<｜tool▁calls▁begin｜>(.*?)(?:<｜tool▁calls▁end｜>|\Z)", re.DOTALL)
_DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(?:function)?(?P<head>.*?)<｜tool▁sep｜>(?P<body>.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL
)
_FENCE = re.compile(r"\A(?P<name>[^\n]+)\n```(?:json)?\n(?P<body>.*?)\n?```\s*\Z", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{)")
_PYTHON_TAG = "<|python_tag|>"


def parse_hermes(text: str, tools: Tools) -> ParsedReply:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen3 write."""
    del tools
    calls: list[ToolCall] = []
    kept, end, num_ill_formed = "", 0, 0
    for match in _HERMES.finditer(text):
        kept += text[end : match.start()]
        end = match.end()
        if (call := call_from_json(match[1])) is not None:
            calls.append(call)
        else:
            kept += match[0]
            num_ill_formed += 1
    return ParsedReply(_trimmed(kept + text[end:], calls), None, calls, num_ill_formed)


def parse_llama3_json(text: str, tools: Tools) -> ParsedReply:
    """Read a reply that is `{"name": ..., "parameters": {...}}`, or several of them with semicolons in between."""
    del tools
    body = text.strip()
    has_tag = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not has_tag and not (body.startswith("{") and '"name"' in body):
        return ParsedReply(text)
    calls: list[ToolCall] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(body):
        try:
            value, at = decoder.raw_decode(body, at)
        except ValueError:
            return ParsedReply(text, num_ill_formed=1)
        if (call := call_from_value(value)) is None:
            return ParsedReply(text, num_ill_formed=1)
        calls.append(call)
        at = len(body) - len(body[at:].lstrip("; \n\t"))
    return ParsedReply("", None, calls) if calls else ParsedReply(text, num_ill_formed=int(has_tag))


def parse_mistral(text: str, tools: Tools) -> ParsedReply:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and the newer `[TOOL_CALLS]name[ARGS]{...}`."""
    del tools
    content, found, rest = text.partition(_MISTRAL)
    if not found:
        return ParsedReply(text)
    calls: list[ToolCall] | None = []
    if rest.lstrip().startswith("["):
        try:
            values: Any = json.JSONDecoder().raw_decode(rest.lstrip())[0]
        except ValueError:
            values = []
        parsed = [call_from_value(value) for value in cast("list[Any]", values)]
        calls = [call for call in parsed if call is not None]
        calls = calls if len(calls) == len(parsed) else None
    else:
        calls = _named_calls(rest)
    if not calls:
        return ParsedReply(text, num_ill_formed=1)
    return ParsedReply(content.rstrip(), None, calls)


def _named_calls(text: str) -> list[ToolCall] | None:
    """Return the calls of `name{...}[TOOL_CALLS]name{...}`; None if any is ill-formed."""
    calls: list[ToolCall] = []
    for piece in text.split(_MISTRAL):
        match = _MISTRAL_CALL.match(piece)
        call = (
            None
            if match is None
            else call_from_json(f'{{"name": {json.dumps(match["name"])}, "arguments": {piece[match.end() :].strip()}}}')
        )
        if call is None:
            return None
        calls.append(call)
    return calls


def parse_deepseek(text: str, tools: Tools) -> ParsedReply:
    """Read `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` of V3.1, and V3's fenced form."""
    del tools
    block = _DEEPSEEK_CALLS.search(text)
    if block is None:
        return ParsedReply(text)
    calls: list[ToolCall] = []
    for match in _DEEPSEEK_CALL.finditer(block[1]):
        name, body = match["head"].strip(), match["body"].strip()
        if fence := _FENCE.match(body):
            name, body = fence["name"].strip(), fence["body"]
        call = call_from_json(f'{{"name": {json.dumps(name)}, "arguments": {body}}}')
        if call is None:
            return ParsedReply(text, num_ill_formed=1)
        calls.append(call)
    if not calls:
        return ParsedReply(text, num_ill_formed=1)
    return ParsedReply(text[: block.start()].rstrip(), None, calls)


def _trimmed(content: str, calls: list[ToolCall]) -> str:
    """Remove the whitespace between text and calls."""
    return content.rstrip() if calls else content
