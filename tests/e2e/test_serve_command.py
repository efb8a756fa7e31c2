"""`furlong serve` as a process, alone and behind sglang-router."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
from pathlib import Path

import httpx
import pytest

from fakes_engine import tiny_model
from furlong.cli import main as furlong_main
from furlong.core.process_environment import API_KEY_VARIABLE
from furlong.errors import ConfigError
from furlong.inference.server.http_server import main
from furlong.models.tokenizer import build_tokenizer
from runs import finish, start
from served_engine import router_process, serve_process

needs_router = pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen2")[1].save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def test_serve_reports_its_port_answers_and_exits_on_sigterm(folder, tmp_path):
    process = start(["serve", "--model-path", str(folder), "--port", "0", "--served-model-name", "toy"], tmp_path)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at http://127.0.0.1:" in line
        url = line.split(" at ")[1].strip()
        reply = httpx.post(f"{url}/generate", json={"text": "ab", "sampling_params": {"max_new_tokens": 3}}, timeout=20)
        models = httpx.get(f"{url}/v1/models", timeout=20).json()
        process.send_signal(signal.SIGTERM)
    finally:
        code, _, _ = finish(process, timeout_s=20)
    assert reply.status_code == 200
    assert models["data"][0]["id"] == "toy"
    assert code == 0


@needs_router
def test_requests_pass_through_sglang_router(folder):
    with (
        serve_process(folder) as (_, one),
        serve_process(folder) as (_, two),
        router_process([one, two], "--policy", "round_robin") as url,
    ):
        _check_router(url, [one, two])


def _check_router(url: str, workers: list[str]) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}, "return_logprob": True}
    reply = httpx.post(f"{url}/generate", json=body, timeout=20)
    assert reply.status_code == 200
    assert len(reply.json()["meta_info"]["output_token_logprobs"]) == 4
    name = httpx.get(f"{workers[0]}/v1/models", timeout=20).json()["data"][0]["id"]
    chat = {"model": name, "messages": [{"role": "user", "content": "1"}], "max_tokens": 3}
    reply = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=20)
    assert reply.status_code == 200, reply.text
    for _ in range(4):
        assert httpx.post(f"{url}/generate", json=body, timeout=20).status_code == 200
    for worker in workers:
        metrics = httpx.get(f"{worker}/metrics", timeout=20).text
        generated = next(line for line in metrics.splitlines() if line.startswith("sglang:generation_tokens_total"))
        assert float(generated.rsplit(" ", 1)[1]) > 0


def test_invalid_folders_devices_and_numbers_are_errors_before_anything_is_loaded(folder, tmp_path, capsys):
    for words, message in [
        (["--model-path", str(tmp_path / "nope")], "nope"),
        (["--model-path", str(folder), "--port", "99999"], "65535"),
        (["--model-path", str(folder), "--port", "0", "--threads", "0"], "1024"),
        (["--model-path", str(folder), "--port", "0", "--device", "warp"], "--device warp"),
        (["--model-path", str(folder), "--host", "192.0.2.7"], "192.0.2.7"),
    ]:
        with contextlib.suppress(SystemExit):
            assert furlong_main(["serve", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_a_server_that_others_can_reach_needs_a_key(folder, host, monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"--host {host} .*--api-key"):
        main(["--model-path", str(folder), "--host", host])
