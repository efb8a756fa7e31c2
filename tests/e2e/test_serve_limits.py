"""Limits of `furlong serve` over a real socket: refusals change nothing, and `/health` answers throughout."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest
import safetensors.torch
import torch

from fakes_engine import tiny_model
from furlong.inference.server.app import escaped_label
from furlong.inference.server.web import ServerLimits
from runs import write_model
from served_engine import serve_process, served_tiny

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
STATE = tiny_model("qwen2", seed=1)[1].state_dict()


def post(url, path, timeout=20, **body):
    return httpx.post(url + path, json=body, timeout=timeout)


def message(reply):
    content = reply.json()
    return content["error"]["message"] if "error" in content else content["message"]


def connect(url):
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port), timeout=10)


def head(path="/generate", **headers):
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        *(f"{name.replace('_', '-')}: {v}" for name, v in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def encoded(*names, **tensors):
    data = {name: STATE[name].contiguous() for name in names} | tensors
    part = base64.b64encode(safetensors.torch.save(data)).decode()
    return {"load_format": "safetensors", "serialized_named_tensors": [part]}


def test_a_large_body_is_refused_before_it_arrives():
    with served_tiny(limits=ServerLimits(max_body_bytes=1000)) as (url, _, _):
        with connect(url) as declared:
            declared.sendall(head(Content_Length=10**12) + b"{")
            assert b" 413 " in declared.recv(100)
        with connect(url) as chunked:
            chunked.sendall(head(Transfer_Encoding="chunked") + b"400\r\n" + b" " * 1024 + b"\r\n")
            answer = b""
            while b"--max-body-bytes" not in answer:
                part = chunked.recv(1000)
                assert part, answer
                answer += part
        assert b" 413 " in answer
        assert post(url, "/generate", text="a", sampling_params=GREEDY).status_code == 200


def test_concurrency_is_limited_while_health_answers():
    limits = ServerLimits(max_concurrent_requests=2)
    with served_tiny(limits=limits) as (url, engine, _), ThreadPoolExecutor() as pool:
        post(url, "/pause_generation", mode="retract")
        for _ in range(2):
            pool.submit(post, url, "/generate", text="a", sampling_params=GREEDY)
        while engine.stats().waiting < 2:
            time.sleep(0.002)
        refused = post(url, "/continue_generation")
        assert httpx.get(f"{url}/health").status_code == 200
        assert refused.status_code == 429
        assert "--max-concurrent-requests" in message(refused)


def test_samples_and_connections_are_limited():
    with served_tiny(limits=ServerLimits(max_total_samples=3, max_connections=6)) as (url, engine, _):
        many = post(url, "/generate", text=["a", "b"], sampling_params={"n": 4})
        assert many.status_code == 400
        assert "--max-total-samples" in message(many)
        post(url, "/pause_generation", mode="retract")
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(post, url, "/v1/completions", prompt=["a", "b"], max_tokens=2)
            while engine.stats().waiting < 2:
                time.sleep(0.002)
            queued = post(url, "/v1/completions", prompt=["a", "b"], max_tokens=2)
            assert queued.status_code == 429
            chat = post(url, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], n=2, max_tokens=2)
            assert chat.status_code == 429
            post(url, "/continue_generation")
            assert waiting.result().status_code == 200
        with contextlib.ExitStack() as stack:
            for _ in range(6):
                stack.enter_context(connect(url))
            assert httpx.get(f"{url}/model_info").status_code == 503


@pytest.mark.nightly
def test_a_request_that_takes_too_long_ends_with_the_flag():
    with served_tiny(limits=ServerLimits(request_timeout=1)) as (url, _, _):
        post(url, "/pause_generation", mode="retract")
        plain = post(url, "/generate", text="a", sampling_params=GREEDY)
        stream = post(url, "/generate", text="a", sampling_params=GREEDY, stream=True)
    assert plain.status_code == 504
    assert "--request-timeout" in message(plain)
    assert "--request-timeout" in stream.text
    assert stream.text.endswith("data: [DONE]\n\n")


def test_a_refused_bucket_changes_nothing(tmp_path):
    wrong = {"model.norm.weight": torch.zeros(3)}
    safetensors.torch.save_file(wrong, tmp_path / "model.safetensors")
    with served_tiny() as (url, _, _):
        before = post(url, "/weights_checker").json()["payload"]
        empty = encoded()
        replies = [
            post(url, "/update_weights_from_tensor", **empty),
            post(url, "/update_weights_from_tensor", load_format="safetensors", serialized_named_tensors=[]),
            post(url, "/update_weights_from_tensor", **encoded(**wrong)),
            post(url, "/update_weights_from_tensor", **encoded("model.norm.weight", unknown=torch.zeros(3))),
            post(url, "/update_weights_from_disk", model_path=str(tmp_path)),
        ]
        assert [reply.status_code for reply in replies] == [400] * len(replies)
        assert post(url, "/generate", text="a", sampling_params=GREEDY).status_code == 200
        assert post(url, "/weights_checker").json()["payload"] == before


@pytest.mark.nightly
def test_groups_that_nobody_joins_block_nothing(tmp_path):
    tiny_model("qwen2", seed=1)[1].save_pretrained(tmp_path)
    with socket.socket() as free, served_tiny() as (url, _, _), ThreadPoolExecutor(16) as pool:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        joins = [
            pool.submit(post, url, "/init_weights_update_group", group_name=f"g{i}", backend="gloo", **group)
            for i in range(12)
        ]
        loaded = post(url, "/update_weights_from_disk", model_path=str(tmp_path), weight_version="3", timeout=10)
        assert loaded.status_code == 200
        for i in range(12):
            deadline = time.monotonic() + 10
            while post(url, "/destroy_weights_update_group", group_name=f"g{i}").status_code != 200:
                assert time.monotonic() < deadline
        replies = [join.result(10) for join in joins]
        assert [reply.status_code for reply in replies] == [400] * 12
        assert "destroyed" in message(replies[0])
        assert post(url, "/generate", text="a", sampling_params=GREEDY).status_code == 200


def test_the_events_of_an_incremental_stream_add_up_to_the_answer():
    with served_tiny() as (url, _, _):
        params = {"temperature": 0, "max_new_tokens": 80, "ignore_eos": True}
        request = {"text": "abc", "return_logprob": True, "sampling_params": params}
        whole = post(url, "/generate", **request).json()
        lines = post(url, "/generate", stream=True, incremental_streaming_output=True, **request).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [token for event in events for token in event["output_ids"]] == whole["output_ids"]
    assert "".join(event["text"] for event in events) == whole["text"]
    rows = [row for event in events for row in event["meta_info"]["output_token_logprobs"]]
    assert rows == whole["meta_info"]["output_token_logprobs"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_long_texts_and_large_requests_are_answered():
    bodies = [
        ("/generate", {"text": "a" * 8_000_000}),
        ("/generate", {"input_ids": [[5] * 100] * 20_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 100_000}),
        ("/generate", {"text": "a", "sampling_params": {"x" * 1_000_000: 1}}),
        ("/update_weights_from_tensor", {"load_format": "safetensors", "serialized_named_tensors": ["A" * 20_000_000]}),
    ]
    with served_tiny(limits=ServerLimits(max_total_samples=1000)) as (url, _, _):
        for path, body in bodies:
            reply = post(url, path, timeout=60, **body)
            assert reply.status_code in (200, 400), (path, reply.text[:300])
            assert len(reply.content) < 2000


def test_a_model_name_is_escaped_in_metrics():
    assert escaped_label('a"b\\c\nd') == 'a\\"b\\\\c\\nd'


@pytest.mark.nightly
def test_sigterm_ends_the_server_within_5_s_whatever_is_running(tmp_path):
    folder = write_model(tmp_path / "tiny")
    with (
        serve_process(folder, "--context-length", "128") as (process, url),
        socket.socket() as nobody,
        ThreadPoolExecutor(16) as pool,
    ):
        nobody.bind(("127.0.0.1", 0))
        nobody.listen(16)
        group = {"master_address": "127.0.0.1", "master_port": nobody.getsockname()[1]}
        for i in range(6):
            body = {"group_name": f"g{i}", "rank_offset": 1, "world_size": 2, "backend": "gloo", **group}
            pool.submit(post, url, "/init_weights_update_group", 30, **body)
        post(url, "/update_weights_from_tensor", **_one_tensor(folder))  # the version stays incomplete
        pool.submit(post, url, "/generate", 30, text="a")
        slow = [connect(url) for _ in range(20)]
        for i, client in enumerate(slow):
            client.sendall(head(Content_Length=1000) + b"{" if i % 2 else b"POST /gen")
        time.sleep(0.5)
        began = time.monotonic()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        process.join(20)
        took = time.monotonic() - began
        assert process.exitcode == 0
        assert took < 6.0
        for client in slow:
            client.close()


def _one_tensor(folder):
    with safetensors.safe_open(next(folder.glob("*.safetensors")), "pt") as file:
        name = next(iter(file.keys()))
        data = safetensors.torch.save({name: file.get_tensor(name)})
    return {"load_format": "safetensors", "serialized_named_tensors": [base64.b64encode(data).decode()]}
