"""The embedded engine's server over a real loopback socket."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import threading

import httpx
import pytest
import safetensors.torch
import torch
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from fakes_engine import reference_log_probs, tiny_engine, tiny_model
from furlong.core.addresses import bound_socket
from furlong.core.weights import checksum
from furlong.errors import EngineError
from furlong.inference.server.http_server import running_server
from furlong.models.tokenizer import build_tokenizer
from furlong.sessions.served_model import served_routes

CONFIG, MODEL = tiny_model("qwen2")
OTHER = tiny_model("qwen2", seed=1)[1]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
SLOW = {"max_new_tokens": 180, "ignore_eos": True}


def served(body, *, api_key: str | None = None, **options):
    """Run `body(client, engine)` against a server of a tiny model."""

    async def main():
        engine = tiny_engine(CONFIG, MODEL.state_dict(), tokenizer=build_tokenizer(), **options)
        try:
            async with (
                running_server(engine, model_name="tiny", api_key=api_key, agents=served_routes) as url,
                httpx.AsyncClient(base_url=url, timeout=20) as client,
            ):
                return await body(client, engine)
        finally:
            await engine.close()

    return asyncio.run(main())


async def post(client, path, **body):
    reply = await client.post(path, json=body)
    return reply.status_code, reply.json()


def test_weights_cannot_be_read_or_replaced_by_web_pages():
    async def body(client, engine):
        before = checksum(engine.model.table.view("model.norm.weight"))
        for headers in (
            {"Origin": "http://evil.example"},
            {"Host": "evil.example:30000"},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            for path in ("/update_weights_from_tensor", "/update_weights_from_disk", "/pause_generation", "/generate"):
                reply = await client.post(path, content="{}", headers={"Content-Type": "text/plain", **headers})
                assert reply.status_code == 403, (path, headers)
            assert (await client.get("/get_weights_by_name?name=lm_head.weight", headers=headers)).status_code == 403
            assert (await client.get("/health", headers=headers)).status_code == 200
        assert checksum(engine.model.table.view("model.norm.weight")) == before
        return await client.post("/generate", json={"input_ids": [5], "sampling_params": GREEDY})

    assert served(body).status_code == 200


def test_generate_replies_like_sglang():
    async def body(client, _engine):
        return await post(
            client, "/generate", input_ids=[5, 6, 7], sampling_params=GREEDY, return_logprob=True, rid="r1"
        )

    status, reply = served(body)
    assert status == 200
    meta = reply["meta_info"]
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (3, 6, "0")
    log_probs, tokens, _texts = zip(*meta["output_token_logprobs"], strict=True)
    assert list(tokens) == reply["output_ids"]
    wanted = reference_log_probs(MODEL, [5, 6, 7], reply["output_ids"])
    torch.testing.assert_close(torch.tensor(log_probs), wanted, atol=1e-5, rtol=0)
    assert reply["text"] == build_tokenizer().decode(reply["output_ids"], skip_special_tokens=True)


def test_batches_and_n_return_lists():
    async def body(client, _engine):
        _, ids = await post(client, "/generate", input_ids=[[5, 6], [7]], sampling_params=GREEDY)
        _, texts = await post(client, "/generate", text=["ab", "c"], sampling_params=[GREEDY, GREEDY])
        seeded = {"max_new_tokens": 9, "n": 3, "sampling_seed": 4, "ignore_eos": True}
        _, samples = await post(client, "/generate", text="ab", sampling_params=seeded)
        _, alone = await post(client, "/generate", text="ab", sampling_params={**seeded, "n": 1, "sampling_seed": 5})
        return ids, texts, samples, alone

    ids, texts, samples, alone = served(body)
    assert [len(r["output_ids"]) for r in ids + texts] == [6] * 4
    assert len({tuple(r["output_ids"]) for r in samples}) == 3
    assert alone["output_ids"] == samples[1]["output_ids"]


def test_streaming_ends_with_the_whole_reply():
    async def body(client, _engine):
        request = {"text": "abc", "sampling_params": GREEDY, "stream": True, "return_logprob": True}
        async with client.stream("POST", "/generate", json=request) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = [line[6:] async for line in reply.aiter_lines() if line.startswith("data: ")]
        _, whole = await post(client, "/generate", text="abc", sampling_params=GREEDY)
        return lines, whole

    lines, whole = served(body)
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert len(events) > 2
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(lengths)
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_bad_requests_are_rejected_with_the_reason():
    refused = [
        ({"input_ids": [5] * 300}, "300 tokens.*192"),
        ({"input_ids": [5, 9999]}, "vocabulary"),
        ({}, "input_ids or text"),
        ({"text": "a", "input_ids": [5]}, "input_ids or text"),
        ({"input_ids": "abc"}, "input_ids is 'abc'"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "hot"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "sampling_params": {"top_p": 0}}, "top_p"),
        ({"text": "a", "sampling_params": {"n": 10**6}}, "n is 1000000.*1024"),
        ({"text": "a", "sampling_params": {"n": "x"}}, "n is 'x'"),
    ]

    async def body(client, _engine):
        for request, words in refused:
            for stream in ({}, {"stream": True}):
                status, reply = await post(client, "/generate", **request, **stream)
                assert status == 400
                assert re.search(words, reply["error"]["message"]), reply

    served(body)


def test_a_body_that_is_not_json_and_an_unknown_path_are_json_errors():
    async def body(client, _engine):
        return await client.post("/generate", content=b"{"), await client.get("/nowhere"), await client.get("/generate")

    broken, missing, method = served(body)
    assert (broken.status_code, missing.status_code, method.status_code) == (400, 404, 405)
    assert "/nowhere" in missing.json()["error"]["message"]
    assert "JSON" in broken.json()["error"]["message"]


def test_identity_health_load_and_metrics():
    async def body(client, _engine):
        paths = ("/health", "/health_generate", "/model_info", "/get_model_info", "/server_info", "/weight_version")
        replies = {path: (await client.get(path)).json() for path in (*paths, "/get_load", "/v1/loads", "/v1/models")}
        return replies, (await client.get("/metrics")).text

    replies, metrics = served(body)
    assert replies["/model_info"]["model_type"] == "qwen2"
    assert replies["/server_info"]["context_length"] == 192
    assert replies["/weight_version"] == {"weight_version": "0"}
    assert replies["/get_load"][0]["num_reqs"] == 0
    assert replies["/v1/models"]["data"][0]["id"] == "tiny"
    assert 'sglang:generation_tokens_total{model_name="tiny"} 1' in metrics


def test_the_api_key_guards_everything_but_health():
    async def body(client, _engine):
        without = [(await client.get(path)).status_code for path in ("/health", "/model_info")]
        wrong = await client.get("/model_info", headers={"Authorization": "Bearer no"})
        right = await client.get("/model_info", headers={"Authorization": "Bearer secret"})
        return without, wrong, right

    without, wrong, right = served(body, api_key="secret")
    assert without == [200, 401]
    assert (wrong.status_code, right.status_code) == (401, 200)
    assert "API key" in wrong.json()["error"]["message"]


def test_an_aborted_request_returns_its_tokens():
    async def body(client, engine):
        one = asyncio.create_task(post(client, "/generate", input_ids=[5], sampling_params=SLOW, rid="one"))
        two = asyncio.create_task(post(client, "/generate", input_ids=[6], sampling_params=SLOW, rid="two"))
        while engine.stats().running < 2:
            await asyncio.sleep(0.001)
        await post(client, "/abort_request", rid="one")
        return (await one)[1], (await two)[1]

    one, two = served(body)
    assert one["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(one["output_ids"]) < 180
    assert two["meta_info"]["finish_reason"]["type"] == "length"


def test_a_disconnected_client_frees_its_slot():
    async def body(client, engine):
        await client.post("/pause_generation", json={"mode": "retract"})
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/generate", json={"input_ids": [5], "sampling_params": SLOW}, timeout=0.1)
        for _ in range(400):
            if engine.stats().waiting == 0:
                return True
            await asyncio.sleep(0.005)
        return False

    assert served(body)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.nightly
def test_pause_update_continue_serves_the_new_weights(tmp_path, mode):
    OTHER.save_pretrained(tmp_path)

    async def body(client, engine):
        task = asyncio.create_task(post(client, "/generate", input_ids=[5], sampling_params=SLOW))
        while engine.stats().tokens_generated < 20:
            await asyncio.sleep(0.001)
        await post(client, "/pause_generation", mode=mode)
        refused = await post(client, "/flush_cache")
        update = await post(client, "/update_weights_from_disk", model_path=str(tmp_path), weight_version="step-7")
        await post(client, "/continue_generation")
        return refused, update, await task, (await client.get("/weight_version")).json()

    refused, update, (_, reply), version = served(body)
    assert refused[0] == 400
    assert update[0] == 200
    assert update[1]["success"] is True
    assert version == {"weight_version": "step-7"}
    meta = reply["meta_info"]
    assert meta["num_retractions"] == (1 if mode == "retract" else 0)
    assert len(set(meta["token_versions"])) == 2


def test_a_failed_update_explains_why(tmp_path):
    async def body(client, _engine):
        return [
            await post(client, "/update_weights_from_disk", model_path=str(tmp_path / "none")),
            await post(client, "/update_weights_from_disk", model_path=str(tmp_path)),
            await post(client, "/update_weights_from_tensor", serialized_named_tensors=["gASV"]),
            await post(
                client, "/update_weights_from_tensor", serialized_named_tensors=["!"], load_format="safetensors"
            ),
        ]

    replies = served(body)
    assert [status for status, _ in replies] == [400] * 4
    assert all(reply["success"] is False for _, reply in replies)
    for (_, reply), words in zip(replies, ["model_path", str(tmp_path), "load_format is None", "base64"], strict=True):
        assert words in reply["message"]


def test_tensors_load_in_buckets_and_are_verified():
    state = {name: tensor.contiguous() for name, tensor in OTHER.state_dict().items()}
    names = sorted(state)

    def encoded(part):
        return [base64.b64encode(safetensors.torch.save({name: state[name] for name in part})).decode()]

    async def body(client, _engine):
        send = {"load_format": "safetensors", "weight_version": "3"}
        await post(client, "/pause_generation", mode="abort")
        first = await post(client, "/update_weights_from_tensor", serialized_named_tensors=encoded(names[:5]), **send)
        early = await post(client, "/continue_generation")
        last = await post(client, "/update_weights_from_tensor", serialized_named_tensors=encoded(names[5:]), **send)
        await post(client, "/continue_generation")
        _, sums = await post(client, "/weights_checker", action="checksum")
        _, row = await post(client, "/get_weights_by_name", name="model.norm.weight", truncate_size=4)
        _, reply = await post(client, "/generate", input_ids=[5], sampling_params=GREEDY, return_logprob=True)
        return first, early, last, sums, row, reply

    first, early, last, sums, row, reply = served(body)
    assert first[1]["success"] is True
    assert early[0] == 500
    assert "lacks" in early[1]["error"]["message"]
    assert "is complete" in last[1]["message"]
    assert sums["payload"][0]["checksums"] == {name: checksum(state[name]) for name in names}
    assert row == pytest.approx(state["model.norm.weight"][:4].tolist())
    assert reply["meta_info"]["weight_version"] == "3"
    wanted = reference_log_probs(OTHER, [5], reply["output_ids"])
    got = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    torch.testing.assert_close(torch.tensor(got), wanted, atol=1e-5, rtol=0)


def test_a_version_can_be_sent_again_from_its_first_bucket():
    state = {name: tensor.contiguous() for name, tensor in OTHER.state_dict().items()}
    names = sorted(state)

    def tensors(part):
        data = safetensors.torch.save({name: state[name] for name in part})
        return {"load_format": "safetensors", "serialized_named_tensors": [base64.b64encode(data).decode()]}

    async def body(client, _engine):
        parts = [names[:3], names[3:6], names[:3], names[3:6], names[6:]]
        replies = [
            await post(client, "/update_weights_from_tensor", weight_version="3", **tensors(part)) for part in parts
        ]
        return replies, await post(client, "/weights_checker", action="checksum")

    replies, (_, sums) = served(body)
    assert [status for status, _ in replies] == [200] * 5
    assert ["is complete" in reply["message"] for _, reply in replies] == [False] * 4 + [True]
    assert sums["payload"][0]["checksums"] == {name: checksum(state[name]) for name in names}


def test_weights_arrive_by_broadcast():
    state = {name: tensor.contiguous() for name, tensor in OTHER.state_dict().items()}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    errors: list[Exception] = []

    def trainer():
        """Rank 0, joined the way trainers join SGLang's group."""
        try:
            store, rank, world = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2))
            store = distributed_c10d.PrefixStore("wu", store)
            # Both ends are in this process: c10d wants distinct names here, so the prefix that it derives is bypassed.
            group = distributed_c10d.ProcessGroupGloo(
                distributed_c10d.PrefixStore("cpu/", distributed_c10d.PrefixStore("wu/", store)), rank, world
            )
            for tensor in state.values():
                group.broadcast([tensor.clone()], distributed_c10d.BroadcastOptions()).wait()
        except Exception as error:  # noqa: BLE001  asserted on below
            errors.append(error)

    async def body(client, _engine):
        thread = threading.Thread(target=trainer)
        thread.start()
        joined = await post(
            client,
            "/init_weights_update_group",
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=2,
            group_name="wu",
            backend="gloo",
        )
        update = await post(
            client,
            "/update_weights_from_distributed",
            names=list(state),
            dtypes=[str(t.dtype) for t in state.values()],
            shapes=[list(t.shape) for t in state.values()],
            group_name="wu",
            weight_version="5",
        )
        thread.join()
        left = await post(client, "/destroy_weights_update_group", group_name="wu")
        _, sums = await post(client, "/weights_checker")
        return joined, update, left, sums

    joined, update, left, sums = served(body)
    assert not errors
    assert [joined[0], update[0], left[0]] == [200] * 3, (joined, update, left)
    assert sums["payload"][0]["checksums"] == {name: checksum(tensor) for name, tensor in state.items()}


def test_weight_update_groups_reject_invalid_requests():
    async def body(client, _engine):
        return [
            await post(client, "/init_weights_update_group", master_address="127.0.0.1"),
            await post(client, "/update_weights_from_distributed", names=[], dtypes=[], shapes=[], group_name="none"),
            await post(client, "/destroy_weights_update_group", group_name="none"),
        ]

    replies = served(body)
    assert [status for status, _ in replies] == [400] * 3
    assert "master_port" in replies[0][1]["message"]
    assert "none" in replies[1][1]["message"]


def test_chat_and_text_completions():
    async def body(client, _engine):
        chat = {"messages": [{"role": "user", "content": "1+1"}], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        _, chatted = await post(client, "/v1/chat/completions", model="tiny", logprobs=True, **chat)
        _, text = await post(client, "/v1/completions", model="tiny", prompt=["ab", "c"], max_tokens=4, n=2, seed=1)
        async with client.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as reply:
            lines = [line[6:] async for line in reply.aiter_lines() if line.startswith("data: ")]
        return chatted, text, lines

    chatted, text, lines = served(body)
    choice = chatted["choices"][0]
    assert chatted["usage"]["completion_tokens"] == len(choice["logprobs"]["content"]) == 5
    assert len(text["choices"]) == 4
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1]]
    assert "".join(deltas) == choice["message"]["content"]


def test_control_requests_of_another_form_are_refused():
    async def body(client, _engine):
        odd = {"/pause_generation": {"mode": ["x"]}, "/release_memory_occupation": {"tags": 5}}
        odd["/get_weights_by_name"] = {"name": "lm_head.weight", "truncate_size": "x"}
        return [await post(client, path, **request) for path, request in odd.items()]

    assert [status for status, _ in served(body)] == [400] * 3


def test_an_unexpected_error_is_a_json_reply_and_logged(monkeypatch, caplog):
    async def body(client, _engine):
        reply = await client.get("/server_info")
        return reply.status_code, reply.json()["error"]["message"]

    monkeypatch.setattr("furlong.inference.embedded.engine.EmbeddedEngine.stats", lambda _: {}["running"])
    status, message = served(body)
    assert status == 500
    assert "KeyError: 'running'" in message
    assert "GET /server_info" in caplog.text


def test_a_port_in_use_is_an_error_that_names_it():
    listener = bound_socket("127.0.0.1", 0)
    listener.listen()
    port = listener.getsockname()[1]
    try:
        with pytest.raises(EngineError, match=str(port)):
            bound_socket("127.0.0.1", port)
    finally:
        listener.close()
