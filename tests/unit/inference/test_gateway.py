"""The endpoint of a run for user functions: `/generate` of SGLang, whatever the engine is."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import httpx

from furlong.inference.chat_endpoint import WireTokenizer
from furlong.interfaces import Completion
from furlong.sessions.served_model import Gateway


def post(*bodies, api_key=None, **options):
    """Send requests to a gateway; returns the replies and what `complete` got."""
    calls = []

    async def complete(ids, params):
        calls.append((ids, params))
        n = len(calls)
        return Completion([n, n], [-0.5, -0.25], [6, 7], "length", f"text {n}")

    async def go():
        gateway = Gateway(
            complete,
            encode=lambda text: [*text.encode()],
            facts={"model_path": "m"},
            api_key=api_key,
            tokenizer=WireTokenizer(),
        )
        async with contextlib.AsyncExitStack() as stack:
            await gateway.start()
            stack.push_async_callback(gateway.close)
            ip, port = gateway.address
            assert ip == "127.0.0.1"
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{ip}:{port}", **options))
            return [await client.post("/generate", json=body) for body in bodies], (await client.get("/model_info"))

    replies, info = asyncio.run(go())
    return replies, calls, info


def test_it_listens_on_the_port_that_a_flag_gives():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    gateway = Gateway(None, encode=list, facts={}, tokenizer=WireTokenizer(), port=port)
    assert gateway.address == ("127.0.0.1", port)
    asyncio.run(gateway.close())


def test_a_reply_has_tokens_log_probs_and_the_version_of_each_token():
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "sampling_seed": 9}, "return_logprob": True}
    (reply,), calls, info = post(body)
    meta = reply.json()["meta_info"]
    assert reply.json()["text"] == "text 1"
    assert meta["output_token_logprobs"] == [[-0.5, 1, None], [-0.25, 1, None]]
    assert (meta["weight_version"], meta["token_versions"]) == ("7", [6, 7])
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert calls[0][0] == [1, 2]
    assert calls[0][1].sampling_seed == 9
    assert info.json() == {"model_path": "m"}


def test_without_a_key_pages_of_other_sites_are_refused_and_with_one_the_key_decides():
    pages = [
        {"Origin": "http://evil.example", "Content-Type": "text/plain"},
        {"Origin": "null"},
        {"Host": "evil.example:80"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Sec-Fetch-Site": "cross-site"},
    ]
    own = [{}, {"Host": "localhost:80"}, {"Host": "[::1]:80"}, {"Host": "a:1", "Authorization": "Bearer word"}]
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    for headers in pages:
        (reply,), calls, _ = post(body, headers=headers)
        assert (reply.status_code, "web pages" in reply.text, calls) == (403, True, []), headers
    for headers in own:
        (reply,), _, _ = post(body, headers=headers, api_key="word" if "Authorization" in headers else None)
        assert reply.status_code == 200, headers


def test_texts_samples_and_the_default_limit():
    replies, calls, _ = post({"text": "ab"}, {"input_ids": [1], "sampling_params": {"n": 3}})
    assert [ids for ids, _ in calls] == [[97, 98], [1], [1], [1]]
    assert len(replies[1].json()) == 3
    assert {params.max_new_tokens for _, params in calls} == {128}


def test_a_request_decides_whether_its_text_has_special_tokens_and_stops():
    kept = {"skip_special_tokens": False, "no_stop_trim": True}  # what a generate function of slime sends
    _, calls, _ = post({"input_ids": [1]}, {"input_ids": [1], "sampling_params": kept})
    assert [(params.skip_special_tokens, params.no_stop_trim) for _, params in calls] == [(True, False), (False, True)]


def test_an_invalid_request_is_refused_with_the_reason():
    refused = {
        "either input_ids or text": {"text": "a", "input_ids": [1]},
        "list of integers": {"input_ids": ["1"]},
        "temprature": {"text": "a", "sampling_params": {"temprature": 1}},
        "image_data": {"text": "a", "image_data": ["x"]},
        "one at a time": {"text": ["a", "b"]},
        "stream is True": {"text": "a", "stream": True},
    }
    replies, calls, _ = post(*refused.values())
    for problem, reply in zip(refused, replies, strict=True):
        assert (reply.status_code, problem in reply.json()["error"]["message"]) == (400, True), reply.text
    assert calls == []


def test_a_key_is_required_if_the_run_has_one():
    (refused,), _, _ = post({"text": "a"}, api_key="k")
    (accepted,), _, _ = post({"text": "a"}, api_key="k", headers={"Authorization": "Bearer k"})
    assert (refused.status_code, accepted.status_code) == (401, 200)
