"""Parsers of replies: the text of a completion to content, reasoning and tool calls, one parser per model family.

Each reads the text once: a policy in training writes anything, such as 64 KB of opening tags. A call that a client
could not use (JSON that is nested too deeply, NaN, halves of characters, a name given twice) is ill-formed: it stays
text and is counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from furlong.chat.growing_text import Channels, HeldEnd, ReasoningSplit, UntilSign

MAX_DEPTH = 64  # of arrays and objects in the arguments of a call


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


class UnusableValueError(ValueError):
    """JSON that Python reads and clients do not, or that says two things."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise UnusableValueError("an object has a key twice")
    return fields


def _refuse_constant(name: str) -> Any:
    raise UnusableValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)


def read_json(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the JSON value at this place of a text and where it ends. Raises ValueError.

    Raises UnusableValueError for NaN, infinity (also 1e999), half of a surrogate pair, more than `MAX_DEPTH` levels,
    and an object with a key twice.
    """
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise UnusableValueError(f"more than {MAX_DEPTH} levels") from None
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise UnusableValueError(f"more than {MAX_DEPTH} levels")
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    _text_of(value)
    return value, end


def _text_of(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnusableValueError("half of a surrogate pair") from None
    return text


def _whole_json(text: str) -> Any:
    value, end = read_json(text.strip())
    if end != len(text.strip()):
        raise ValueError("text follows the JSON value")
    return value


def call_from_json(text: str) -> ToolCall | None:
    """Return the call of a JSON object with `name` and `arguments` (or `parameters`); None if it is not one.

    >>> call_from_json('{"name": "add", "arguments": {"a": 1}}')
    ToolCall(name='add', arguments='{"a": 1}')
    """
    try:
        return call_from_value(_whole_json(text))
    except ValueError:
        return None


def call_from_value(value: Any) -> ToolCall | None:
    """Return the call of a decoded object; None if it has no name, or arguments that are not an object.

    Arguments may be JSON text; empty text is an empty object.
    """
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, Any]", value)
    name: Any = fields.get("name")
    arguments: Any = fields.get("arguments", fields.get("parameters", {}))
    try:
        if isinstance(arguments, str):
            arguments = _whole_json(arguments) if arguments.strip() else {}
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        return ToolCall(name, _text_of(arguments))
    except ValueError:
        return None


def _call_of_texts(name: str, pairs: Sequence[tuple[str, str]], tools: Tools) -> ToolCall | None:
    """Return the call of parameters that a model wrote as bare text, by the types that its tool declares.

    A parameter of type string stays text; any other is read as JSON where it is JSON. None if a parameter is given
    twice, or if its type is declared and its JSON is unusable.
    """
    declared: Any = next((each for tool in tools if (each := tool.get("function", tool)).get("name") == name), {})
    schemas: Any = (declared.get("parameters") or {}).get("properties")
    arguments: dict[str, Any] = {}
    for key, text in pairs:
        key = key.strip()
        schema: Any = cast("dict[str, Any]", schemas).get(key) if isinstance(schemas, dict) else None
        kind: Any = cast("dict[str, Any]", schema).get("type") if isinstance(schema, dict) else None
        if key in arguments:
            return None
        try:
            arguments[key] = text if kind == "string" else _whole_json(text)
        except UnusableValueError:
            if kind is not None:
                return None
            arguments[key] = text
        except ValueError:
            arguments[key] = {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
    try:
        return ToolCall(name, _text_of(arguments))
    except UnusableValueError:
        return None


# -- calls as JSON: Hermes and Qwen3, Llama 3, Mistral, DeepSeek -------------------------------------------------

_NAME = re.compile(r"[\w.-]+")
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_CALL_KEYS = {"name", "arguments", "parameters", "type", "id"}
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEP = "<｜tool▁sep｜>"


def parse_hermes(text: str, tools: Tools) -> ParsedReply:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen3 write."""
    del tools
    return _parse_blocks(text, call_from_json)


def parse_llama3_json(text: str, tools: Tools) -> ParsedReply:
    """Read a reply that is `{"name": ..., "parameters": {...}}`, or several of them with semicolons in between.

    Without the tag, JSON is a call only if it has a name and parameters and nothing else: an answer in JSON may have a
    name, too.
    """
    del tools
    body = text.strip()
    has_tag = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG).strip()
    if not has_tag and not body.startswith("{"):
        return ParsedReply(text)
    ill_formed = ParsedReply(text, num_ill_formed=1)
    calls: list[ToolCall] = []
    at = 0
    while at < len(body):
        try:
            value, at = read_json(body, at)
        except ValueError:
            is_call = '"name"' in body and ('"parameters"' in body or '"arguments"' in body)
            return ill_formed if has_tag or is_call else ParsedReply(text)
        if not has_tag and not _is_call(value):
            return ill_formed if calls else ParsedReply(text)
        if (call := call_from_value(value)) is None:
            return ill_formed
        calls.append(call)
        while at < len(body) and body[at] in "; \n\t":
            at += 1
    return ParsedReply("", None, calls) if calls else ParsedReply(text, num_ill_formed=int(has_tag))


def _is_call(value: Any) -> bool:
    keys: set[str] = set(cast("dict[str, Any]", value)) if isinstance(value, dict) else set()
    return "name" in keys and bool(keys & {"arguments", "parameters"}) and keys <= _CALL_KEYS


def parse_mistral(text: str, tools: Tools) -> ParsedReply:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and the newer `[TOOL_CALLS]name[ARGS]{...}`."""
    del tools
    content, found, rest = text.partition(_MISTRAL)
    if not found:
        return ParsedReply(text)
    rest = rest.lstrip()
    try:
        calls = _listed_calls(rest) if rest.startswith("[") else _named_calls(rest)
    except ValueError:
        calls = []
    return ParsedReply(content.rstrip(), None, calls) if calls else ParsedReply(text, num_ill_formed=1)


def _listed_calls(text: str) -> list[ToolCall]:
    """Return the calls of `[{...}, {...}]`; none if any is ill-formed. Raises ValueError."""
    calls = [call_from_value(value) for value in _whole_json(text)]
    return [] if None in calls else [call for call in calls if call is not None]


def _named_calls(text: str) -> list[ToolCall]:
    """Return the calls of `name{...}[TOOL_CALLS]name{...}`; none if any is ill-formed. Raises ValueError."""
    calls: list[ToolCall] = []
    at = 0
    while True:
        begin = text.index("{", at)
        name = text[at:begin].strip().removesuffix("[ARGS]").partition("[CALL_ID]")[0]
        arguments, at = read_json(text, begin)
        call = call_from_value({"name": name, "arguments": arguments})
        if call is None or not _NAME.fullmatch(name):
            return []
        calls.append(call)
        following = text.find(_MISTRAL, at)
        if text[at : following if following >= 0 else None].strip():
            return []
        if following < 0:
            return calls
        at = following + len(_MISTRAL)


def parse_deepseek(text: str, tools: Tools) -> ParsedReply:
    """Read `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` of V3.1, and V3's fenced form."""
    del tools
    content, found, block = text.partition(_DEEPSEEK_BEGIN)
    if not found:
        return ParsedReply(text)
    block, _, after = block.partition(_DEEPSEEK_END)
    before, *pieces = block.split(_DEEPSEEK_CALL)
    parts = [piece.partition(_DEEPSEEK_CALL_END) for piece in pieces]
    calls = [_deepseek_call(part[0]) for part in parts]
    if not calls or None in calls or "".join((before, *(part[2] for part in parts))).strip():
        return ParsedReply(text, num_ill_formed=1)
    return ParsedReply((content + after).rstrip(), None, [call for call in calls if call is not None])


def _deepseek_call(text: str) -> ToolCall | None:
    """Read `name<sep>{...}`, or V3's `function<sep>name`, a line of three backticks and `json`, and the arguments."""
    head, _, body = text.partition(_DEEPSEEK_SEP)
    name, body = head.strip(), body.strip()
    if name == "function" and not body.startswith("{"):
        name, _, body = body.partition("\n")
        fence = next((each for each in ("```json\n", "```\n") if body.startswith(each)), None)
        if fence is None or not body.endswith("```"):
            return None
        name, body = name.strip(), body[len(fence) : -3]
    return call_from_value({"name": name, "arguments": body or "?"})


# -- calls with tags: Qwen3-Coder, GLM-4.5, and the channels of gpt-oss ------------------------------------------

_BLOCK, _END_BLOCK = "<tool_call>", "</tool_call>"
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def parse_qwen3_coder(text: str, tools: Tools) -> ParsedReply:
    """Read `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""
    return _parse_blocks(text, lambda body: _qwen_call(body, tools))


def parse_glm45(text: str, tools: Tools) -> ParsedReply:
    """Read `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""
    return _parse_blocks(text, lambda body: _glm_call(body, tools))


def _parse_blocks(text: str, read: Callable[[str], ToolCall | None]) -> ParsedReply:
    """Read each block between tags; ill-formed blocks stay in the content. The last one may lack its end."""
    calls: list[ToolCall] = []
    kept: list[str] = []
    at = num_ill_formed = 0
    while (begin := text.find(_BLOCK, at)) >= 0:
        kept.append(text[at:begin])
        end = text.find(_END_BLOCK, begin)
        at = len(text) if end < 0 else end + len(_END_BLOCK)
        body = text[begin + len(_BLOCK) : None if end < 0 else end]
        if (call := read(body.strip())) is not None:
            calls.append(call)
        else:
            kept.append(text[begin:at])
            num_ill_formed += 1
    content = "".join([*kept, text[at:]])
    return ParsedReply(content.rstrip() if calls else content, None, calls, num_ill_formed)


def _qwen_call(body: str, tools: Tools) -> ToolCall | None:
    name, closed, inside = body.removeprefix("<function=").partition(">")
    if not body.startswith("<function=") or not closed or not name.strip() or "\n" in name:
        return None
    pairs = _pairs(inside.removesuffix("</function>"), "<parameter=", ">", "</parameter>")
    if pairs is None or any("\n" in key for key, _ in pairs):
        return None
    values = [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in pairs]
    return _call_of_texts(name.strip(), values, tools)


def _glm_call(body: str, tools: Tools) -> ToolCall | None:
    name, opened, rest = body.partition("<arg_key>")
    pairs = _pairs(opened + rest, "<arg_key>", "</arg_key>", "</arg_value>")
    if pairs is None or not _NAME.fullmatch(name.strip()):
        return None
    values: list[tuple[str, str]] = []
    for key, rest in pairs:
        between, opened, value = rest.partition("<arg_value>")
        if not opened or between.strip():
            return None
        values.append((key, value))
    return _call_of_texts(name.strip(), values, tools)


def _pairs(text: str, begin: str, middle: str, end: str) -> list[tuple[str, str]] | None:
    """Return what is between these signs; None if one is missing, or if other text is between two pairs."""
    pairs: list[tuple[str, str]] = []
    at = 0
    while (start := text.find(begin, at)) >= 0:
        split = text.find(middle, start + len(begin))
        stop = text.find(end, split + len(middle))
        if split < 0 or stop < 0 or text[at:start].strip():
            return None
        pairs.append((text[start + len(begin) : split], text[split + len(middle) : stop]))
        at = stop + len(end)
    return None if text[at:].strip() else pairs


def parse_gpt_oss(text: str, tools: Tools) -> ParsedReply:
    """Read the channels of gpt-oss: analysis is reasoning, final is content, and commentary to a function is a call."""
    del tools
    thoughts: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    num_ill_formed = 0
    channels = Channels()
    head, parts = "", list[str]()
    for event, part in (*channels.feed(text), *channels.finish()):
        if event == "outside":
            content.append(part)
        elif event == "begin":
            head, parts = part, []
        elif event == "text":
            parts.append(part)
        elif recipient := _RECIPIENT.search(head):
            call = call_from_value({"name": recipient[1], "arguments": "".join(parts)})
            if call is not None:
                calls.append(call)
            else:
                content += [head, "<|message|>", *parts, part]
                num_ill_formed += 1
        else:
            (thoughts if _is_analysis(head) else content).append("".join(parts))
    return ParsedReply("".join(content), "\n".join(thoughts) if thoughts else None, calls, num_ill_formed)


def _is_analysis(head: str) -> bool:
    return head.partition("<|channel|>")[2].lstrip().startswith("analysis")


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
    (_DEEPSEEK_BEGIN, "deepseek"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters":', "llama3_json"),
)


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
    split = ReasoningSplit(opened=opened)
    thought, content = map("".join, zip(split.feed(text), split.finish(), strict=True))
    reasoning = thought if split.has_reasoning else None
    if parser is None or not tools:
        return ParsedReply(content, reasoning)
    return replace(parser(content, tools), reasoning=reasoning)


# -- replies that grow -------------------------------------------------------------------------------------------

_SIGNS: Mapping[ToolParser, str] = {
    parse_hermes: _BLOCK,
    parse_qwen3_coder: _BLOCK,
    parse_glm45: _BLOCK,
    parse_mistral: _MISTRAL,
    parse_deepseek: _DEEPSEEK_BEGIN,
}  # where the first call begins


class GrowingReply:
    """Reasoning and content of a reply that arrives in pieces, without what may still become a tag, a call or space.

    Nothing after the beginning of a call is returned, and no content if calls are read by a function of the user.
    """

    def __init__(self, parser: ToolParser | None, *, has_tools: bool, opened: bool = False) -> None:
        self._split = ReasoningSplit(opened=opened)
        self._parser = parser if has_tools or parser is parse_gpt_oss else None
        sign = None if self._parser is None else _SIGNS.get(self._parser)
        self._until_call = None if sign is None else UntilSign(sign)
        self._end = HeldEnd(None)
        self._start: list[str] = []  # of content, until its first characters show whether it is JSON
        self._channels, self._num_thoughts, self._is_thought = Channels(), 0, False
        self._passes = self._parser is None  # all content
        self._is_over = False

    def feed(self, piece: str) -> tuple[str, str]:
        """Return the new reasoning and content."""
        if self._is_over:
            return "", ""
        if self._parser is parse_gpt_oss:
            return self._feed_channels(piece)
        reasoning, content = self._split.feed(piece)
        if self._passes:
            return reasoning, content
        if self._until_call is not None:
            content, sign, _ = self._until_call.feed(content)
            self._is_over = sign is not None
            return reasoning, self._end.feed(content)
        if self._parser is parse_llama3_json:
            return reasoning, self._unless_json(content)
        return reasoning, ""

    def _unless_json(self, content: str) -> str:
        self._start.append(content)
        if not content.strip():
            return ""
        text = "".join(self._start)
        begin = text.lstrip()
        self._start = [text]
        self._is_over = begin.startswith(("{", _PYTHON_TAG))
        self._passes = not self._is_over and not _PYTHON_TAG.startswith(begin)
        return text if self._passes else ""

    def _feed_channels(self, piece: str) -> tuple[str, str]:
        """Read up to the first message that is neither analysis nor an answer."""
        thought: list[str] = []
        content: list[str] = []
        for event, part in self._channels.feed(piece):
            if event == "outside" or (event == "begin" and _RECIPIENT.search(part)):
                self._is_over = True
                break
            if event == "begin":
                self._is_thought = _is_analysis(part)
                self._num_thoughts += self._is_thought
                thought += ["\n"] if self._is_thought and self._num_thoughts > 1 else []
            elif event == "text":
                (thought if self._is_thought else content).append(part)
        return "".join(thought), "".join(content)
