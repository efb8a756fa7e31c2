"""Commands of both kinds of servers, and errors of servers that fail to start."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from furlong.config.command_line import parse
from furlong.config.passthrough import OptionList
from furlong.core.process_environment import API_KEY_VARIABLE
from furlong.errors import ENGINE_KILLED, ConfigError, EngineError
from furlong.inference.supervisor.launch import (
    Ports,
    ServeLaunch,
    SglangLaunch,
    build_launches,
)
from furlong.inference.supervisor.process import (
    HostGpus,
    LocalHost,
    ServerProcess,
    tail,
)
from furlong.inference.supervisor.replica import start_server

MODEL = Path("model")
PORTS = Ports(http=16000, nccl=16001, rendezvous=16002)
HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *words): pass
print("ready", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


LOGGED_SETTINGS = """
import argparse, logging, os, psutil, sys
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key"), parser.add_argument("--model-path")
    given, _ = parser.parse_known_args(sys.argv[1:])
    shown = [*psutil.Process().cmdline(), *os.environ.values()]
    if given.api_key == "-'hidden-word" and not any("hidden-word" in word for word in shown):
        print("the key is right, and is nowhere else", flush=True)
    logging.basicConfig(level="INFO", format="%(message)s", force=True)
    logging.info(f"Settings(model_path={given.model_path!r})")
"""


@dataclass(frozen=True)
class Script:
    """A launch whose servers run a Python program with their port as argument."""

    program: str
    api_key: str | None = None
    needs_rendezvous: bool = False
    role: str = "regular"

    def command(self, index: int, node: int, places: Sequence[HostGpus], ports: Ports) -> list[str]:
        return [sys.executable, "-E", "-c", self.program, str(ports.http)]

    def environment(self, gpus: HostGpus) -> Mapping[str, str]:
        return {}


class FarHost(LocalHost):
    """A fake remote machine that records started commands."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self.started: list[list[str]] = []

    async def start(self, command, **options):
        self.started.append(list(command))
        return await super().start([sys.executable, "-S", "-c", "pass"], **options)


def options_of(command: Sequence[str]) -> dict[str, str | bool]:
    """The options of a command line, switches as True."""
    found: dict[str, str | bool] = {}
    for word, following in zip(command, [*command[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = True if following.startswith("--") else following
    return found


def test_sglang_is_started_with_its_gpus_seed_and_ports():
    launch = SglangLaunch(MODEL, num_gpus=4, seed=10, has_text=False, context_len=4096, options={"pp_size": 2})
    command = launch.command(3, 0, [HostGpus(LocalHost(), first_gpu=12, num_gpus=4)], PORTS)
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert options_of(command[3:]) == {
        "--model-path": "model",
        "--host": "127.0.0.1",
        "--port": "16000",
        "--nccl-port": "16001",
        "--tp-size": "2",
        "--pp-size": "2",
        "--base-gpu-id": "12",
        "--random-seed": "13",
        "--skip-tokenizer-init": True,
        "--context-length": "4096",
        "--dist-init-addr": "127.0.0.1:16002",
    }


def test_prefill_engines_have_a_bootstrap_port_for_decode_engines(tmp_path):
    path = tmp_path / "engines.yaml"
    path.write_text(
        "sglang:\n  - name: default\n    server_groups:\n"
        "      - {worker_type: prefill, num_gpus: 2, overrides: {max-running-requests: 64}}\n"
        "      - {worker_type: decode, num_gpus: 4, num_gpus_per_engine: 4}\n"
    )
    config = parse(["--engine", "sglang", "--sglang-config", str(path), "--sglang-log-level", "error"]).config
    launches = build_launches(config, model_dir=MODEL, dtype="bfloat16", device="cuda", num_threads=1)
    ports = Ports(16000, 16001, 16002, bootstrap=16009)
    prefill, decode = (options_of(launches[i].command(i, 0, [HostGpus(LocalHost())], ports)[3:]) for i in (1, 2))
    assert (launches[1].role, launches[2].role) == ("prefill", "decode")
    assert prefill["--disaggregation-mode"] == "prefill"
    assert prefill["--disaggregation-bootstrap-port"] == "16009"
    assert (prefill["--max-running-requests"], prefill["--tp-size"], prefill["--random-seed"]) == ("64", "1", "1235")
    assert (decode["--disaggregation-mode"], decode["--tp-size"]) == ("decode", "4")
    assert "--max-running-requests" not in decode
    for index, host in ((0, LocalHost()), (1, FarHost("10.0.0.2"))):  # where they listen for each other's caches
        assert launches[index].environment(HostGpus(host))["SGLANG_HOST_IP"] == host.address
    known = OptionList.of("sglang").options
    for option in {**prefill, **decode}:
        assert option.removeprefix("--") in known, option


def test_sglang_loads_its_tokenizer_and_can_release_its_memory():
    launch = SglangLaunch(MODEL, num_gpus=1, has_text=True, is_colocated=True, options={"disable_cuda_graph": True})
    options = options_of(launch.command(0, 0, [HostGpus(LocalHost())], PORTS))
    assert "--skip-tokenizer-init" not in options
    assert options["--enable-memory-saver"] is True
    assert options["--disable-cuda-graph"] is True
    assert "--trust-remote-code" not in options


def test_an_engine_on_two_nodes_has_its_rendezvous_on_the_first(tmp_path):
    async def case() -> None:
        hosts = [FarHost("127.0.0.1"), FarHost("127.0.0.2")]
        places = [HostGpus(host, first_gpu=0, num_gpus=8) for host in hosts]
        engine = await start_server(SglangLaunch(MODEL, num_gpus=16), 0, places, log_dir=tmp_path)
        first, second = (options_of(host.started[0]) for host in hosts)
        assert (first["--nnodes"], first["--node-rank"], first["--tp-size"]) == ("2", "0", "16")
        assert (second["--nnodes"], second["--node-rank"], second["--host"]) == ("2", "1", "127.0.0.2")
        assert first["--dist-init-addr"] == second["--dist-init-addr"]
        assert str(first["--dist-init-addr"]).startswith("127.0.0.1:")
        assert engine.url == f"http://127.0.0.1:{first['--port']}"
        await engine.stop()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["engine-0-node-1.log", "engine-0.log"]

    asyncio.run(case())


def test_the_key_of_furlong_serve_is_in_its_environment_and_not_in_its_command():
    launch = ServeLaunch(MODEL, api_key="secret", device="cuda", num_slots=8, num_threads=1)
    place = HostGpus(LocalHost(), first_gpu=2, num_gpus=1)
    command = launch.command(0, 0, [place], PORTS)
    assert launch.environment(place) == {API_KEY_VARIABLE: "secret"}
    assert "secret" not in command
    assert options_of(command)["--device"] == "cuda:2"
    with pytest.raises(EngineError, match=r"engine 0 was placed on 2"):
        launch.command(0, 0, [HostGpus(LocalHost()), HostGpus(LocalHost())], PORTS)
    with pytest.raises(ConfigError, match=r"engine 1 .*10\.0\.0\.2 .*--sglang-api-key"):
        ServeLaunch(MODEL).command(1, 0, [HostGpus(FarHost("10.0.0.2"))], PORTS)


def test_sglang_at_a_reachable_address_requires_a_key():
    places = [HostGpus(FarHost("10.0.0.2"))]
    with pytest.raises(ConfigError, match=r"engine 1 .*10\.0\.0\.2 .*--sglang-api-key"):
        SglangLaunch(MODEL, num_gpus=1).command(1, 0, places, PORTS)
    assert "10.0.0.2" in SglangLaunch(MODEL, num_gpus=1, api_key="secret").command(1, 0, places, PORTS)


def test_the_key_of_sglang_is_in_its_environment_and_not_in_its_command(tmp_path):
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(LOGGED_SETTINGS)
    site = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    launch = SglangLaunch(MODEL, num_gpus=1, api_key="-'hidden-word", env={"PYTHONPATH": site})

    async def case() -> list[str]:
        engine = await start_server(launch, 0, [HostGpus(LocalHost())], log_dir=tmp_path)
        while await engine.exit_loss() is None:
            await asyncio.sleep(0.01)
        return tail(tmp_path / "engine-0.log", 100)

    told = ["the key is right, and is nowhere else", "Settings(model_path='model')"]
    assert asyncio.run(case()) == told


async def started(program: str, folder: Path, **options) -> ServerProcess:
    return await start_server(Script(program), 0, [HostGpus(LocalHost())], log_dir=folder, **options)


def test_a_server_that_answers_is_ready(tmp_path):
    async def case() -> None:
        engine = await started(HEALTHY, tmp_path)
        await engine.while_starting(engine.wait_until_ready(), 20)
        assert await engine.exit_loss() is None
        assert "engine 0 at http://127.0.0.1:" in engine.where
        await engine.stop()
        loss = await engine.exit_loss()
        assert loss is not None
        assert (loss.code, "signal 15" in loss.reason) == (ENGINE_KILLED, True)
        assert tail(tmp_path / "engine-0.log", 1) == ["ready"]

    asyncio.run(case())


def test_an_exit_during_startup_is_an_error_with_exit_code_and_log(tmp_path):
    async def case() -> None:
        engine = await started("import sys; print('loading', flush=True); sys.exit('CUDA out of memory')", tmp_path)
        with pytest.raises(
            EngineError, match=r"(?s)ended with exit code 1; .*loading.*CUDA out of memory|memory.*loading"
        ):
            await engine.while_starting(engine.wait_until_ready(), 20)

    asyncio.run(case())


def test_a_startup_timeout_is_an_error_naming_the_limit(tmp_path):
    async def case() -> None:
        engine = await started("import signal; print('loading', flush=True); signal.pause()", tmp_path)
        with pytest.raises(EngineError, match=r"(?s)did not answer within 0\.1 s.*--sglang-server-start-timeout"):
            await engine.while_starting(engine.wait_until_ready(), 0.1)
        assert await engine.exit_loss() is None
        await engine.stop()

    asyncio.run(case())


@pytest.mark.parametrize(
    ("words", "gives"),
    [(["--colocate"], True), (["--colocate", "--no-offload-rollout"], False), (["--rollout-num-gpus", "1"], False)],
)
def test_colocated_servers_can_release_their_memory(monkeypatch, words, gives):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    config = parse(["--engine", "sglang", *words]).config
    launch, *_ = build_launches(config, model_dir=MODEL, dtype="bfloat16", device="cuda", num_threads=1)
    assert ("--enable-memory-saver" in options_of(launch.command(0, 0, [HostGpus(LocalHost())], PORTS))) == gives
