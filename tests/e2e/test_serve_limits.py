"""Limits of `furlong serve` over a real socket: refusals change nothing, and `/health` answers throughout."""

from __future__ import annotations

import asyncio
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
from furlong.inference.server.bodies import json_reply
from furlong.inference.server.limits import SPARE_CONNECTIONS, Counts, RefusedError, RequestGuard, ServerLimits
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
    lines = [f"POST {path} HTTP/1.1", "Host: x", *(f"{name.replace('_', '-')}: {v}" for name, v in headers.items())]
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


def test_a_client_that_disconnects_in_a_body_is_one_debug_line():
    with served_tiny() as (url, _, log):
        with connect(url) as client:
            client.sendall(head(Content_Length=1000) + b'{"text"')
        deadline = time.monotonic() + 10
        while not (lines := [line for line in log.lines if "disconnected" in line]) and time.monotonic() < deadline:
            time.sleep(0.005)
    assert [line.split()[0] for line in lines] == ["DEBUG"]


def test_slow_headers_and_bodies_end():
    with (
        served_tiny(limits=ServerLimits(header_timeout=1, body_timeout=1)) as (url, _, _),
        connect(url) as silent,
        connect(url) as partial,
        connect(url) as body,
    ):
        partial.sendall(b"POST /generate HT")
        body.sendall(head(Content_Length=100) + b"{")
        assert b" 408 " in body.recv(100)
        for client in (silent, partial):
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""


def test_concurrency_is_limited_while_control_and_health_answer():
    with served_tiny(limits=ServerLimits(max_requests_per_client=2)) as (url, engine, _), ThreadPoolExecutor() as pool:
        post(url, "/pause_generation", mode="retract")
        waiting = [pool.submit(post, url, "/generate", text="a", sampling_params=GREEDY) for _ in range(2)]
        while engine.stats().waiting < 2:
            time.sleep(0.002)
        refused = post(url, "/generate", text="a", sampling_params=GREEDY)
        assert httpx.get(f"{url}/health").status_code == 200
        post(url, "/continue_generation")
        assert [task.result().status_code for task in waiting] == [200, 200]
        assert refused.status_code == 429
        assert "--max-requests-per-client" in message(refused)
        assert post(url, "/generate", text="a", sampling_params=GREEDY).status_code == 200


def test_samples_are_limited_by_request_and_in_all():
    limits = ServerLimits(max_samples_per_request=6, max_total_samples=3)
    with served_tiny(limits=limits) as (url, _, _):
        many = post(url, "/generate", text=["a", "b"], sampling_params={"n": 4})
        queued = post(url, "/v1/completions", prompt=["a", "b"], n=2, max_tokens=2)
        assert (many.status_code, queued.status_code) == (400, 429)
        assert "--max-samples-per-request" in message(many)
        assert "--max-total-samples" in message(queued)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_replies_that_are_not_read_are_limited_in_bytes(path):
    bodies = {
        "/generate": {"text": "a", "sampling_params": {**GREEDY, "max_new_tokens": 50}, "return_logprob": True},
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    }
    of_openai = {"max_tokens": 50, "logprobs": True, "ignore_eos": True}
    body = bodies[path] | (of_openai if "v1" in path else {})
    with served_tiny(limits=ServerLimits(max_total_reply_bytes=800)) as (url, _, _):
        large = post(url, path, **body)
        assert large.status_code == 413
        assert "--max-total-reply-bytes" in message(large)
        if path == "/generate":
            assert post(url, path, text="a", sampling_params=GREEDY).status_code == 200


def test_a_large_reply_is_handed_over_as_fast_as_it_is_read():
    async def unread_bytes():
        counts = Counts(ServerLimits(max_total_reply_bytes=500_000))
        first, second = (RequestGuard(counts, "a", "/generate") for _ in range(2))
        rows = [{"i": i, "text": "a" * 10_000} for i in range(40)]
        reply = await json_reply(first, rows, dict, size=1, before=b"[", after=b"]")
        sent, is_read = [], asyncio.Event()

        async def send(event):
            sent.append(event.get("body", b""))
            if len(sent) == 3:
                await is_read.wait()

        sending = asyncio.create_task(reply({}, None, send))
        await asyncio.sleep(0)
        assert 64_000 < sum(map(len, sent)) < 160_000
        with pytest.raises(RefusedError, match="not read yet"):
            await json_reply(second, rows, dict, size=1)
        is_read.set()
        await sending
        first.close()
        await json_reply(second, rows, dict, size=1)
        return json.loads(b"".join(sent)), int(reply.headers["content-length"]), len(b"".join(sent))

    values, declared, size = asyncio.run(unread_bytes())
    assert [value["i"] for value in values] == [*range(40)]
    assert declared == size


def test_connections_beyond_the_limit_may_ask_for_health_only():
    with served_tiny(limits=ServerLimits(max_connections=4)) as (url, _, log), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(url)) for _ in range(4)]
        assert httpx.get(f"{url}/health").status_code == 200
        refused = post(url, "/generate", text="a", sampling_params=GREEDY)
        assert refused.status_code == 503
        assert "--max-connections" in message(refused)
        for _ in range(SPARE_CONNECTIONS + 1):
            stack.enter_context(connect(url))
        assert httpx.get(f"{url}/health").status_code == 200
        assert "closed a connection: " in " ".join(log.lines)
        for client in idle:
            client.close()
        while (reply := post(url, "/generate", text="a", sampling_params=GREEDY)).status_code == 503:
            time.sleep(0.01)
        assert reply.status_code == 200


def test_a_burst_of_chunks_pipelined_requests_and_disconnects_is_answered_in_order():
    body = json.dumps({"text": "a", "sampling_params": GREEDY}).encode()
    chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in body + b" " * 4_000) + b"0\r\n\r\n"
    with served_tiny() as (url, engine, _), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(url)) for _ in range(30)]
        for i, client in enumerate(clients):
            client.sendall(head(Transfer_Encoding="chunked") + chunked + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            if i % 3 == 0:
                client.close()
        for i, client in enumerate(clients):
            if i % 3:
                received = b""
                while received.count(b"HTTP/1.1 200") < 2 or not received.endswith(b'{"status":"ok"}'):
                    part = client.recv(1 << 16)
                    assert part
                    received += part
                assert received.index(b"output_ids") < received.index(b'"status"')
        while engine.stats().running + engine.stats().waiting:
            time.sleep(0.01)


def test_bytes_that_are_not_http_are_debug_lines():
    with served_tiny() as (url, _, log):
        for data in (b"\0\0\r\n\r\n", b"\x16\x03\x01\r\n\r\n"):
            with connect(url) as client:
                client.sendall(data)
                assert client.recv(100).startswith(b"HTTP/1.1 400")
        with connect(url) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert sum("Invalid HTTP" in line for line in log.lines) == 2
        assert [line for line in log.lines if line.startswith(("WARNING", "ERROR"))] == []


@pytest.mark.slow
def test_an_answer_that_is_read_too_slowly_ends():
    limits = ServerLimits(request_timeout=5, write_timeout=2, max_stream_bytes=1 << 30)
    with served_tiny(limits=limits) as (url, engine, log), connect(url) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        params = {**GREEDY, "max_new_tokens": 100, "n": 400}
        body = json.dumps({"text": "a", "stream": True, "return_logprob": True, "sampling_params": params})
        client.sendall(head(Content_Length=len(body)) + body.encode())
        deadline = time.monotonic() + 90
        while not any("did not read its answer" in line for line in log.lines):
            assert time.monotonic() < deadline
            with contextlib.suppress(ConnectionResetError):
                client.recv(10_000)
            time.sleep(0.05)
        while engine.stats().running:
            assert time.monotonic() < deadline


def test_a_request_that_takes_too_long_ends_with_the_flag():
    with served_tiny(limits=ServerLimits(request_timeout=1)) as (url, _, _):
        post(url, "/pause_generation", mode="retract")
        plain = post(url, "/generate", text="a", sampling_params=GREEDY)
        stream = post(url, "/generate", text="a", sampling_params=GREEDY, stream=True)
    assert plain.status_code == 504
    assert "--request-timeout" in message(plain)
    assert "--request-timeout" in stream.text
    assert stream.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-300},
        {"temperature": 1e300, "min_new_tokens": 1},
        {"stop_token_ids": [2**63]},
        {"stop_token_ids": [-1]},
        {"top_k": 2**63},
        {"max_new_tokens": 2**64 - 1, "min_new_tokens": 2**64 - 1},
        {"stop_token_ids": list(range(300_000))},
        {"stop": ["x"] * 10_000},
    ],
)
def test_no_parameter_of_one_request_fails_another(params):
    with served_tiny() as (url, _, _), ThreadPoolExecutor() as pool:
        other = pool.submit(post, url, "/generate", text="a", sampling_params={**GREEDY, "max_new_tokens": 150})
        assert post(url, "/generate", text="a", sampling_params=params).status_code == 400
        assert other.result().status_code == 200


@pytest.mark.parametrize("label", ["", "a\nb", "-1", 5.5, 2**63, 10**30, [], True])
def test_a_refused_weight_version_changes_nothing(label, tmp_path):
    tiny_model("qwen2", seed=1)[1].save_pretrained(tmp_path)
    with served_tiny() as (url, _, _):
        replies = [
            post(url, "/update_weights_from_disk", model_path=str(tmp_path), weight_version=label),
            post(url, "/update_weights_from_tensor", weight_version=label, **encoded(*STATE)),
            post(url, "/update_weight_version", new_version=label),
        ]
        assert [reply.status_code for reply in replies] == [400] * 3
        reply = post(url, "/generate", text="a", sampling_params=GREEDY)
        assert (reply.status_code, reply.json()["meta_info"]["weight_version"]) == (200, "0")


def test_the_largest_weight_version_generates_and_the_next_one_follows():
    with served_tiny() as (url, _, _):
        for label in (str(2**63 - 1), "after", 7):
            assert post(url, "/update_weight_version", new_version=label).status_code == 200
            reply = post(url, "/generate", text="a", sampling_params=GREEDY)
            assert reply.status_code == 200
            assert reply.json()["meta_info"]["weight_version"] == str(label)


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


def test_a_cumulative_stream_is_bounded_and_an_incremental_one_is_not():
    with served_tiny(limits=ServerLimits(max_stream_bytes=20_000)) as (url, _, _):
        request = {
            "text": "abc",
            "stream": True,
            "return_logprob": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 80, "ignore_eos": True},
        }
        whole = post(url, "/generate", **{**request, "stream": False}).json()
        bounded = post(url, "/generate", **request).text
        lines = post(url, "/generate", incremental_streaming_output=True, **request).text.split("\n\n")
    assert len(bounded) < 21_000
    assert "incremental_streaming_output" in bounded
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [token for event in events for token in event["output_ids"]] == whole["output_ids"]
    assert "".join(event["text"] for event in events) == whole["text"]
    rows = [row for event in events for row in event["meta_info"]["output_token_logprobs"]]
    assert rows == whole["meta_info"]["output_token_logprobs"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_an_incremental_stream_with_stop_strings_adds_up_to_the_text():
    with served_tiny() as (url, _, _):
        params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
        text = post(url, "/generate", text="abc", sampling_params=params).json()["text"]
        params["stop"] = [text[20:23]]
        request = {"text": "abc", "sampling_params": params}
        whole = post(url, "/generate", **request).json()
        lines = post(url, "/generate", stream=True, incremental_streaming_output=True, **request).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(event["text"] for event in events) == whole["text"]


def test_long_texts_and_large_requests_leave_health_answering():
    bodies = [
        ("/generate", {"text": "a" * 8_000_000}),
        ("/generate", {"text": "a" * 30_000_000}),
        ("/generate", {"input_ids": [[5] * 100] * 20_000}),
        ("/generate", {"text": ["ab"] * 40, "sampling_params": {"n": 100, "max_new_tokens": 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 100_000}),
        ("/generate", {"text": "a", "sampling_params": {"x" * 1_000_000: 1}}),
        ("/update_weights_from_tensor", {"load_format": "safetensors", "serialized_named_tensors": ["A" * 20_000_000]}),
    ]
    with served_tiny() as (url, _, _), ThreadPoolExecutor() as pool, httpx.Client(base_url=url, timeout=5) as client:
        for path, body in bodies:
            task = pool.submit(post, url, path, timeout=60, **body)
            while not task.done():
                assert client.get("/health").status_code == 200
            reply = task.result()
            assert reply.status_code in (200, 400), (path, reply.text[:300])
            if reply.status_code == 400:
                assert len(reply.content) < 2000


def test_a_model_name_is_escaped_in_metrics():
    assert escaped_label('a"b\\c\nd') == 'a\\"b\\\\c\\nd'


@pytest.mark.slow
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
