"""Streams send tokens as they are sampled, and end the answer when their client leaves."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from chat_zoo import TOOLS, Script, bpe_tokenizer
from furlong.core.sample import Sample, Status
from furlong.sessions.open_session import OpenSession
from furlong.sessions.samples import samples_from_session
from furlong.sessions.tree import TreeNode
from served_sessions import run

USER = {"role": "user", "content": "what is the sum?"}
CALLS = "".join(
    f'\n<tool_call>\n{{"name": "add", "arguments": {{"a": {i}, "b": "two"}}}}\n</tool_call>' for i in range(2)
)
ANSWER = "<think>\nfirst a thought\n</think>\n\nlet me see" + CALLS


class Paced(Script):
    """Takes 2 ms for each token."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(bpe_tokenizer("qwen"), *answers)
        self.token_s = 0.002


async def events(client: httpx.AsyncClient, url: str, body: Any) -> AsyncGenerator[Any]:
    async with client.stream("POST", url, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


REQUESTS = {
    "v1/chat/completions": {"messages": [USER], "tools": TOOLS},
    "v1/messages": {
        "messages": [USER],
        "max_tokens": 300,
        "tools": [{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}],
    },
    "v1/responses": {"input": "sum?", "tools": [{"type": "function", **TOOLS[0]["function"]}]},
}


@pytest.mark.parametrize("path", REQUESTS)
def test_the_first_event_comes_before_the_last_token_is_sampled(path):
    script = Paced(ANSWER)

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        script.before_last = asyncio.Event()
        seen = 0
        async for _ in events(client, f"{opened.url}/{path}", REQUESTS[path]):
            seen += 1
            if seen == 4:  # pieces are joined on a busy machine
                assert not opened.session.tree.nodes
                script.before_last.set()
        (node,) = opened.session.tree.nodes
        assert seen > 4
        assert (node.is_delivered, node.is_cut) == (True, False)

    run(script, body)


def test_streamed_tokens_log_probs_and_text_are_those_of_the_answer():
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        fields = {"n": 2, "logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        request = {**REQUESTS["v1/chat/completions"], **fields}
        all_events = [e async for e in events(client, f"{opened.url}/v1/chat/completions", request)]
        *chunks, last = all_events
        nodes = opened.session.tree.nodes
        assert last["usage"]["completion_tokens"] == sum(len(node.sampled) for node in nodes)
        for index in range(2):
            choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            ids = [id for choice in choices for id in choice.get("token_ids", [])]
            (node,) = [node for node in nodes if node.sampled == ids]
            values = [each["logprob"] for c in choices if c["logprobs"] for each in c["logprobs"]["content"]]
            assert values == node.completion.log_probs
            text = "".join(c["delta"].get("content") or "" for c in choices)
            assert node.reply is not None
            assert text == node.reply["content"]
            thought = "".join(c["delta"].get("reasoning_content") or "" for c in choices)
            assert thought == (node.reply.get("reasoning_content") or "")

    run(Paced(ANSWER, "plain <b text"), body)


def test_an_error_before_the_first_token_has_its_status():
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        long = {"messages": [{"role": "user", "content": "a " * 500}], "stream": True}
        reply = await client.post(f"{opened.url}/v1/chat/completions", json=long)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")

    run(Paced(), body)


def test_an_error_after_the_first_token_is_an_event():
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        seen: list[Any] = []
        async for event in events(client, f"{opened.url}/v1/chat/completions", {"messages": [USER]}):
            seen.append(event)
            if len(seen) == 2:
                await client.post(f"{opened.url}/end")
        assert seen[-1]["error"]["code"] == "session_ended"

    run(Paced(ANSWER), body)


async def leave_early(client: httpx.AsyncClient, opened: OpenSession, url: str) -> TreeNode:
    """Close the connection after four events, and return the first turn of the session."""
    stream = events(client, url, {"messages": [USER]})
    for _ in range(4):
        await anext(stream)
    await stream.aclose()
    async with asyncio.timeout(60):  # the answer is in the tree before it is marked as not delivered
        while not (nodes := opened.session.tree.nodes) or nodes[0].is_delivered:
            await asyncio.sleep(0.005)
    (cut,) = nodes
    return cut


def test_a_client_that_leaves_ends_the_answer_and_a_retry_replaces_it():
    script = Paced(ANSWER, "whole", "more")

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        url, tree = f"{opened.url}/v1/chat/completions", opened.session.tree
        cut = await leave_early(client, opened, url)
        whole = len(script.tokenizer.encode(ANSWER))
        assert (cut.is_cut, cut.is_delivered, cut.completion.finish_reason) == (True, False, "abort")
        assert 0 < len(cut.sampled) < whole
        (sample,) = samples_from_session(opened.session, Sample(index=0))
        assert sample.status is Status.COMPLETED
        assert sum(sample.loss_mask or ()) == len(cut.sampled)
        request = {"messages": [USER], "stream": True}
        retry = {"x-stainless-retry-count": "1"}
        assert (await client.post(url, json=request, headers=retry)).status_code == 200
        assert (tree.nodes[1].is_delivered, len(script.asked)) == (True, 2)
        (sample,) = samples_from_session(opened.session, Sample(index=0))  # the first answer is superseded
        assert sample.status is Status.COMPLETED
        assert sum(sample.loss_mask or ()) == len(tree.nodes[1].sampled)

    run(script, body)


def test_a_conversation_continues_after_a_cut_answer():
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        url, tree = f"{opened.url}/v1/chat/completions", opened.session.tree
        cut = await leave_early(client, opened, url)
        assert cut.reply is not None
        await client.post(url, json={"messages": [USER, cut.reply, USER]})
        assert tree.nodes[1].parent is cut
        (sample,) = samples_from_session(opened.session, Sample(index=0))
        end = opened.session.chat_format.tokenizer.eos_token_id
        after = sample.prompt_length + len(cut.sampled)
        assert sample.tokens[after] == end
        assert (sample.loss_mask or [])[len(cut.sampled)] == 0

    run(Paced(" ".join(["one two three four five"] * 10), "more"), body)


def test_two_requests_stream_one_answer():
    script = Paced(ANSWER)

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        url = f"{opened.url}/v1/chat/completions"

        async def text(count: int) -> str:
            parts: list[str] = []
            stream = events(client, url, REQUESTS["v1/chat/completions"])
            async for event in stream:
                parts.append(event["choices"][0]["delta"].get("content") or "")
                if len(parts) == count:
                    await stream.aclose()
            return "".join(parts)

        first, second = await asyncio.gather(text(3), text(999))
        assert second.startswith(first)
        assert second == "let me see"
        assert len(script.asked) == 1
        assert opened.session.tree.nodes[0].is_delivered

    run(script, body)


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find the client libraries in FURLONG_CLIENTS_DIR, if it is set, or where they are installed."""
    if folder := os.environ.get("FURLONG_CLIENTS_DIR"):
        monkeypatch.setattr(sys, "path", [*sys.path, folder])


def test_openais_client_reassembles_a_stream(clients):
    openai = pytest.importorskip("openai", reason="pip install openai, or set FURLONG_CLIENTS_DIR")

    async def body(_client: httpx.AsyncClient, opened: OpenSession) -> None:
        async with openai.AsyncOpenAI(base_url=f"{opened.url}/v1", api_key=opened.key, max_retries=0) as client:
            options = {"stream": True, "stream_options": {"include_usage": True}, "tools": TOOLS}
            chunks: list[Any] = []
            async for chunk in await client.chat.completions.create(model="tiny", messages=[USER], **options):
                chunks.append(chunk)
                if len(chunks) == 2:
                    assert not opened.session.tree.nodes
            (node,) = opened.session.tree.nodes
            calls = [call for c in chunks[:-1] for call in c.choices[0].delta.tool_calls or []]
            assert node.reply is not None
            assert [call.function.arguments for call in calls] == [
                call["function"]["arguments"] for call in node.reply["tool_calls"]
            ]
            assert [call.index for call in calls] == [0, 1]
            assert chunks[-1].usage.completion_tokens == len(node.sampled)
            async with client.responses.stream(model="tiny", input="sum?") as events_of_response:
                kinds = [event.type async for event in events_of_response]
                final = await events_of_response.get_final_response()
            assert kinds.count("response.output_text.delta") > 1
            assert final.output_text == "of responses"

    run(Paced(ANSWER, "of responses"), body)


def test_anthropics_client_reassembles_a_stream(clients):
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic, or set FURLONG_CLIENTS_DIR")

    async def body(_client: httpx.AsyncClient, opened: OpenSession) -> None:
        request = REQUESTS["v1/messages"]
        async with (
            anthropic.AsyncAnthropic(base_url=opened.url, api_key=opened.key, max_retries=0) as client,
            client.messages.stream(model="tiny", **request) as stream,
        ):
            texts = [text async for text in stream.text_stream]
            message = await stream.get_final_message()
        (node,) = opened.session.tree.nodes
        assert "".join(texts) == "let me see"
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.input for block in message.content[2:]] == [{"a": i, "b": "two"} for i in range(2)]
        assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", len(node.sampled))
        assert message.usage.input_tokens == node.num_ids - len(node.sampled)

    run(Paced(ANSWER), body)
