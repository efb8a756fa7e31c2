"""Clients of the session server: protocols, retries, ends, and fields that are refused by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from chat_zoo import TOOLS, Script, bpe_tokenizer
from furlong.core.sample import Sample
from furlong.interfaces import SamplingParams
from furlong.sessions.open_session import OpenSession
from furlong.sessions.samples import samples_from_session
from served_sessions import run

USER = {"role": "user", "content": "what is the sum?"}
CALL = 'let me see\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def qwen(*answers: str) -> Script:
    return Script(bpe_tokenizer("qwen"), *answers)


def events(reply: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_chat_completions_over_a_session():
    script = qwen(CALL, "3", "four")

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        messages: list[Any] = [USER]
        fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True, "model": "tiny", "temperature": 0.2}
        url = f"{opened.url}/v1/chat/completions"
        reply = (await client.post(url, json={"messages": messages, **fields})).json()
        (choice,) = reply["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "let me see"
        assert choice["token_ids"] == opened.session.tree.nodes[0].sampled
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == reply["usage"]["completion_tokens"]
        assert reply["prompt_token_ids"] == script.asked[0]
        call = choice["message"]["tool_calls"][0]
        messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        streamed = events(await client.post(url, json={"messages": messages, **fields, "stream": True}))
        assert streamed[-1] == "[DONE]"
        assert "".join(e["choices"][0]["delta"].get("content") or "" for e in streamed[:-1]) == "3"
        bearer = {"Authorization": f"Bearer {opened.key}"}
        base = opened.url.partition("/sessions")[0]
        messages += [{"role": "assistant", "content": "3"}, USER]
        last = await client.post(
            f"{base}/v1/chat/completions", json={"messages": messages, "tools": TOOLS}, headers=bearer
        )
        assert last.json()["choices"][0]["message"]["content"] == "four"
        models = (await client.get(f"{base}/v1/models", headers=bearer)).json()
        assert models["data"][0]["max_model_len"] == 400
        assert opened.session.counts["overridden_temperature"] == 2
        assert len(samples_from_session(opened.session, Sample(index=0))) == 1

    run(script, body)


def test_anthropic_messages_over_a_session():
    script = qwen("<think>\nhm\n</think>\n\n" + CALL, "3")
    tool = {"name": "add", "description": "Add two numbers.", "input_schema": TOOLS[0]["function"]["parameters"]}

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        fields = {
            "system": [{"type": "text", "text": "You add.", "cache_control": {}}],
            "tools": [tool],
            "max_tokens": 99,
        }
        messages: list[Any] = [{"role": "user", "content": "1+2"}]
        count = await client.post(f"{opened.url}/v1/messages/count_tokens", json={**fields, "messages": messages})
        reply = (await client.post(f"{opened.url}/v1/messages", json={**fields, "messages": messages})).json()
        assert count.json() == {"input_tokens": reply["usage"]["input_tokens"]}
        assert [block["type"] for block in reply["content"]] == ["thinking", "text", "tool_use"]
        assert (reply["stop_reason"], reply["content"][2]["input"]) == ("tool_use", {"a": 1, "b": 2})
        result = {
            "type": "tool_result",
            "tool_use_id": reply["content"][2]["id"],
            "content": [{"type": "text", "text": "3"}],
        }
        messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
        streamed = await client.post(f"{opened.url}/v1/messages", json={**fields, "messages": messages, "stream": True})
        kinds = [event["type"] for event in events(streamed)]
        assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
        assert kinds[-2:] == ["message_delta", "message_stop"]
        assert len(opened.session.tree.leaves()) == 1

    run(script, body)


def test_responses_over_a_session():
    script = qwen(CALL, "3", "four")
    tool = {"type": "function", "name": "add", "parameters": TOOLS[0]["function"]["parameters"]}

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        url = f"{opened.url}/v1/responses"
        first = (await client.post(url, json={"input": "1+2", "instructions": "You add.", "tools": [tool]})).json()
        assert [item["type"] for item in first["output"]] == ["message", "function_call"]
        items = [{"role": "user", "content": "1+2"}, *first["output"]]
        items.append({"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "3"})
        second = (await client.post(url, json={"input": items, "instructions": "You add.", "tools": [tool]})).json()
        assert second["output"][0]["content"][0]["text"] == "3"
        third = {"input": "and?", "previous_response_id": second["id"], "instructions": "You add.", "tools": [tool]}
        streamed = events(await client.post(url, json={**third, "stream": True}))
        assert streamed[-1]["type"] == "response.completed"
        assert len(opened.session.tree.leaves()) == 1

    run(script, body)


def test_token_ids_over_a_session():
    tokenizer = bpe_tokenizer("plain")
    script = Script(tokenizer, "one", "two")

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        ids = tokenizer.encode("a b c")
        request = {"token_ids": ids, "sampling_params": {"max_tokens": 5, "logprobs": 1}}
        reply = (await client.post(f"{opened.url}/inference/v1/generate", json=request)).json()
        (choice,) = reply["choices"]
        assert [each["token"] for each in choice["logprobs"]["content"]] == [
            f"token_id:{t}" for t in choice["token_ids"]
        ]
        ids += [*choice["token_ids"], *tokenizer.encode(" d")]
        await client.post(f"{opened.url}/inference/v1/generate", json={**request, "token_ids": ids})
        assert len(opened.session.tree.leaves()) == 1

    run(script, body)


def test_a_retry_gets_the_same_answer_from_one_engine_call():
    tokenizer = bpe_tokenizer("plain")
    script = Script(tokenizer, "one", "two")
    release = asyncio.Event()

    class Slow(Script):
        async def __call__(self, *args: Any) -> Any:
            await release.wait()
            return await super().__call__(*args)

    slow = Slow(tokenizer, *script.answers)

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        url, request = f"{opened.url}/v1/chat/completions", {"messages": [USER]}
        both = [asyncio.create_task(client.post(url, json=request)) for _ in range(2)]
        while opened.session.counts["retries"] < 1:
            await asyncio.sleep(0.005)
        release.set()
        first, second = await asyncio.gather(*both)
        again = await client.post(url, json=request, headers={"x-stainless-retry-count": "1"})
        assert first.json()["choices"] == second.json()["choices"] == again.json()["choices"]
        assert len(slow.asked) == 1
        deliberate = await client.post(url, json=request)
        assert deliberate.json()["choices"] != first.json()["choices"]
        assert opened.session.tree.branch_reasons == {"retry": 1}

    run(slow, body)


def test_n_answers_are_siblings():
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        reply = await client.post(f"{opened.url}/v1/chat/completions", json={"messages": [USER], "n": 2})
        assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1]
        assert len(opened.session.tree.leaves()) == 2

    run(qwen("one", "two"), body)


def test_an_ended_session_aborts_its_requests_and_is_gone():
    class Endless(Script):
        async def __call__(self, *args: Any) -> Any:
            self.asked.append([])
            await asyncio.Event().wait()

    endless = Endless(bpe_tokenizer("plain"))

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        url = f"{opened.url}/v1/chat/completions"
        waiting = asyncio.create_task(client.post(url, json={"messages": [USER]}))
        while not endless.asked:
            await asyncio.sleep(0.005)
        await client.post(f"{opened.url}/end")
        assert (await waiting).status_code == 410
        later = await client.post(url, json={"messages": [USER]})
        assert (later.status_code, later.json()["error"]["code"]) == (410, "session_ended")

    run(endless, body)


REFUSED = [
    ("v1/chat/completions", {"presence_penalty": 1}, 400, "presence_penalty"),
    ("v1/chat/completions", {"tool_choice": "required"}, 400, "tool_choice"),
    ("v1/chat/completions", {"response_format": {"type": "grammar"}}, 400, "response_format"),
    ("v1/chat/completions", {"tools": [{"type": "web_search"}]}, 400, r"tools[0]"),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 400}]}, 400, "context length"),
    ("v1/chat/completions", {"separate_reasoning": False}, 400, "separate_reasoning"),
    ("v1/chat/completions", {"messages": [{**USER, "function_call": {"name": "f"}}]}, 400, "function_call"),
    ("v1/messages", {"messages": [USER]}, 400, "max_tokens"),
    ("v1/messages", {"max_tokens": 5, "output_config": {"format": {"type": "x"}}}, 400, "output_config.format"),
    ("v1/messages", {"max_tokens": 5, "tools": [{"name": "f", "type": "bash_20250124"}]}, 400, "bash_20250124"),
    ("v1/messages", {"max_tokens": 5, "messages": [USER, {**USER, "role": "assistant"}]}, 400, "messages[1].role"),
    ("v1/responses", {"input": "x", "background": True, "messages": None}, 400, "background"),
    ("v1/embeddings", {}, 404, "not served"),
]


def test_what_is_not_supported_is_refused_by_name():
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        for path, fields, status, named in REFUSED:
            reply = await client.post(f"{opened.url}/{path}", json={"messages": [USER], **fields})
            assert (reply.status_code, named in reply.json()["error"]["message"]) == (status, True), reply.text
            if "context" in named:
                assert reply.json()["error"]["code"] == "context_length_exceeded"

    run(qwen(), body)


def test_any_model_name_is_accepted_and_unknown_fields_are_counted(caplog):
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        request = {"messages": [USER], "model": "gpt-9", "a_field_of_tomorrow": 1}
        for _ in range(2):
            assert (await client.post(f"{opened.url}/v1/chat/completions", json=request)).status_code == 200
        assert opened.session.counts["ignored_fields"] == 2

    with caplog.at_level("INFO", "furlong"):
        run(qwen("one", "two"), body)
    assert caplog.text.count("sends a_field_of_tomorrow to /chat/completions") == 1


def test_a_limit_of_the_episode_is_a_429_that_clients_do_not_repeat_and_nothing_is_recorded():
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        session, url = opened.session, f"{opened.url}/v1"
        request = {"messages": [USER], "max_tokens": 5}
        assert (await client.post(f"{url}/chat/completions", json=request)).status_code == 200
        session._limit = lambda: "turns"
        for path, code in (("chat/completions", "rate_limit_exceeded"), ("messages", None)):
            for is_stream in (False, True):
                reply = await client.post(f"{url}/{path}", json={**request, "stream": is_stream, "messages": [USER]})
                assert (reply.status_code, reply.headers["x-should-retry"]) == (429, "false"), reply.text
                assert "limit of turns" in reply.json()["error"]["message"]
                assert code is None or reply.json()["error"]["code"] == code
        assert (len(session.tree.nodes), session.counts["limited"]) == (1, 4)
        assert session.tree.branch_reasons.total() == 0

    run(qwen("one", "two"), body)


def test_tools_of_codex_get_their_calls_in_its_form():
    patch = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
    spawn = '<tool_call>\n{"name": "agents.spawn", "arguments": {}}\n</tool_call>'
    script = qwen(patch, spawn, "ok")

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        tools = [
            {"type": "custom", "name": "apply_patch"},
            {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
        ]
        items: list[Any] = [{"role": "user", "content": "go"}]
        for _ in range(2):
            request = {"input": items, "tools": tools, "stream": True}
            streamed = events(await client.post(f"{opened.url}/v1/responses", json=request))
            (call,) = streamed[-1]["response"]["output"]
            done = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
            assert done[-1] == call
            items += [call, {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "done"}]
        await client.post(f"{opened.url}/v1/responses", json={"input": items, "tools": tools})
        assert (items[1]["type"], items[1]["input"]) == ("custom_tool_call", "*** Begin")
        assert (items[3]["type"], items[3]["namespace"], items[3]["name"]) == ("function_call", "agents", "spawn")
        assert len(opened.session.tree.leaves()) == 1

    run(script, body)


def test_constraints_that_the_policy_does_not_have_are_counted():
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        tool = {"name": "f", "input_schema": {}, "strict": True, "cache_control": {"type": "ephemeral"}}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        request = {"messages": [USER], "max_tokens": 5, "tools": [tool], "thinking": thinking}
        assert (await client.post(f"{opened.url}/v1/messages", json=request)).status_code == 200
        assert opened.session.counts["overridden_strict"] == opened.session.counts["overridden_budget_tokens"] == 1

    run(qwen("one"), body)


def test_a_key_and_an_id_are_required():
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        base = opened.url.partition("/sessions")[0]
        client.headers.pop("X-Api-Key")
        request = {"messages": [USER]}
        assert (await client.post(f"{base}/v1/chat/completions", json=request)).status_code == 401
        assert (await client.post(f"{base}/sessions/x/v1/chat/completions", json=request)).status_code == 404
        assert (await client.post(f"{base}/update_weights_from_disk", json={})).status_code == 404
        assert (await client.get(f"{base}/health")).status_code == 200

    run(qwen(), body)


def test_a_session_answers_only_its_own_key_whatever_the_path_says():
    other = "sk-" + "0" * 48

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        client.headers.pop("X-Api-Key")
        chat, end = {"messages": [USER]}, {"reward": 99}
        for headers in ({}, {"X-Api-Key": "any"}, {"Authorization": f"Bearer {other}"}, {"X-Api-Key": opened.id}):
            for base in (opened.url, f"{opened.url}.{other}", f"{opened.url}/roles/judge"):
                for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/generate"):
                    reply = await client.post(base + path, json=chat, headers=headers)
                    assert (reply.status_code, "OPENAI_API_KEY" in reply.text) == (401, True), (path, headers)
                assert (await client.get(f"{base}/v1/models", headers=headers)).status_code == 401
            assert (await client.post(f"{opened.url}/end", json=end, headers=headers)).status_code == 401
        assert not opened.session.tree.nodes
        for url, key in ((opened.url, opened.key), (opened.url, f"{opened.key}:judge"), (opened.url_with_key, "any")):
            for headers in ({"X-Api-Key": key}, {"Authorization": f"Bearer {key}"}):
                reply = await client.post(f"{url}/v1/chat/completions", json=chat, headers=headers)
                assert reply.status_code == 200
        refused = await client.post(f"{opened.url}/end", json=end, headers={"X-Api-Key": opened.key})
        assert (refused.status_code, opened.result) == (403, None)

    run(qwen(*"abcdef"), body)


def test_clients_set_the_temperature_only_if_they_may():
    class Recording(Script):
        async def __call__(self, ids: Any, params: SamplingParams, part: Any = None) -> Any:
            used.append(params)
            return await super().__call__(ids, params, part)

    used: list[SamplingParams] = []

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        fields = {"messages": [USER], "temperature": 0.5, "max_tokens": 7, "stop": ["x"]}
        await client.post(f"{opened.url}/v1/chat/completions", json=fields)

    for may in (False, True):
        run(Recording(bpe_tokenizer("plain"), "one"), body, client_sampling=may)
    assert [params.temperature for params in used] == [1.0, 0.5]
    assert [(params.max_new_tokens, params.stop) for params in used] == [(7, ("x",))] * 2


def test_roles_have_urls_and_keys_and_conversations_apart():
    script = qwen("one", "two", "three")

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        solver, judge = opened.role("solver"), opened.role("judge", trainable=False)
        await client.post(f"{solver.url}/v1/chat/completions", json={"messages": [USER]})
        server = opened.url.partition("/sessions/")[0]
        key = {"X-Api-Key": judge.key}
        await client.post(f"{server}/v1/chat/completions", json={"messages": [USER]}, headers=key)
        ids = {"token_ids": [5, 6, 7]}
        await client.post(f"{solver.url}/inference/v1/generate", json=ids)
        assert [node.role for node in opened.session.tree.nodes] == ["solver", "judge", "solver"]
        assert opened.session.tree.branch_reasons == {"edited": 1}
        samples = samples_from_session(opened.session, Sample(index=0))
        assert [sample.metadata["role"] for sample in samples] == ["solver", "solver"]
        assert set(samples[-1].metadata["roles"]) == {"solver", "judge"}
        reply = await client.post(f"{opened.url}/roles/{'x' * 99}/v1/chat/completions", json={"messages": [USER]})
        assert reply.status_code == 400
        assert "role" in reply.json()["error"]["message"]
        assert (await client.get(f"{solver.url}/v1/models")).status_code == 200

    run(script, body)


def test_sglangs_generate_over_a_session():
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        ids = opened.session.chat_format.encode("one")
        fields = {"sampling_params": {"max_new_tokens": 8}, "return_logprob": True, "rid": "mine"}
        first = (await client.post(f"{opened.url}/generate", json={"input_ids": ids, **fields})).json()
        meta = first["meta_info"]
        assert (meta["id"], meta["prompt_tokens"], meta["finish_reason"]["type"]) == ("mine", len(ids), "stop")
        assert [token for _, token, _ in meta["output_token_logprobs"]] == first["output_ids"]
        more = [*ids, *first["output_ids"], *opened.session.chat_format.encode("two")]
        both = await client.post(f"{opened.url}/generate", json={"input_ids": more, "sampling_params": {"n": 2}})
        assert len(both.json()) == 2
        (root,) = [node for node in opened.session.tree.nodes if node.parent is None]
        assert root.num_children == 2
        for fields, named in (
            ({"input_ids": [ids, ids]}, "one at a time"),
            ({"input_ids": ids, "stream": True}, "stream"),
            ({"input_ids": ids, "lora_path": "x"}, "lora_path"),
            ({"input_ids": ids, "sampling_params": {"frequency_penalty": 1}}, "frequency_penalty"),
            ({"input_ids": []}, "empty"),
        ):
            refused = await client.post(f"{opened.url}/generate", json=fields)
            assert (refused.status_code, named in refused.text) == (400, True)

    run(qwen("one", "two", "three"), body)
