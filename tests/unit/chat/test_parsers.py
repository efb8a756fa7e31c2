"""Parsers of replies: a table of raw outputs for each family, replies that grow, and long texts in linear time."""

from __future__ import annotations

import json
import time
from typing import Any

from chat_zoo import TEMPLATES, TOOLS
from furlong.chat.parsers import PARSERS, GrowingReply, parse_reply, parser_of_template
from furlong.chat.text_deltas import TextDeltas

ADD = ("add", {"a": 1, "b": 2})
JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ARGUMENTS = '{"a": 1, "b": 2}'
DEEP = "[" * 1500 + "]" * 1500
Q_ADD = "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>"
G_ADD = "add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>"
D_CALL, D_SEP, D_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
D_CALLS, D_ENDS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
O_CALL = "<|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json<|message|>"
THOUGHT, FINAL = "<|channel|>analysis<|message|>hm<|end|>", "<|start|>assistant<|channel|>final<|message|>"


def h(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def d(*calls: str) -> str:
    return D_CALLS + "".join(f"{D_CALL}{call}{D_END}" for call in calls) + D_ENDS


def args(text: str) -> str:
    return f'{{"name": "add", "arguments": {text}}}'


# Raw output, calls, content (None: the output itself), ill-formed calls.
Row = tuple[str, list[Any], str | None, int]
PLAIN: list[Row] = [
    ("the answer is 42", [], None, 0),
    (" a {b} [c] <d> ", [], None, 0),
    ("", [], None, 0),
    ("a < b <tool", [], None, 0),
]
HERMES: list[Row] = [
    (f"hi\n<tool_call>\n{JSON}\n</tool_call>", [ADD], "hi", 0),
    (h(JSON), [ADD], "", 0),
    (f"<tool_call>{JSON}", [ADD], "", 0),
    (f"one {h(JSON)} two {h(JSON)}", [ADD, ADD], "one  two", 0),
    (h(args('"{\\"a\\": 1, \\"b\\": 2}"')), [ADD], "", 0),
    (h(args('""')), [("add", {})], "", 0),
    (h('{"name": "add"}'), [("add", {})], "", 0),
    (h('{"name": "add", "parameters": {"a": 1, "b": 2}}'), [ADD], "", 0),
    (h(args('{"a": "</x> <tool_call>"}')), [("add", {"a": "</x> <tool_call>"})], "", 0),
    (h(args('{"a": 1e3, "b": 12345678901234567890}')), [("add", {"a": 1000.0, "b": 12345678901234567890})], "", 0),
    (h(args('{"a": "\\ud83d\\ude00"}')), [("add", {"a": "😀"})], "", 0),
    ("<tool_call>\n{name: add}\n</tool_call>", [], None, 1),
    (h(JSON) + h("{}"), [ADD], h("{}"), 1),
    (h(args(DEEP)), [], None, 1),
    (h(args(f'{{"a": {DEEP}}}')), [], None, 1),
    (h(args('{"a": "\\ud800"}')), [], None, 1),
    (h('{"name": "\\udfff", "arguments": {}}'), [], None, 1),
    (h(args('{"a": NaN}')), [], None, 1),
    (h(args('{"a": -Infinity}')), [], None, 1),
    (h(args('{"a": 1e999}')), [], None, 1),
    (h('{"name": "add", "arguments": {}, "name": "other"}'), [], None, 1),
    (h(args("[1]")), [], None, 1),
    (h('{"name": "", "arguments": {}}'), [], None, 1),
    (h('{"name": 3, "arguments": {}}'), [], None, 1),
    (h(JSON + "x"), [], None, 1),
    (h(""), [], None, 1),
    ("</tool_call>", [], None, 0),
]
QWEN: list[Row] = [
    (f"hi\n<tool_call>\n{Q_ADD}\n</tool_call>", [ADD], "hi", 0),
    (h(Q_ADD.removesuffix("</function>")), [ADD], "", 0),
    (h("<function=add>\n</function>"), [("add", {})], "", 0),
    (h("<function=say><parameter=text>12</parameter></function>"), [("say", {"text": "12"})], "", 0),
    (h("<function=f><parameter=x>[1, 2]</parameter><parameter=y>a\nb</parameter></function>"),
     [("f", {"x": [1, 2], "y": "a\nb"})], "", 0),
    (h("<function=f><parameter=x>True</parameter><parameter=y>none</parameter></function>"),
     [("f", {"x": True, "y": None})], "", 0),
    (h("<function=say><parameter=text><parameter=b></parameter></function>"), [("say", {"text": "<parameter=b>"})],
     "", 0),
    (h("<function=f><parameter=x>NaN</parameter></function>"), [("f", {"x": "NaN"})], "", 0),
    (h("\n<function=add>\n<parameter=a>1\n</function>\n"), [], None, 1),
    (h("<function=add><parameter=a>NaN</parameter></function>"), [], None, 1),
    (h(f"<function=add><parameter=a>{DEEP}</parameter></function>"), [], None, 1),
    (h("<function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>"), [], None, 1),
    (h("<function=add>x<parameter=a>1</parameter></function>"), [], None, 1),
    (h("<function=>"), [], None, 1),
    (h("<function=add><parameter=b>\ud800</parameter></function>"), [], None, 1),
    (h("<function=f><parameter=x></tool_call></parameter></function>"), [], None, 1),
    (h(JSON), [], None, 1),
]  # fmt: skip
GLM: list[Row] = [
    (f"hi\n<tool_call>{G_ADD}\n</tool_call>", [ADD], "hi", 0),
    (h("add"), [("add", {})], "", 0),
    (h("say<arg_key>text</arg_key><arg_value>12</arg_value>"), [("say", {"text": "12"})], "", 0),
    (h("f<arg_key> x </arg_key>\n<arg_value>{}</arg_value>"), [("f", {"x": {}})], "", 0),
    (h("\nadd\n<arg_key>a</arg_key>\n"), [], None, 1),
    (h("add<arg_key>a</arg_key><arg_value>1"), [], None, 1),
    (h("add<arg_key>a</arg_key>x<arg_value>1</arg_value>"), [], None, 1),
    (h("add<arg_key>a</arg_key><arg_value>Infinity</arg_value>"), [], None, 1),
    (h("add more words"), [], None, 1),
    (h("add<arg_key>b</arg_key><arg_value>\ud800</arg_value>"), [], None, 1),
    (h(""), [], None, 1),
]
LLAMA: list[Row] = [
    ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD], "", 0),
    ('{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD], "", 0),
    (f" {JSON} ; {JSON}\n", [ADD, ADD], "", 0),
    ('{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', [ADD], "", 0),
    ('{"name": "Bob", "age": 42}', [], None, 0),
    ('{"name": "Bob"}', [], None, 0),
    ('{"name": "Bob", "parameters": {"a": 1}, "city": "Rome"}', [], None, 0),
    ('{"name": "Bob", "age": ', [], None, 0),
    ('[{"name": "add", "parameters": {}}]', [], None, 0),
    ('{"name": 3}', [], None, 0),
    ('{"name": "add", "parameters": {"a": 1', [], None, 1),
    ('{"name": "add", "parameters": {"a": NaN}}', [], None, 1),
    ('{"name": "add", "parameters": {}, "name": "other"}', [], None, 1),
    (f"{JSON}; and more", [], None, 1),
    ("<|python_tag|>print(1)", [], None, 1),
    ("<|python_tag|>", [], None, 1),
]
MISTRAL: list[Row] = [
    (f"[TOOL_CALLS][{JSON}]", [ADD], "", 0),
    (f"hi [TOOL_CALLS] [{JSON}, {JSON}]", [ADD, ADD], "hi", 0),
    (f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}", [ADD], "", 0),
    (f"[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS] {ARGUMENTS}[TOOL_CALLS]add{ARGUMENTS} ", [ADD, ADD], "", 0),
    ('[TOOL_CALLS]say[ARGS]{"text": "[TOOL_CALLS]"}', [("say", {"text": "[TOOL_CALLS]"})], "", 0),
    ('[TOOL_CALLS][{"name": "add", "arguments": 3}]', [], None, 1),
    ("[TOOL_CALLS][]", [], None, 1),
    (f"[TOOL_CALLS][{JSON}] more", [], None, 1),
    (f"[TOOL_CALLS][{JSON}][TOOL_CALLS][{JSON}]", [], None, 1),
    (f"[TOOL_CALLS]{DEEP}", [], None, 1),
    (f"[TOOL_CALLS]add[ARGS]{ARGUMENTS} more", [], None, 1),
    ("[TOOL_CALLS]two words{}", [], None, 1),
    ('[TOOL_CALLS]add[ARGS]{"a": Infinity}', [], None, 1),
    ("[TOOL_CALLS]", [], None, 1),
]
DEEPSEEK: list[Row] = [
    ("hi" + d(f"add{D_SEP}{ARGUMENTS}"), [ADD], "hi", 0),
    (d(f"function{D_SEP}add\n```json\n{ARGUMENTS}\n```"), [ADD], "", 0),
    (d(f"add{D_SEP}{ARGUMENTS}", f"function{D_SEP}add\n```json\n{ARGUMENTS}\n```"), [ADD, ADD], "", 0),
    (d(f"function_lookup{D_SEP}{{}}"), [("function_lookup", {})], "", 0),
    (d(f"functional{D_SEP}{{}}"), [("functional", {})], "", 0),
    ("hi" + d(f"add{D_SEP}{ARGUMENTS}") + " there", [ADD], "hi there", 0),
    (f"{D_CALLS}and {D_CALL}add{D_SEP}{ARGUMENTS}{D_END}{D_ENDS}", [], None, 1),
    (f"{D_CALLS}{D_CALL}add{D_SEP}{ARGUMENTS}{D_END}and{D_CALL}add{D_SEP}{{}}{D_END}{D_ENDS}", [], None, 1),
    (f"{D_CALLS}{D_CALL}add{D_SEP}{ARGUMENTS}", [ADD], "", 0),
    (d(f"add{D_SEP}other\n```json\n{ARGUMENTS}\n```"), [], None, 1),
    (d(f"add{D_SEP}{{a}}"), [], None, 1),
    (d(f"add{D_SEP}"), [], None, 1),
    (d(f"add{D_SEP}{DEEP}"), [], None, 1),
    (D_CALLS, [], None, 1),
]
GPT_OSS: list[Row] = [
    (f"{THOUGHT}{O_CALL}{ARGUMENTS}<|call|>", [ADD], "", 0),
    (f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ARGUMENTS}", [ADD], "", 0),
    (f"{THOUGHT}{FINAL}yes, a < b<|return|>", [], "yes, a < b", 0),
    (f"{FINAL}<|foo|> cut", [], "<|foo|> cut", 0),
    (f"{O_CALL} <|call|>", [("add", {})], "", 0),
    (f"{FINAL}one<|end|>{O_CALL}{ARGUMENTS}<|call|>", [ADD], "one", 0),
    ("no channels", [], None, 0),
    ("<|start|>assistant", [], None, 0),
    (f"{O_CALL}{{a}}<|call|>", [], None, 1),
    (f'{O_CALL}{{"a": NaN}}<|call|>', [], None, 1),
    (f"{O_CALL}{DEEP}", [], None, 1),
]
TABLE: dict[str, list[Row]] = {
    "hermes": [*PLAIN, *HERMES],
    "qwen3": [*PLAIN, *HERMES],
    "qwen3_coder": [*PLAIN, *QWEN],
    "glm45": [*PLAIN, *GLM],
    "llama3_json": [*PLAIN, *LLAMA],
    "mistral": [*PLAIN, *MISTRAL],
    "deepseek": [*PLAIN, *DEEPSEEK],
    "gpt-oss": [*PLAIN, *GPT_OSS],
}
TYPED = [
    *TOOLS,
    *(
        {"type": "function", "function": {"name": name, "parameters": {"properties": {key: {"type": kind}}}}}
        for name, key, kind in (("say", "text", "string"), ("add", "a", "integer"))
    ),
]


def test_the_table_of_raw_outputs():
    for name, rows in TABLE.items():
        for text, calls, content, num_ill_formed in rows:
            parsed = parse_reply(text, TYPED, PARSERS[name])
            read = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
            assert (read, parsed.num_ill_formed) == (calls, num_ill_formed), (name, text[:200])
            assert parsed.content == (text if content is None else content), (name, text[:200])
            for call in parsed.calls:
                call.arguments.encode()
                assert "NaN" not in call.arguments.replace('"NaN"', "")


def test_reasoning_is_separated():
    for text, opened, reasoning, content in (
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("hm\n</think>\n\nyes", True, "hm", "yes"),
        ("<think>never ends", False, "never ends", ""),
        ("<think>", False, "", ""),
        ("<th", False, None, "<th"),
        ("no tags", False, None, "no tags"),
    ):
        parsed = parse_reply(text, (), None, opened=opened)
        assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert parse_reply(f"{THOUGHT}{THOUGHT}{FINAL}x", (), PARSERS["gpt-oss"]).reasoning == "hm\nhm"


def test_calls_are_text_without_tools():
    assert parse_reply(h(JSON), (), PARSERS["hermes"]).content == h(JSON)


def test_the_template_tells_the_family():
    found = {name: parser_of_template(source) for name, source in TEMPLATES.items()}
    expected = {"qwen": "hermes", "glm": "glm45", "llama": "llama3_json", "mistral": "mistral", "gpt_oss": "gpt-oss"}
    assert found == {**expected, "plain": None}


# -- replies that grow -------------------------------------------------------------------------------------------

TEXTS = ["  hi there\n", "{ not a call", "<think>", "x <think> y </think> z", " <|python", " \n "]
THOUGHTS = ["<think>\nhm\n\nok\n</think>\n\n", "\n<think>open", ""]


def streamed(text: str, name: str | None, size: int, *, has_tools: bool = True, opened: bool = False) -> list[Any]:
    growing = GrowingReply(None if name is None else PARSERS[name], has_tools=has_tools, opened=opened)
    parts = [growing.feed(text[at : at + size]) for at in range(0, len(text), size)]
    return ["".join(part[0] for part in parts), "".join(part[1] for part in parts)]


def test_every_beginning_yields_a_beginning_of_the_parsed_reply():
    for name in (*PARSERS, None):
        rows = [row[0] for row in TABLE[name or "hermes"] if len(row[0]) < 500]
        replies = [*TEXTS, *rows, *(f"  first {text} last " for text in rows)]
        for text in (thought + reply for thought in THOUGHTS for reply in replies):
            for has_tools, opened in ((True, False), (False, True)):
                parser = None if name is None else PARSERS[name]
                whole = parse_reply(text, TYPED if has_tools else [], parser, opened=opened)
                parts = streamed(text, name, 1, has_tools=has_tools, opened=opened)
                assert parts == streamed(text, name, 7, has_tools=has_tools, opened=opened), (name, text)
                assert (whole.reasoning or "").startswith(parts[0]), (name, text, parts)
                assert whole.content.startswith(parts[1]), (name, text, parts)


def test_text_and_thoughts_are_sent_before_the_end():
    for name, text, parts in (
        ("hermes", "<think>a thought</th", ["a thought", ""]),
        ("hermes", "some text <tool", ["", "some text"]),
        ("llama3_json", "<|python", ["", ""]),
        ("llama3_json", "<|pythonic", ["", "<|pythonic"]),
        ("gpt-oss", f"{THOUGHT}{FINAL}yes, a < b", ["hm", "yes, a < b"]),
    ):
        assert streamed(text, name, 3) == parts
    growing = GrowingReply(lambda text, tools: parse_reply(text, (), None), has_tools=True)
    assert growing.feed("text") == ("", "")


# -- long texts --------------------------------------------------------------------------------------------------

LENGTH, LIMIT_S = 1 << 16, 0.05
UNITS = (
    *("x", " ", "\n", "<", "[", "{", '{"a":', "[],", '"', "\\", "1", "a ", "é"),
    *("<tool_call>", "<tool_call></tool_call>", '<tool_call>{"name": "', "<think>", "</think>"),
    *("<tool_call>add<arg_key>", "<arg_key>a</arg_key>", "<function=a>", "<parameter=a>\n", "\n</parameter>"),
    *("[TOOL_CALLS]", "[TOOL_CALLS]a{}", D_CALL, "<|start|>", "<|channel|>analysis", "to=functions."),
)
BEGINS = {
    "hermes": "<tool_call>",
    "qwen3": "<tool_call>",
    "qwen3_coder": "<tool_call><function=a>",
    "glm45": "<tool_call>a<arg_key>",
    "llama3_json": '{"name": "a", "parameters": ',
    "mistral": "[TOOL_CALLS]",
    "deepseek": D_CALLS + D_CALL,
    "gpt-oss": "<|channel|>",
}


def fastest_s(work: Any) -> float:
    """Seconds of the fastest of up to five attempts: others use the machine, too."""
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
        if best < LIMIT_S:
            break
    return best


def test_long_texts_are_read_in_linear_time():
    assert len(UNITS) == 29
    for name, parser in PARSERS.items():
        for unit in UNITS:
            text = (unit * LENGTH)[:LENGTH]
            works = {
                "whole": lambda text=text, parser=parser: parse_reply(text, TOOLS, parser),
                "call": lambda text=text, parser=parser, name=name: parse_reply(BEGINS[name] + text, TOOLS, parser),
                "streamed": lambda text=text, name=name: streamed(text, name, 16),
            }
            for kind, work in works.items():
                assert fastest_s(work) < LIMIT_S, (name, unit, kind)


class Letters:
    """A tokenizer with one token per character."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, tokens))


def test_the_text_of_tokens_is_decoded_in_linear_time():
    for stops, held in (((), 0), (("ab",), 1)):
        deltas, tokens, parts = TextDeltas(Letters(), stops=stops, held_chars=held), list[int](), list[str]()

        def grow(deltas: TextDeltas = deltas, tokens: list[int] = tokens, parts: list[str] = parts) -> None:
            for number in range(LENGTH // 4):
                tokens.append(ord("x") + number % 3)
                parts.append(deltas.delta(tokens))

        started = time.process_time()
        grow()
        assert time.process_time() - started < 10 * LIMIT_S
        text = "".join(map(chr, tokens))
        assert "".join(parts) == text[: len(text) - held]
        assert deltas.rest(text) == text[len(text) - held :]
