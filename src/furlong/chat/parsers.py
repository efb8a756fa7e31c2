"""Parsers of replies: the text of a completion to content, reasoning and tool calls, one parser per model family."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedReply:
    """Content, reasoning and tool calls of a reply. num_ill_formed: calls that could not be read and stay text."""

    content: str
    reasoning: str | None = None
    calls: Sequence[ToolCall] = field(default_factory=tuple[ToolCall, ...])
    num_ill_formed: int = 0


Tools = Sequence[Mapping[str, Any]]
ToolParser = Callable[[str, Tools], ParsedReply]
"""Reads the tool calls of a text, given the tools of the request."""


def call_from_json(text: str) -> ToolCall | None:
    """Return the call of a JSON object with `name` and `arguments` (or `parameters`); None if it is not one.

    >>> call_from_json('{"name": "add", "arguments": {"a": 1}}')
    ToolCall(name='add', arguments='{"a": 1}')
    """
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    return call_from_value(value)


def call_from_value(value: Any) -> ToolCall | None:
    """Return the call of a decoded object; None if it has no name, or arguments that are not an object."""
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, Any]", value)
    name: Any = fields.get("name")
    arguments: Any = fields.get("arguments", fields.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def typed_value(text: str, name: str, function: str, tools: Tools) -> Any:
    """Return the value of a parameter that a model wrote as bare text, by the type that its tool declares.

    A parameter of type string stays text; any other is read as JSON where it is JSON.
    """
    schema: Any = {}
    for tool in tools:
        declared: Any = tool.get("function", tool)
        if declared.get("name") == function:
            schema = ((declared.get("parameters") or {}).get("properties") or {}).get(name) or {}
    kind: Any = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)


# -- calls as JSON: Hermes and Qwen3, Llama 3, Mistral, DeepSeek -------------------------------------------------

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
    return _parse_blocks(text, call_from_json)


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
        if match is None:
            return None
        call = call_from_value({"name": match["name"], "arguments": piece[match.end() :].strip()})
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
        call = call_from_value({"name": name, "arguments": body})
        if call is None:
            return ParsedReply(text, num_ill_formed=1)
        calls.append(call)
    if not calls:
        return ParsedReply(text, num_ill_formed=1)
    return ParsedReply(text[: block.start()].rstrip(), None, calls)


# -- calls with tags: Qwen3-Coder, GLM-4.5, and the channels of gpt-oss ------------------------------------------

_BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\A<function=([^>\n]+)>(.*?)(?:</function>|\Z)\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GLM_NAME = re.compile(r"\A([\w.-]+)\s*(?=<arg_key>|\Z)")
_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_CHANNEL = re.compile(
    r"(?:<\|start\|>)?(?P<head>[^<]*)<\|channel\|>(?P<channel>[^<]*?)(?:<\|constrain\|>(?P<kind>[^<]*))?<\|message\|>"
    r"(?P<text>.*?)(?P<end><\|end\|>|<\|return\|>|<\|call\|>|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


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
    for match in _CHANNEL.finditer(text):
        content.append(text[end : match.start()])
        end = match.end()
        head = f"{match['head']} {match['channel']}"
        if recipient := _RECIPIENT.search(head):
            call = call_from_value({"name": recipient[1], "arguments": match["text"].strip() or "{}"})
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


# -- whole replies -----------------------------------------------------------------------------------------------

PARSERS: Mapping[str, ToolParser] = {
    "hermes": parse_hermes,
    "qwen3": parse_hermes,
    "qwen3_coder": parse_qwen3_coder,
    "llama3_json": parse_llama3_json,
    "mistral": parse_mistral,
    "glm45": parse_glm45,
    "deepseek": parse_deepseek,
    "gpt-oss": parse_gpt_oss,
}
# What a template writes for a call tells the family; the first that matches is used.
_TEMPLATE_SIGNS = (
    ("<|channel|>", "gpt-oss"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters":', "llama3_json"),
)
_OPEN, _CLOSE = "<think>", "</think>"


def parser_of_template(template: str) -> str | None:
    """Return the name of the parser for a chat template; None if the template has no tool calls.

    >>> parser_of_template("... <tool_call>{{ call | tojson }}</tool_call> ...")
    'hermes'
    """
    return next((name for sign, name in _TEMPLATE_SIGNS if sign in template), None)


def parse_reply(text: str, tools: Tools, parser: ToolParser | None, *, opened: bool = False) -> ParsedReply:
    """Split a reply into reasoning, content and calls. Calls are read only if the request has tools.

    opened: the prompt ends with an open `<think>`. gpt-oss has channels, which are always read.
    """
    if parser is parse_gpt_oss:
        return parse_gpt_oss(text, tools)
    reasoning, content = _split_reasoning(text, opened=opened)
    if parser is None or not tools:
        return ParsedReply(content, reasoning)
    return dataclasses.replace(parser(content, tools), reasoning=reasoning)


def _split_reasoning(text: str, *, opened: bool, is_whole: bool = True) -> tuple[str | None, str]:
    """Return reasoning and the rest; a thought that does not end is all reasoning."""
    begins = text.lstrip().startswith(_OPEN)
    if not is_whole and not begins and _OPEN.startswith(text.lstrip()):
        return None, ""
    if not begins and not opened:
        return None, text
    thought, closed, content = text.partition(_CLOSE)
    thought = thought.lstrip().removeprefix(_OPEN) if begins else thought
    if not is_whole and not closed:
        thought = _without_start(thought, _CLOSE)
    return thought.strip("\n"), content.lstrip("\n") if closed else ""


# -- replies that grow: what later text cannot change ------------------------------------------------------------

_SIGNS: Mapping[ToolParser, str] = {
    parse_hermes: "<tool_call>",
    parse_qwen3_coder: "<tool_call>",
    parse_glm45: "<tool_call>",
    parse_mistral: "[TOOL_CALLS]",
    parse_deepseek: "<\uff5ctool\u2581calls\u2581begin\uff5c>",
}  # where the first call begins
_ENDS = ("<|end|>", "<|return|>", "<|call|>")


def final_parts(text: str, parser: ToolParser | None, *, has_tools: bool, opened: bool = False) -> tuple[str, str]:
    """Return reasoning and content of a reply so far, without what may still become a tag, a call or whitespace.

    Nothing after the beginning of a call is returned, and no content if calls are read by a function of the user.
    """
    if parser is parse_gpt_oss:
        return _channels(text)
    thought, content = _split_reasoning(text, opened=opened, is_whole=False)
    reasoning = thought or ""
    if parser is None or not has_tools:
        return reasoning, content
    if parser is parse_llama3_json:
        start = content.lstrip()
        is_text = (
            start
            and not start.startswith("{")
            and not start.startswith(_PYTHON_TAG)
            and not _PYTHON_TAG.startswith(start)
        )
        return reasoning, content if is_text else ""
    sign = _SIGNS.get(parser)
    if sign is None:
        return reasoning, ""
    return reasoning, _without_start(content.partition(sign)[0], sign).rstrip()


def _channels(text: str) -> tuple[str, str]:
    """Return the analysis and the final answer of gpt-oss, up to the first message that is neither."""
    thoughts: list[str] = []
    content: list[str] = []
    end = 0
    for match in _CHANNEL.finditer(text):
        head = f"{match['head']} {match['channel']}"
        if match.start() > end or _RECIPIENT.search(head):
            break
        end = match.end()
        said = match["text"] if match["end"] else _without_start(match["text"], *_ENDS)
        (thoughts if match["channel"].strip().startswith("analysis") else content).append(said)
    return "\n".join(thoughts), "".join(content)


def _without_start(text: str, *signs: str) -> str:
    """Return text without an end that is the beginning of one of `signs`."""
    longest = max((n for sign in signs for n in range(len(sign)) if text.endswith(sign[:n])), default=0)
    return text[: len(text) - longest]
