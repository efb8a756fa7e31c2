"""Parsers by name, the choice of one from a chat template, and reasoning tags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from furlong.chat.parsers.json_calls import parse_deepseek, parse_hermes, parse_llama3_json, parse_mistral
from furlong.chat.parsers.parsed_reply import ParsedReply, ToolParser, Tools
from furlong.chat.parsers.tagged_calls import parse_glm45, parse_gpt_oss, parse_qwen3_coder

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
_SIGNS = (
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
    return next((name for sign, name in _SIGNS if sign in template), None)


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


def _split_reasoning(text: str, *, opened: bool) -> tuple[str | None, str]:
    """Return reasoning and the rest; a thought that does not end is all reasoning."""
    begins = text.lstrip().startswith(_OPEN)
    if not begins and not opened:
        return None, text
    thought, closed, content = text.partition(_CLOSE)
    thought = thought.lstrip().removeprefix(_OPEN) if begins else thought
    return thought.strip("\n"), content.lstrip("\n") if closed else ""
