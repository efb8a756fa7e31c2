"""Parsers of replies: calls of each family, reasoning, and ill-formed calls that stay text."""

from __future__ import annotations

import json

import pytest

from chat_zoo import TEMPLATES, TOOLS
from furlong.chat.parsers import PARSERS, final_parts, parse_reply, parser_of_template

ARGUMENTS = {"a": 1, "b": 2}
JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
WELL_FORMED = {
    "hermes": f"hi\n<tool_call>\n{JSON}\n</tool_call>",
    "qwen3": f"<tool_call>{JSON}</tool_call>",
    "qwen3_coder": (
        "hi\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "llama3_json": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": f"[TOOL_CALLS][{JSON}]",
    "glm45": (
        "hi\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>"
    ),
    "deepseek": (
        "hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
        '{"a": 1, "b": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add<|channel|>commentary "
        '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
    ),
}
OTHER_FORMS = {
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "gpt-oss": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}',
}
ILL_FORMED = {
    "hermes": "<tool_call>\n{name: add}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>1\n</function>\n</tool_call>",
    "llama3_json": '{"name": "add", "parameters": {"a": 1',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": 3}]',
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{a}<｜tool▁call▁end｜>",
    "gpt-oss": "<|start|>assistant to=functions.add<|channel|>commentary<|message|>{a}<|call|>",
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_is_read(name):
    for text in (WELL_FORMED[name], OTHER_FORMS.get(name, WELL_FORMED[name])):
        parsed = parse_reply(text, TOOLS, PARSERS[name])
        (call,) = parsed.calls
        assert (call.name, json.loads(call.arguments)) == ("add", ARGUMENTS)
        assert parsed.content in ("hi", "")
        assert parsed.num_ill_formed == 0


@pytest.mark.parametrize("name", ILL_FORMED)
def test_an_ill_formed_call_stays_text_and_is_counted(name):
    parsed = parse_reply(ILL_FORMED[name], TOOLS, PARSERS[name])
    assert not parsed.calls
    assert parsed.content == ILL_FORMED[name]
    assert parsed.num_ill_formed == 1


@pytest.mark.parametrize("name", PARSERS)
def test_plain_text_stays_as_it_is(name):
    for text in ("the answer is 42", " a {b} [c] <d> ", "", '{"name": 3}'):
        parsed = parse_reply(text, TOOLS, PARSERS[name])
        assert (parsed.content, list(parsed.calls)) == (text, [])


def test_several_calls_and_the_text_between_them():
    text = f"one <tool_call>{JSON}</tool_call> two <tool_call>{JSON}</tool_call>"
    parsed = parse_reply(text, TOOLS, PARSERS["hermes"])
    assert len(parsed.calls) == 2
    assert parsed.content == "one  two"


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("hm\n</think>\n\nyes", True, "hm", "yes"),
        ("<think>never ends", False, "never ends", ""),
        ("no tags", False, None, "no tags"),
    ],
)
def test_reasoning_is_separated(text, opened, reasoning, content):
    parsed = parse_reply(text, (), None, opened=opened)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_calls_are_text_without_tools():
    assert parse_reply(WELL_FORMED["hermes"], (), PARSERS["hermes"]).content == WELL_FORMED["hermes"]


def test_a_text_parameter_stays_text_and_others_become_values():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}}}]
    text = "<tool_call><function=f><parameter=s>12</parameter><parameter=n>[1, 2]</parameter></function></tool_call>"
    (call,) = parse_reply(text, tools, PARSERS["qwen3_coder"]).calls
    assert json.loads(call.arguments) == {"s": "12", "n": [1, 2]}


def test_the_template_tells_the_family():
    found = {name: parser_of_template(source) for name, source in TEMPLATES.items()}
    expected = {"qwen": "hermes", "glm": "glm45", "llama": "llama3_json", "mistral": "mistral", "gpt_oss": "gpt-oss"}
    assert found == {**expected, "plain": None}


TEXTS = ["", "hi", "  hi there\n", "a < b <tool", "{ not a call", "<think>", "x <think> y </think> z"]
THOUGHTS = ["<think>\nhm\n\nok\n</think>\n\n", "\n<think>open", ""]


def texts_of(name: str) -> list[str]:
    replies = [*TEXTS, WELL_FORMED[name], OTHER_FORMS.get(name, ""), ILL_FORMED.get(name, "")]
    replies += [f"  first {reply} last " for reply in replies]
    return [thought + reply for thought in THOUGHTS for reply in replies]


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("name", [*PARSERS, None])
def test_every_beginning_yields_a_beginning_of_the_parsed_reply(name, opened):
    parser = None if name is None else PARSERS[name]
    for text in texts_of(name or "hermes"):
        for tools in (TOOLS, []):
            whole = parse_reply(text, tools, parser, opened=opened)
            before = ("", "")
            for end in range(len(text) + 1):
                parts = final_parts(text[:end], parser, has_tools=bool(tools), opened=opened)
                assert (whole.reasoning or "").startswith(parts[0]), (text, text[:end], parts)
                assert whole.content.startswith(parts[1]), (text, text[:end], parts)
                assert parts[0].startswith(before[0])
                assert parts[1].startswith(before[1])
                before = parts


def test_text_and_thoughts_are_sent_before_the_end():
    hermes = PARSERS["hermes"]
    assert final_parts("<think>a thought</th", hermes, has_tools=True) == ("a thought", "")
    assert final_parts("some text <tool", hermes, has_tools=True) == ("", "some text")
    gpt_oss = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes, a < b"
    assert final_parts(gpt_oss, PARSERS["gpt-oss"], has_tools=True) == ("hm", "yes, a < b")
    assert final_parts("text", lambda text, tools: parse_reply(text, (), None), has_tools=True) == ("", "")
