from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from furlong.chat.template_boundary import ChatFormat
from furlong.errors import ConfigError, InfraError
from furlong.inference.chat_endpoint import END, ChatEndpoint, WireTokenizer, conversation_of
from furlong.interfaces import Completion, SamplingParams
from furlong.sessions.session import Reply, Session

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "x1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
Handler = Callable[[dict[str, Any]], httpx.Response]


def endpoint(handler: Handler, **options: Any) -> ChatEndpoint:
    made = ChatEndpoint("http://host/v1/", "m", key="k", first_wait_s=0.0, **options)
    transport = httpx.MockTransport(lambda request: handler(json.loads(request.content)))
    made._client = httpx.AsyncClient(transport=transport, headers=made._client.headers)  # pyright: ignore
    return made


def answer(message: dict[str, Any], reason: str = "stop") -> httpx.Response:
    usage = {"prompt_tokens": 7, "completion_tokens": 5}
    return httpx.Response(200, json={"choices": [{"message": message, "finish_reason": reason}], "usage": usage})


def complete(handler: Handler, text: str = "hi", params: SamplingParams | None = None, **options: Any) -> Completion:
    tokenizer = WireTokenizer()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True)
    return asyncio.run(endpoint(handler, **options).generate(ids, params or SamplingParams(), session="s"))


def test_the_template_only_appends():
    assert ChatFormat(WireTokenizer()).proof().reasons == {}


def test_a_conversation_with_tools_reaches_the_endpoint_as_messages():
    asked: list[dict[str, Any]] = []
    answers = [{"content": None, "tool_calls": [CALL], "reasoning_content": "add"}, {"content": "it is 2 \u00e9"}]

    def handler(body: dict[str, Any]) -> httpx.Response:
        asked.append(body)
        return answer({"role": "assistant", **answers[len(asked) - 1]})

    async def main() -> tuple[Reply, Reply, Session]:
        engine = endpoint(handler)
        chat = ChatFormat(WireTokenizer())

        async def ask(ids: list[int], params: SamplingParams, _part: int | None) -> Completion:
            return await engine.generate(ids, params, session="s")

        session = Session(chat, ask, name="s", params=SamplingParams())
        messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"1+1{'?'}"}]
        first = await session.chat(messages, tools=[TOOL])
        messages += [first.message, {"role": "tool", "tool_call_id": first.tool_calls[0]["id"], "content": "2"}]
        second = await session.chat(messages, tools=[TOOL])
        assert engine.usage["s"].completion_tokens == 10
        return first, second, session

    first, second, session = asyncio.run(main())
    assert first.reasoning == "add"
    assert first.tool_calls[0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert second.content == "it is 2 \u00e9"
    assert [message["role"] for message in asked[1]["messages"]] == ["system", "user", "assistant", "tool"]
    assert asked[1]["tools"] == [TOOL]
    call, result = asked[1]["messages"][2]["tool_calls"][0], asked[1]["messages"][3]
    assert call["function"]["name"] == "add"
    assert call["id"] == result["tool_call_id"]
    assert len(session.tree.leaves()) == 1


def test_text_of_every_kind_survives():
    for text in ("a\nb", 'quotes "x" \\ <tool_call>', "\U0001f600 \u00e9", "T{}M{}A", ""):
        ids = WireTokenizer().apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True
        )
        assert conversation_of(ids) == ([{"role": "user", "content": text}], [])
    done = complete(lambda _: answer({"content": f"a{END}b"}))
    assert WireTokenizer().decode(done.tokens, skip_special_tokens=True) == "ab"


def test_sampling_parameters_and_extra_fields_are_sent():
    bodies: list[dict[str, Any]] = []

    def handler(body: dict[str, Any]) -> httpx.Response:
        bodies.append(body)
        return answer({"content": "x"}, "length")

    params = SamplingParams(max_new_tokens=9, temperature=0.5, top_p=0.9, stop=("\n",), sampling_seed=2**40 + 3)
    done = complete(handler, params=params, extra={"reasoning_effort": "low"})
    assert done.finish_reason == "length"
    assert bodies[0] | {"messages": 0} == {
        "model": "m", "messages": 0, "temperature": 0.5, "top_p": 0.9, "max_tokens": 9, "stop": ["\n"], "seed": 3,
        "reasoning_effort": "low",
    }  # fmt: skip


def test_overload_is_tried_again_and_refusals_are_not():
    statuses = iter([429, 503, 200])
    done = complete(lambda _: answer({"content": "x"}) if (s := next(statuses)) == 200 else httpx.Response(s))
    assert done.text == "x"
    with pytest.raises(InfraError, match="5 times"):
        complete(lambda _: httpx.Response(500, text="down"))
    for status in (400, 401, 404, 422):
        calls: list[int] = []

        def refuse(_: dict[str, Any], status: int = status, calls: list[int] = calls) -> httpx.Response:
            calls.append(status)
            return httpx.Response(status, text="no")

        with pytest.raises(ConfigError, match=str(status)):
            complete(refuse)
        assert len(calls) == 1
    full = complete(lambda _: httpx.Response(400, json={"error": {"code": "context_length_exceeded"}}))
    assert (full.tokens, full.finish_reason) == ([], "length")
