"""Start and exit of one engine, with a server process that records its requests."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from furlong.config.sections import Config
from furlong.errors import ENGINE_KILLED, ENGINE_UNANSWERED, Loss
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.inference.supervisor.process import HostGpus, LocalHost
from furlong.inference.supervisor.replica import EngineReplica

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

port, log, version, status = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, json.dumps({"version": version, "dtype": "float32", "device": "cpu"}))

    def do_POST(self):
        self.answer(status, "Garbage collection frozen.")

    def answer(self, status, text):
        with open(log, "a") as file:
            print(self.command, self.path, file=file)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@dataclass
class ScriptLaunch:
    asked: Path
    version: str
    status: int
    api_key: str | None = None
    needs_rendezvous: bool = False
    role: str = "regular"

    def command(self, index, node, places, ports):
        return [sys.executable, "-c", SERVER, str(ports.http), str(self.asked), self.version, str(self.status)]

    def environment(self, gpus):
        return {}


@dataclass
class ExitingProcess:
    """A process that has exited after so many polls."""

    polls: int
    where: str = "engine 0"

    async def exit_loss(self):
        self.polls -= 1
        return Loss("signal 9", ENGINE_KILLED) if self.polls < 0 else None

    async def log_end(self):
        return "its log ends here"


SILENT = Loss("it does not answer", ENGINE_UNANSWERED)


@pytest.mark.parametrize(
    ("polls", "lost", "loss"),
    [
        (3, SILENT, Loss("signal 9", ENGINE_KILLED)),
        (1 << 30, SILENT, replace(SILENT, name="engine 0", log_end="its log ends here")),
        (1, None, None),
    ],
)
def test_the_exit_of_a_process_explains_its_broken_connections(polls, lost, loss, monkeypatch):
    monkeypatch.setattr("furlong.inference.supervisor.replica.EXIT_WAIT_S", 0.2)
    server = SglangServer("http://127.0.0.1:1", ServerInfo.read({}))
    server.lost = lost
    replica = EngineReplica(0, [], process=ExitingProcess(polls), server=server)
    assert asyncio.run(replica.exit_loss()) == loss


def asked_of(launch: ScriptLaunch, folder: Path) -> list[str]:
    """The requests to an engine during its start, except health checks."""

    async def body() -> None:
        replica = EngineReplica(0, [HostGpus(LocalHost(), 0, 1)])
        try:
            await replica.bring_up(launch, log_dir=folder, config=Config())
            assert replica.server is not None
            await replica.server.close()
        finally:
            await replica.stop()

    asyncio.run(body())
    return [line for line in launch.asked.read_text().splitlines() if line != "GET /health"]


def test_startup_objects_of_sglang_are_excluded_from_garbage_collection(tmp_path, caplog):
    sglang = ["GET /server_info", "POST /freeze_gc"]
    for version, status, asked in (
        ("0.5.16", 200, sglang),
        ("furlong 0.1.0", 200, sglang[:1]),
        ("0.5.16", 404, sglang),
    ):
        assert "freeze_gc" not in caplog.text
        assert asked_of(ScriptLaunch(tmp_path / f"{version} {status}", version, status), tmp_path) == asked
    assert "POST /freeze_gc answered 404: Garbage collection frozen." in caplog.text
