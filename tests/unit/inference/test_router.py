"""The real sglang-router in front of prefill and decode engines."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.inference.supervisor.process import LocalHost
from furlong.inference.supervisor.replica import SglangRouter

pytest.importorskip("sglang_router", reason="sglang-router is not installed")


class Worker(http.server.ThreadingHTTPServer):
    """A fake engine that records its requests."""

    def __init__(self, role: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.role, self.asked, self.keys = role, list[dict[str, Any]](), set[str | None]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def client(self) -> SglangServer:
        server = SglangServer(f"http://127.0.0.1:{self.server_port}", ServerInfo.read({}), api_key="key of engines")
        server.role = self.role
        return server


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.add(self.headers["Authorization"])
        self.answer({"text": self.server.role, "meta_info": {}})

    def answer(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    found = [Worker("prefill"), Worker("decode")]
    yield found
    for worker in found:
        worker.shutdown()
        worker.server_close()


def test_a_request_goes_to_one_prefill_and_one_decode_engine(workers, tmp_path):
    async def body() -> Any:
        router = SglangRouter(
            LocalHost(), "cache_aware", tmp_path / "router.log", concurrency=4, timeout_s=30, is_split=True,
            control_key="key of engines",
        )  # fmt: skip
        client = await router.start()
        servers = [worker.client for worker in workers]
        servers[0].bootstrap_port = 18_998
        try:
            for server in servers:
                await router.add(server)
            return await client.ask("/generate", {"input_ids": [1, 2, 3], "sampling_params": {}}, timeout_s=30)
        finally:
            await router.close()
            for server in servers:
                await server.close()

    assert asyncio.run(body())["text"] == "decode"
    prefill, decode = (worker.asked for worker in workers)
    assert len(prefill) == len(decode) == 1
    assert prefill[0]["bootstrap_port"] == decode[0]["bootstrap_port"] == 18_998
    assert prefill[0]["bootstrap_room"] == decode[0]["bootstrap_room"]
    assert prefill[0]["input_ids"] == decode[0]["input_ids"] == [1, 2, 3]
    assert workers[0].keys == workers[1].keys == {"Bearer key of engines"}


def test_clients_of_a_router_without_a_key_need_none_and_cannot_reach_weights_or_engines(workers, tmp_path):
    async def body() -> list[int]:
        key = "key of engines"
        router = SglangRouter(LocalHost(), "cache_aware", tmp_path / "router.log", concurrency=4, control_key=key)
        client = await router.start()
        try:
            await router.add(workers[0].client)
            limits = httpx.Limits(max_keepalive_connections=0)  # the router may close one after a refusal
            async with httpx.AsyncClient(base_url=client.url, trust_env=False, limits=limits) as stranger:
                paths = ("/generate", "/update_weights_from_disk", "/pause_generation", "/get_weights_by_name")
                codes = [(await stranger.post(path, json={"input_ids": [1]})).status_code for path in paths]
                listed = (await client.ask_object("/workers"))["workers"][0]["id"]
                foreign = {"url": "http://127.0.0.1:9", "worker_type": "regular"}
                codes.append((await stranger.post("/workers", json=foreign)).status_code)
                codes.append((await stranger.delete(f"/workers/{listed}")).status_code)
                return [*codes, (await stranger.post("/flush_cache")).status_code]
        finally:
            await router.close()

    workers[0].role = "regular"
    assert asyncio.run(body()) == [200, 404, 404, 404, 401, 401, 401]
    assert workers[0].keys == {"Bearer key of engines"}


def test_the_router_requires_the_key_which_no_command_shows(workers, tmp_path, caplog):
    async def body() -> list[int]:
        router = SglangRouter(LocalHost(), "round_robin", tmp_path / "router.log", concurrency=4, api_key="hidden-word")
        client = await router.start()
        try:
            await router.add(workers[0].client)
            await client.ask("/generate", {"input_ids": [1, 2, 3], "sampling_params": {}}, timeout_s=30)
            async with httpx.AsyncClient(base_url=client.url, trust_env=False) as stranger:
                asked = [await stranger.get("/workers"), await stranger.post("/generate", json={"input_ids": [1]})]
                return [answer.status_code for answer in asked]
        finally:
            await router.close()

    workers[0].role = "regular"
    caplog.set_level("INFO")
    assert asyncio.run(body()) == [401, 401]
    assert len(workers[0].asked) == 1
    assert "sglang_router.launch_router" in caplog.text
    assert "hidden-word" not in caplog.text + (tmp_path / "router.log").read_text()
