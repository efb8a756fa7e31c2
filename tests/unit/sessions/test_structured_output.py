"""Structured output: replies of a random model follow the schema, and their log-probs are those of the free policy."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from contextlib import nullcontext
from typing import Any

import httpx
import pytest
import torch

from chat_zoo import TOOLS, Script, bpe_tokenizer
from fakes_engine import tiny_engine, tiny_model
from fakes_rollout import ScriptedEngine
from furlong.chat.messages import MessageError
from furlong.inference.request_error import RequestError
from furlong.inference.server.http_server import running_server
from furlong.interfaces import Completion, SamplingParams
from furlong.rollout.policy import Policy
from furlong.sessions.json_replies import JsonReply, read_format, read_tool_choice
from furlong.sessions.open_session import OpenSession
from furlong.sessions.served_model import served_routes
from served_sessions import run

USER = {"role": "user", "content": "hi"}
ITEM = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
ANSWER = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "minItems": 1, "maxItems": 2}},
    "required": ["items"],
    "additionalProperties": False,
    "$defs": {"Item": {**ITEM, "additionalProperties": False}},
}
PICK = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]}
PICK_TOOL = {"name": "pick", "parameters": {**PICK, "additionalProperties": False}}
FUNCTION = {"type": "function", "function": PICK_TOOL}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}}
FORMAT = {"type": "json_schema", "name": "answer", "schema": ANSWER}
ANTHROPIC_TOOL = {"name": "pick", "input_schema": PICK_TOOL["parameters"]}


def test_replies_of_a_random_model_follow_the_schema():
    tokenizer = bpe_tokenizer("qwen")
    config, model = tiny_model("qwen3", vocab_size=416, max_position_embeddings=2048)
    engine = tiny_engine(config, model.state_dict(), tokenizer=tokenizer)
    prompt = tokenizer.encode("hi")

    async def main() -> None:
        params = SamplingParams(max_new_tokens=300, json_schema=json.dumps(ANSWER), sampling_seed=3)
        free = SamplingParams(max_new_tokens=40, sampling_seed=5)
        alone = await engine.generate(prompt, free)
        done, beside = await asyncio.gather(engine.generate(prompt, params), engine.generate(prompt, free))
        assert beside.tokens == alone.tokens  # a request beside a constrained one is not constrained
        assert {tuple(each) for each in json.loads(done.text.removesuffix(tokenizer.eos_token))["items"]} == {("n",)}
        assert done.finish_reason == "stop"
        with torch.no_grad():
            logits = model(torch.tensor([prompt + done.tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(done.log_probs), expected, atol=1e-4)  # before tokens are banned
        for change, text in (
            ({"json_schema": '{"type": "no"}'}, "json_schema cannot be compiled"),
            ({"json_schema": "{"}, "json_schema is not a JSON schema"),
            ({"ignore_eos": True}, "a token that ends it"),
            ({"min_new_tokens": 3}, "min_new_tokens cannot be combined"),
        ):
            with pytest.raises(RequestError, match=text):
                await engine.generate(prompt, dataclasses.replace(params, **change))
        async with (
            running_server(engine, agents=served_routes, model_name="tiny") as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):

            async def post(path: str, **fields: Any) -> Any:
                limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
                start = {"input": "hi"} if path == RESPONSES else {"messages": [USER]}
                reply = await client.post(path, json={**start, limit: 300, **fields})
                assert reply.status_code == 200, reply.text
                return reply.text if fields.get("stream") else reply.json()

            def message(reply: Any) -> Any:
                return reply["choices"][0]["message"]

            required = await post(CHAT, tools=[FUNCTION], tool_choice="required")
            (call,) = message(required)["tool_calls"]
            assert call["function"]["name"] == "pick"
            assert json.loads(call["function"]["arguments"])["color"] in ("red", "blue")
            named = {"type": "function", "function": {"name": "pick"}}
            streamed = await post(CHAT, tools=[*TOOLS, FUNCTION], tool_choice=named, stream=True)
            events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
            deltas = [event["choices"][0]["delta"] for event in events]
            assert "".join(delta.get("content") or "" for delta in deltas) == ""
            assert [d["tool_calls"][0]["function"]["name"] for d in deltas if "tool_calls" in d] == ["pick"]
            assert json.loads(message(await post(CHAT, response_format=JSON_SCHEMA))["content"])["items"]
            both = message(await post(CHAT, response_format=JSON_SCHEMA, tools=[FUNCTION]))
            assert both.get("tool_calls") or json.loads(both["content"])["items"]
            used = await post(MESSAGES, tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"})
            assert (used["stop_reason"], used["content"][0]["name"]) == ("tool_use", "pick")
            formatted = await post(MESSAGES, output_config={"format": {"type": "json_schema", "schema": ANSWER}})
            assert json.loads(formatted["content"][0]["text"])["items"]
            (item,) = (await post(RESPONSES, text={"format": FORMAT}))["output"]
            assert json.loads(item["content"][0]["text"])["items"]
            sampling = {"json_schema": json.dumps(ANSWER), "max_new_tokens": 300}
            native = await client.post("/generate", json={"text": "hi", "sampling_params": sampling})
            assert json.loads(native.json()["text"])["items"]
            wrong = {"type": "object", "properties": {"a": {"$ref": "#/nope"}}}
            sampling = {"json_schema": json.dumps(wrong), "max_new_tokens": 3}
            format = {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}
            for path, fields in (
                ("/generate", {"text": "hi", "sampling_params": sampling}),
                (CHAT, {"messages": [USER], "response_format": format}),
            ):
                refused = await client.post(path, json={**fields, "stream": True})
                assert (path, refused.status_code) == (path, 400)
                assert "json_schema cannot be compiled" in refused.json()["error"]["message"]

    try:
        asyncio.run(main())
    finally:
        asyncio.run(engine.close())


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch):
    config, model = tiny_model("qwen3", vocab_size=416)
    engine = tiny_engine(config, model.state_dict(), tokenizer=bpe_tokenizer("qwen"))
    monkeypatch.setitem(sys.modules, "llguidance", None)

    async def main() -> None:
        with pytest.raises(RequestError, match=r"pip install 'furlong-rl\[structured\]'"):
            await engine.generate([1, 2], SamplingParams(json_schema="{}"))
        await engine.close()

    asyncio.run(main())


def test_training_refuses_a_schema_at_a_temperature_without_exact_log_probs():
    class Sglang(ScriptedEngine):
        scored_temperatures = (0.0, 1.0)

    for temperature, is_trained, is_refused in ((0.8, True, True), (0.8, False, False), (1.0, True, False)):
        call = Policy(Sglang(), None, "s", is_trained=is_trained).generate(
            [1], json_schema="{}", temperature=temperature
        )
        with pytest.raises(MessageError, match="use --rollout-temperature 1") if is_refused else nullcontext():
            asyncio.run(call)


def test_a_forced_call_continues_the_conversation():
    script = Script(bpe_tokenizer("qwen"), '{"name": "add", "arguments": {"a": 1}}', "3", '{"name": "add", "argu')

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        url, session = f"{opened.url}{CHAT}", opened.session
        fields: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "tool_choice": "required"}
        first = (await client.post(url, json=fields)).json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "3"}
        await client.post(url, json={"messages": [USER, first, result], "tools": TOOLS})
        assert (len(session.tree.leaves()), session.counts["ill_formed_calls"]) == (1, 0)
        cut = (await client.post(url, json=fields)).json()["choices"][0]["message"]
        assert (cut["content"], session.counts["ill_formed_calls"]) == ('{"name": "add", "argu', 1)

    run(script, body)


def test_a_template_that_opens_a_thought_needs_another_argument():
    tokenizer = bpe_tokenizer("qwen")
    script = Script(tokenizer, "x")

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        source = opened.session.chat_format.source.replace(
            "<|im_start|>assistant\n{% if enable", "<|im_start|>assistant\n<think>\n{% if enable"
        )
        opened.session.chat_format = type(opened.session.chat_format)(tokenizer, chat_template=source)
        reply = await client.post(f"{opened.url}{CHAT}", json={"messages": [USER], "response_format": JSON_SCHEMA})
        assert reply.status_code == 400
        assert '"enable_thinking": false' in reply.json()["error"]["message"]

    run(script, body)


def test_forms_of_tool_choice_and_response_format():
    assert read_tool_choice("none", [FUNCTION]) == (False, ())
    for choice in (None, "auto", {"type": "auto"}):
        assert read_tool_choice(choice, [FUNCTION]) == (True, ())
    for choice in ("required", {"type": "any"}, {"type": "tool", "name": "pick"}, {"type": "function", "name": "pick"}):
        assert read_tool_choice(choice, [FUNCTION]) == (True, ("pick",))
    for choice in ("x", {"type": "tool", "name": "other"}, {"type": "allowed_tools"}, 3):
        with pytest.raises(RequestError, match="tool_choice"):
            read_tool_choice(choice, [FUNCTION])
    assert read_format("f", {"type": "json_object"}) == {"type": "object"}
    for given in ({"type": "json_schema"}, {"type": "x"}, "json"):
        with pytest.raises(RequestError, match="response_format"):
            read_format("response_format", given)
    reply = JsonReply(ANSWER, ["pick"])
    whole = json.loads(reply.text([FUNCTION]))
    assert list(whole["$defs"]) == ["Item"]
    assert len(whole["anyOf"]) == 2
    assert reply.parse('{"name": "other", "arguments": {}}').calls == ()


def test_a_reply_within_a_schema_starts_again_if_a_weight_update_aborts_it():
    asked: list[list[int]] = []

    class Aborting(ScriptedEngine):
        async def generate(self, prompt: Any, params: SamplingParams, *, session: str | None = None) -> Completion:
            asked.append(list(prompt))
            reason = "abort" if len(asked) == 1 else "stop"
            return Completion([7] * len(asked), [-0.5] * len(asked), [len(asked)] * len(asked), reason)

    policy = Policy(Aborting(lambda prompt, params: [7]), None, "s", continues=lambda: True)
    done = asyncio.run(policy.complete([1, 2], SamplingParams(json_schema="{}")))
    assert (asked, done.tokens, done.versions) == ([[1, 2], [1, 2]], [7, 7], [2, 2])
