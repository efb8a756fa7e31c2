"""Every field of every protocol, one by one: a value of another kind is refused by the name of the field."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from furlong.chat.messages import MessageError
from furlong.inference.request_error import RequestError
from furlong.inference.server.generate_api import PromptFields, SamplingFields
from furlong.inference.server.openai_api import CompletionFields
from furlong.inference.server.schemas import Schema, read_fields
from furlong.inference.server.web import details_of, error_body
from furlong.sessions.protocols import chat, messages, responses, tokens

OTHERS = [True, 7, -7, 0.5, 1e300, 1 << 64, "", "x", [], [7], ["x"], [None], [{}], {}, {"x": 7}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SAMPLING = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop_token_ids": [3]}
CHAT = {
    **SAMPLING,
    "model": "tiny",
    "n": 2,
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "min_tokens": 1,
    "seed": 3,
    "stop": ["e"],
    "messages": [
        {"role": "system", "content": "be", "name": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": "no", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "add", "description": "d", "parameters": SCHEMA, "strict": False}}
    ],
    **dict.fromkeys(("parallel_tool_calls", "stream", "logprobs", "return_token_ids", "store"), True),
    "tool_choice": "auto",
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_effort": "low",
    "user": "u",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "response_format": {"type": "text"},
    "frequency_penalty": 0,
    "modalities": ["text"],
    "echo": False,
}
ANTHROPIC = {
    "model": "tiny",
    "max_tokens": 5,
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 5,
    "stop_sequences": ["e"],
    "system": "be",
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "3", "is_error": True}]},
    ],
    "tools": [{"type": "custom", "name": "add", "description": "d", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stream": True,
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "speed": "standard",
}
RESPONSES = {
    "model": "tiny",
    "input": [
        {"type": "message", "role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ],
    "tools": [{"type": "function", "name": "add", "description": "d", "parameters": SCHEMA, "strict": True}],
    "instructions": "be",
    "tool_choice": "auto",
    "max_output_tokens": 5,
    "temperature": 1.0,
    "top_p": 0.9,
    "stream": True,
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low"},
    "truncation": "disabled",
    "user": "u",
    "metadata": {"a": "b"},
    "store": True,
    "text": {"verbosity": "medium"},
    "background": False,
}
GENERATE = {
    "token_ids": [5, 6],
    "sampling_params": {**SAMPLING, "max_tokens": 5, "min_tokens": 1, "stop": ["e"], "seed": 3, "n": 2, "logprobs": 1},
    "model": "tiny",
    "request_id": "r",
    "stream": False,
    "priority": 1,
    "cache_salt": "s",
}
SGLANG = {
    "input_ids": [5, 6],
    "sampling_params": {
        **SAMPLING,
        "max_new_tokens": 5,
        "min_new_tokens": 1,
        "stop": ["e"],
        "sampling_seed": 3,
        "n": 2,
    },
    "return_logprob": True,
    "stream": False,
    "rid": "r",
    "logprob_start_len": -1,
}
COMPLETION = {**SAMPLING, "max_tokens": 5, "n": 2, "stop": ["e"], "seed": 3, "stream": True, "user": "u"}
READERS: Mapping[str, tuple[Callable[[Any], Any], Mapping[str, Any]]] = {
    "chat": (chat.read, CHAT),
    "anthropic": (messages.read, ANTHROPIC),
    "responses": (responses.read, RESPONSES),
    "generate": (tokens.read_vllm, GENERATE),
    "sglang": (tokens.read_sglang, SGLANG),
    "served completions": (lambda body: read_fields(CompletionFields, body), COMPLETION),
}
SCHEMAS = [chat.ChatFields, messages.MessagesFields, responses.ResponsesFields, PromptFields, tokens.VllmFields]
IGNORED = {name for each in (*SCHEMAS, SamplingFields) for name in each.IGNORED}
ONLY = {name for each in (*SCHEMAS, SamplingFields) for name in each.ONLY}
# Fields of several kinds, and those that only the template reads.
TEXT_OR_LIST = ("content", "stop", "system", "instructions", "output", "input", "text", "arguments")
FREE = ("properties", "parameters", "input_schema", "chat_template_kwargs", "input", "reasoning_content")


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield (*path, key), each
        yield from _places(each, (*path, key))


def _replaced(body: Mapping[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(body)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "flag"
    return "number" if isinstance(value, int | float) else type(value).__name__


def _may_be(path: tuple[Any, ...], old: Any, new: Any) -> bool:
    """Return whether a field may have this value, as far as its kind tells."""
    if IGNORED & set(path) or path[0] == "metadata" or (path[-1] in ONLY and new in ("", [], {})):
        return True
    if any(key in FREE for key in path[:-1]) and path[0] not in ("input", "messages"):
        return True
    if path[0] == "messages" and "input" in path[:-1]:
        return True
    kinds = {_kind(old), "NoneType"} if old is not None else {"str", "list", "NoneType"}
    if path[-1] in TEXT_OR_LIST:
        kinds |= {"str", "list"}
    if path[-1] == "arguments":
        kinds.add("dict")
    return _kind(new) in kinds


def _refusal(read: Callable[[Any], Any], body: Mapping[str, Any]) -> str | None:
    try:
        read(body)
    except (RequestError, MessageError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", READERS)
def test_a_value_of_another_kind_is_refused_by_name(name):
    read, body = READERS[name]
    read(copy.deepcopy(body))
    accepted, unnamed = list[Any](), list[Any]()
    for path, old in _places(body):
        for new in OTHERS:
            field = next(key for key in reversed(path) if isinstance(key, str))
            refusal = _refusal(read, _replaced(body, path, new))
            if refusal is None and not _may_be(path, old, new):
                accepted.append((path, new))
            if refusal is not None and field not in refusal and field not in ("role", "type"):
                unnamed.append((path, new, refusal))
    assert accepted == []
    assert unnamed == []


@pytest.mark.parametrize(
    ("name", "path", "values"),
    [
        ("chat", ("temperature",), [-0.1, 1e7]),
        ("chat", ("top_p",), [0, 1.1, -1]),
        ("chat", ("top_k",), [-2, 1 << 40]),
        ("chat", ("min_p",), [-0.1, 1.1]),
        ("chat", ("n",), [0, -1, 5000]),
        ("chat", ("max_tokens",), [0, -1, 1 << 40]),
        ("chat", ("stop",), ["", [""], ["x" * 2000], ["x"] * 200]),
        ("chat", ("stop_token_ids", 0), [-1, 1 << 40]),
        ("chat", ("logit_bias",), [{"5": 1.0}]),
        ("chat", ("chat_template_kwargs",), [{"messages": []}, {"a b": 1}, {"tokenize": True}]),
        ("chat", ("messages", 2, "tool_calls", 0, "type"), ["x"]),
        ("chat", ("tools", 0, "function", "name"), [""]),
        ("generate", ("token_ids", 0), [-1, 1 << 40]),
        ("generate", ("sampling_params", "logprobs"), [2]),
        ("sglang", ("input_ids", 0), [-1, 1 << 40]),
        ("anthropic", ("thinking", "type"), ["x"]),
        ("served completions", ("logprobs",), [5]),
    ],
)
def test_a_value_beyond_its_range_is_refused_by_name(name, path, values):
    read, body = READERS[name]
    field = next(key for key in reversed(path) if isinstance(key, str))
    for value in values:
        with pytest.raises((RequestError, MessageError), match=field):
            read(_replaced(body, path, value))


def test_no_top_k_in_vllms_words_is_no_top_k():
    body = _replaced(GENERATE, ("sampling_params", "top_k"), 0)
    assert tokens.read_vllm(body).sampling["top_k"] is None


def test_unknown_fields_are_counted_by_protocols_of_messages_and_refused_by_others():
    for name, (read, body) in READERS.items():
        read({**body, "made_up": False, "another": None})
        if name in ("chat", "anthropic", "responses"):
            assert read({**body, "made_up": 0, "more": {}}).ignored == ["made_up"]
            for field, value in (("guided_json", {"type": "object"}), ("bad_words", ["x"])):
                with pytest.raises(RequestError, match=field):
                    read({**body, field: value})
        else:
            with pytest.raises(RequestError, match="made_up"):
                read({**body, "made_up": 0})


def test_fields_and_tools_of_coding_agents_are_accepted():
    claude_code = {
        **{key: ANTHROPIC[key] for key in ("model", "messages", "max_tokens", "stream", "metadata")},
        "system": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("be", "brief")],
        "tools": [
            {"name": "Bash", "description": "d", "input_schema": SCHEMA, "eager_input_streaming": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 20000}},
    }
    call = messages.read(claude_code)
    assert call.messages[0]["content"] == "be\nbrief"  # as SGLang joins them
    assert call.overridden == ["effort"]
    assert call.ignored == [
        *("thinking.display", "context_management", "output_config.task_budget"),
        "tools[].type 'web_search_20250305'",
    ]
    patch = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "definition": "start: /x/"}}
    agents = [{"type": "function", "name": "spawn", "parameters": SCHEMA, "strict": False}]
    codex = {
        **{key: RESPONSES[key] for key in ("model", "stream", "tool_choice", "parallel_tool_calls")},
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
            {"type": "function_call", "call_id": "c2", "name": "spawn", "namespace": "agents", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
        ],
        "tools": [patch, {"type": "namespace", "name": "agents", "tools": agents}, {"type": "web_search"}],
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "low"},
        "client_metadata": {"session_id": "x"},
    }
    call = responses.read(codex)
    assert [tool["function"]["name"] for tool in call.tools or ()] == ["apply_patch", "agents.spawn"]
    assert "start: /x/" in (call.tools or [])[0]["function"]["description"]
    made = [tool["function"] for message in call.messages for tool in message.get("tool_calls", ())]
    assert made == [
        {"name": "apply_patch", "arguments": '{"input": "x"}'},
        {"name": "agents.spawn", "arguments": "{}"},
    ]
    with pytest.raises(RequestError, match=r"tools\[0\].type is 'local_shell'"):
        responses.read({"input": "x", "tools": [{"type": "local_shell"}]})


def test_a_refusal_names_the_path_the_value_and_what_it_must_be():
    class Fields(Schema):
        n: int | None = None
        rows: list[list[int]] | None = None

    for body, text in [
        ({"n": "x"}, "n is 'x', must be int"),
        ({"rows": [[1], [2, "y"]]}, "rows[1][1] is 'y', must be int"),
        ({"rows": 3}, "rows is 3, must be a list"),
        ({"made_up": 3}, "made_up is not a field of this endpoint; remove it"),
    ]:
        with pytest.raises(RequestError) as refused:
            read_fields(Fields, body)
        assert str(refused.value) == text
        param = details_of(refused.value)[1]
        assert param == text.split()[0]
        assert error_body("/v1/chat/completions", text, 400, param=param)["error"]["param"] == param


def test_objects_in_a_request_have_the_same_policy():
    for read, body in (
        (chat.read, {**CHAT, "stream_options": {"include_usage": True, "made_up": 1}}),
        (messages.read, {**ANTHROPIC, "tool_choice": {"type": "auto", "made_up": 1}}),
        (responses.read, {**RESPONSES, "reasoning": {"effort": "low", "made_up": 1}}),
    ):
        assert [name.rpartition(".")[2] for name in read(body).ignored] == ["made_up"]
