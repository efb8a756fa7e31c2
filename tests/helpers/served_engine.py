"""Engine servers for tests: in a thread, in processes, and scripted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import orjson
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fakes_engine import tiny_engine, tiny_model
from furlong.core.addresses import bound_socket
from furlong.core.weights import WeightSource
from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.server.http_server import running_server
from furlong.inference.server.web import ServerLimits
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.sglang.server import ServerInfo, SglangServer, probe
from furlong.models.tokenizer import build_tokenizer, load_tokenizer
from furlong.sessions.served_model import served_routes
from furlong.weight_sync.remote_sync import LocalSync
from furlong.weight_sync.transports.disk import DiskTransport
from runs import FORKED, Fault, command_in_child, free_ports
from transport_context import transport_context

ADDRESS = r" at (http://(?:127\.0\.0\.1|\[::1\]):\d+)\n"  # in the log of `furlong serve`


class ServerThread:
    """Runs an async context manager that yields a URL, in a thread with its own event loop."""

    def __init__(self, serving: Callable[[], contextlib.AbstractAsyncContextManager[str]]) -> None:
        self.url = ""
        self._serving, self._ready = serving, threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def _run(self) -> None:
        async def main() -> None:
            async with self._serving() as self.url:
                self._ready.set()
                await self._stop.wait()

        try:
            self._loop.run_until_complete(main())
        finally:
            self._loop.close()

    def stop(self) -> None:
        """Stop the server and wait for it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(20)


class Untrained:
    """A trainer that serves the weights of a state dict."""

    def __init__(self, state: dict[str, torch.Tensor], num_kv_heads: int | None = None) -> None:
        self.state, self.num_kv_heads = state, num_kv_heads

    def weights(self) -> WeightSource:
        return WeightSource(self.state.items, num_kv_heads=self.num_kv_heads)


def connect(url: str, **options: Any) -> SglangServer:
    """Return a client of the server at `url`."""
    return SglangServer(url, ServerInfo.read(probe(url, api_key=options.get("api_key"))), **options)


class ServedEngine(HttpEngine):
    """An HttpEngine with its own server, an embedded engine in a thread. Weights are sent by disk."""

    def __init__(self, config: Any, state: dict[str, torch.Tensor], *, concurrency: int = 512) -> None:
        self.embedded = tiny_engine(config, state)

        @contextlib.asynccontextmanager
        async def serving() -> Any:
            async with running_server(self.embedded) as url:
                yield url
            await self.embedded.close()

        self._folder = tempfile.TemporaryDirectory()
        self._thread = ServerThread(serving)
        path = Path(self._folder.name)
        super().__init__([connect(self._thread.url, concurrency=concurrency)])
        self.disk = LocalSync(
            Untrained(state),  # pyright: ignore[reportArgumentType]
            self.pool.reachable,
            DiskTransport(transport_context(1 << 14, folder=path, model_dir=path)),
        )

    async def load_weights(self, source: WeightSource, version: int) -> dict[str, str]:
        self.pool.check_open()
        return await self.disk.load(source, version)

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._thread.stop)
        await self.disk.close()
        self._folder.cleanup()


Answer = Callable[[str, dict[str, Any]], Awaitable[tuple[int, Any]]]


class ScriptedServer(ServerThread):
    """A server whose answers are a function of path and body; it records its requests."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []

        async def endpoint(http: Request) -> Response:
            raw = await http.body()
            body = orjson.loads(raw) if raw else {}
            self.asked.append((http.url.path, body))
            self.headers.append(dict(http.headers))
            status, content = await answer(http.url.path, body)
            return Response(orjson.dumps(content), status_code=status)

        app = Starlette(routes=[Route("/{path:path}", endpoint, methods=["GET", "POST"])])

        @contextlib.asynccontextmanager
        async def serving() -> Any:
            listener = bound_socket("127.0.0.1", 0)
            config = uvicorn.Config(app, log_config=None, lifespan="off")
            config.load()
            server = uvicorn.Server(config)
            server.lifespan = config.lifespan_class(config)
            await server.startup(sockets=[listener])
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:  # at once: uvicorn's own end takes two tenths of a second, and hundreds of tests start servers
                await _end(server)
                listener.close()

        super().__init__(serving)


async def _end(server: uvicorn.Server) -> None:
    """End connections before listeners: one that is being accepted when its listener closes is left open (CPython)."""
    state = server.server_state
    while state.connections or len(asyncio.all_tasks()) > 1:  # it is a task until then
        for task in state.tasks:
            if not task.cancelling():
                task.cancel()
        for connection in list(state.connections):
            connection.transport.close()
        await asyncio.sleep(0)
    for listening in server.servers:
        listening.close()


def reply(tokens: list[int], *, version: str = "default", reason: str = "length", **meta: Any) -> dict[str, Any]:
    """Return a reply of SGLang's /generate."""
    rows = [[-1.0 - i, token, None] for i, token in enumerate(tokens)]
    meta = {"finish_reason": {"type": reason}, "weight_version": version, "output_token_logprobs": rows} | meta
    return {"output_ids": tokens, "meta_info": meta}


@contextlib.contextmanager
def serve_process(folder: Path, *flags: str, fault: Fault | None = None) -> Iterator[tuple[BaseProcess, str]]:
    """Run `furlong serve` in a process on a free port, and yield process and URL."""
    words = ["serve", "--model-path", str(folder), "--port", "0", *flags]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.txt"
        process = FORKED.Process(target=command_in_child, args=(words, log, fault))
        process.start()
        try:
            deadline = time.monotonic() + 60
            while not (found := log.exists() and re.search(ADDRESS, log.read_text())):
                assert process.is_alive(), log.read_text()
                assert time.monotonic() < deadline, "the server did not start in time"
                time.sleep(0.005)
            yield process, found[1]
        finally:
            process.kill()
            process.join(20)


@contextlib.contextmanager
def router_process(workers: Sequence[str], *flags: str) -> Iterator[str]:
    """Run sglang-router over servers, and yield its URL once all of them are healthy."""
    port, metrics = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    words = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--log-level", "warn"]
    command = [sys.executable, "-m", "sglang_router.launch_router", *words, *flags, "--worker-urls", *workers]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            deadline = time.monotonic() + 60
            while _num_healthy(url) < len(workers):
                log.seek(0)
                assert process.poll() is None, log.read()
                assert time.monotonic() < deadline, "the router did not reach its workers within 60 s"
                time.sleep(0.01)
            yield url
        finally:
            process.kill()


def _num_healthy(router: str) -> int:
    try:
        reply = httpx.get(f"{router}/workers", timeout=5, trust_env=False)
    except httpx.TransportError:
        return 0
    workers = reply.json()["workers"] if reply.status_code == 200 else []
    return sum(worker["is_healthy"] for worker in workers)


@contextlib.contextmanager
def served_folder(folder: Path) -> Iterator[str]:
    """Serve a model folder in a thread, and yield the URL."""

    @contextlib.asynccontextmanager
    async def serving() -> Any:
        engine = EmbeddedEngine(folder, dtype=torch.float32, tokenizer=load_tokenizer(folder))
        async with running_server(engine) as url:
            yield url
        await engine.close()

    server = ServerThread(serving)
    try:
        yield server.url
    finally:
        server.stop()


class LogRecords(logging.Handler):
    """Records of all loggers, formatted."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def failures(self) -> list[str]:
        """Tracebacks and errors."""
        return [line for line in self.lines if "Traceback" in line or line.startswith(("ERROR", "CRITICAL"))]


@contextlib.contextmanager
def served_tiny(
    *, limits: ServerLimits | None = None, **options: Any
) -> Iterator[tuple[str, EmbeddedEngine, LogRecords]]:
    """Serve a tiny model in a thread; yields URL, engine and log. The test fails on any error in the log."""
    config, model = tiny_model("qwen2")
    engine = tiny_engine(config, model.state_dict(), tokenizer=build_tokenizer(), **options)

    @contextlib.asynccontextmanager
    async def serving() -> Any:
        async with running_server(engine, model_name="tiny", limits=limits, agents=served_routes) as url:
            yield url
        await engine.close()

    log, root = LogRecords(), logging.getLogger()
    level = root.level
    root.addHandler(log)
    logging.getLogger("furlong").setLevel(logging.DEBUG)
    server = ServerThread(serving)
    try:
        yield server.url, engine, log
    finally:
        server.stop()
        root.removeHandler(log)
        root.setLevel(level)
        logging.getLogger("furlong").setLevel(logging.NOTSET)
    assert log.failures() == []
