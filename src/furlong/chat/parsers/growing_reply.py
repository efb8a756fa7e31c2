"""The parts of a growing reply that later text cannot change, for streams.

For every beginning of a text, `final_parts` returns beginnings of the reasoning and the content of the whole text.
"""

from __future__ import annotations

from collections.abc import Mapping

from furlong.chat.parsers.json_calls import parse_deepseek, parse_hermes, parse_llama3_json, parse_mistral
from furlong.chat.parsers.parsed_reply import ToolParser
from furlong.chat.parsers.tagged_calls import CHANNEL, RECIPIENT, parse_glm45, parse_gpt_oss, parse_qwen3_coder

_SIGNS: Mapping[ToolParser, str] = {
    parse_hermes: "<tool_call>",
    parse_qwen3_coder: "<tool_call>",
    parse_glm45: "<tool_call>",
    parse_mistral: "[TOOL_CALLS]",
    parse_deepseek: "<\uff5ctool\u2581calls\u2581begin\uff5c>",
}  # where the first call begins
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_PYTHON_TAG = "<|python_tag|>"
_OPEN, _CLOSE = "<think>", "</think>"


def final_parts(text: str, parser: ToolParser | None, *, has_tools: bool, opened: bool = False) -> tuple[str, str]:
    """Return reasoning and content of a reply so far, without what may still become a tag, a call or whitespace.

    Nothing after the beginning of a call is returned, and no content if calls are read by a function of the user.
    """
    if parser is parse_gpt_oss:
        return _channels(text)
    reasoning, content = _split(text, opened=opened)
    if parser is None or not has_tools:
        return reasoning, content
    if parser is parse_llama3_json:
        start = content.lstrip()
        is_text = start and not start.startswith("{") and not _begins(start, _PYTHON_TAG)
        return reasoning, content if is_text else ""
    sign = _SIGNS.get(parser)
    if sign is None:
        return reasoning, ""
    return reasoning, _without_start(content.partition(sign)[0], sign).rstrip()


def _split(text: str, *, opened: bool) -> tuple[str, str]:
    start = text.lstrip()
    begins = start.startswith(_OPEN)
    if not begins and _OPEN.startswith(start):
        return "", ""
    if not begins and not opened:
        return "", text
    thought, closed, content = text.partition(_CLOSE)
    thought = thought.lstrip().removeprefix(_OPEN) if begins else thought
    thought = thought if closed else _without_start(thought, _CLOSE)
    return thought.strip("\n"), content.lstrip("\n") if closed else ""


def _channels(text: str) -> tuple[str, str]:
    """Return the analysis and the final answer of gpt-oss, up to the first message that is neither."""
    thoughts: list[str] = []
    content: list[str] = []
    end = 0
    for match in CHANNEL.finditer(text):
        head = f"{match['head']} {match['channel']}"
        if match.start() > end or RECIPIENT.search(head):
            break
        end = match.end()
        said = match["text"] if match["end"] else _without_start(match["text"], *_ENDS)
        (thoughts if match["channel"].strip().startswith("analysis") else content).append(said)
    return "\n".join(thoughts), "".join(content)


def _without_start(text: str, *signs: str) -> str:
    """Return text without an end that is the beginning of one of `signs`."""
    longest = max((n for sign in signs for n in range(len(sign)) if text.endswith(sign[:n])), default=0)
    return text[: len(text) - longest]


def _begins(text: str, sign: str) -> bool:
    return text.startswith(sign) or sign.startswith(text)
