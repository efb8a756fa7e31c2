"""Parsers of calls that models write with tags: Qwen3-Coder, GLM-4.5, and the channels of gpt-oss."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from furlong.chat.parsers.parsed_reply import ParsedReply, ToolCall, Tools, call_from_json, typed_value

_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\A<function=([^>\n]+)>(.*?)(?:</function>|\Z)\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GLM_NAME = re.compile(r"\A([\w.-]+)\s*(?=<arg_key>|\Z)")
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
CHANNEL = re.compile(
    r"(?:<\|start\|>)?(?P<head>[^<]*)<\|channel\|>(?P<channel>[^<]*?)(?:<\|constrain\|>(?P<kind>[^<]*))?<\|message\|>"
    r"(?P<text>.*?)(?P<end><\|end\|>|<\|return\|>|<\|call\|>|\Z)",
    re.DOTALL,
)
RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def parse_qwen3_coder(text: str, tools: Tools) -> ParsedReply:
    """Read `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""
    return _parse_blocks(text, lambda body: _qwen_call(body, tools))


def parse_glm45(text: str, tools: Tools) -> ParsedReply:
    """Read `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""
    return _parse_blocks(text, lambda body: _glm_call(body, tools))


def _parse_blocks(text: str, read: Callable[[str], ToolCall | None]) -> ParsedReply:
    """Read each block between tags; ill-formed blocks stay in the content."""
    calls: list[ToolCall] = []
    kept, end, num_ill_formed = "", 0, 0
    for match in _BLOCK.finditer(text):
        kept += text[end : match.start()]
        end = match.end()
        if (call := read(match[1])) is not None:
            calls.append(call)
        else:
            kept += match[0]
            num_ill_formed += 1
    kept += text[end:]
    return ParsedReply(kept.rstrip() if calls else kept, None, calls, num_ill_formed)


def _qwen_call(body: str, tools: Tools) -> ToolCall | None:
    match = _FUNCTION.match(body)
    if match is None:
        return None
    name, inside = match[1].strip(), match[2]
    pairs = _PARAMETER.findall(inside)
    if _PARAMETER.sub("", inside).strip():
        return None
    return _call(name, pairs, tools)


def _glm_call(body: str, tools: Tools) -> ToolCall | None:
    match = _GLM_NAME.match(body)
    if match is None or _GLM_PAIR.sub("", body[match.end() :]).strip():
        return None
    return _call(match[1], _GLM_PAIR.findall(body), tools)


def _call(name: str, pairs: list[tuple[str, str]], tools: Tools) -> ToolCall:
    arguments = {key.strip(): typed_value(value, key.strip(), name, tools) for key, value in pairs}
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def parse_gpt_oss(text: str, tools: Tools) -> ParsedReply:
    """Read the channels of gpt-oss: analysis is reasoning, final is content, and commentary to a function is a call."""
    del tools
    thoughts: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    end = num_ill_formed = 0
    for match in CHANNEL.finditer(text):
        content.append(text[end : match.start()])
        end = match.end()
        head = f"{match['head']} {match['channel']}"
        if recipient := RECIPIENT.search(head):
            call = call_from_json(
                f'{{"name": {json.dumps(recipient[1])}, "arguments": {match["text"].strip() or "{}"}}}'
            )
            if call is not None:
                calls.append(call)
            else:
                content.append(match[0])
                num_ill_formed += 1
        elif match["channel"].strip().startswith("analysis"):
            thoughts.append(match["text"])
        else:
            content.append(match["text"])
    content.append(text[end:])
    return ParsedReply("".join(content), "\n".join(thoughts) if thoughts else None, calls, num_ill_formed)
