"""Measure the client's CPU time per request to an engine server.

    OMP_NUM_THREADS=1 python benchmarks/cpu/http_client.py [--requests 1024] [--prompt-len 256] [--response-len 256]

A server in a separate process immediately returns a fixed reply in SGLang's format (with log-probs for every token),
so only client and transport costs are measured. All requests are in flight at once, four samples per prompt. These
clients alternate in every round:

- `aiohttp`, and with `--httpx` also slime's client `httpx`: the same requests, with replies only parsed by orjson;
- `direct`: furlong's HttpEngine; `router`: HttpEngine through sglang-router, if installed.

Columns: CPU microseconds of this process per request, wall seconds for all requests, and CPU seconds of the router
process. Compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import psutil

from furlong.inference.sglang.engine import HttpEngine, sampling_json
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.inference.supervisor.process import LocalHost
from furlong.inference.supervisor.replica import SglangRouter
from furlong.interfaces import SamplingParams

Requests = list[tuple[str, list[int]]]
Way = Callable[[Requests, SamplingParams], Awaitable[int]]


def recorded(num_tokens: int) -> bytes:
    """Return a reply with random tokens and log-probs."""
    rng = random.Random(0)
    tokens = [rng.randrange(150_000) for _ in range(num_tokens)]
    meta = {
        "id": "furlong-0", "finish_reason": {"type": "length", "length": num_tokens}, "prompt_tokens": 256,
        "weight_version": "default", "completion_tokens": num_tokens, "cached_tokens": 0, "e2e_latency": 5.25,
        "output_token_logprobs": [[-rng.expovariate(1.0), token, None] for token in tokens],
        "output_token_logprobs_length": num_tokens, "num_retractions": 0,
    }  # fmt: skip
    return orjson.dumps({"text": "", "output_ids": tokens, "meta_info": meta})


class Answering(asyncio.Protocol):
    """An HTTP/1.1 server that answers every POST with the fixed reply and every GET as a healthy server."""

    reply = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport: Any = transport
        self._data = bytearray()

    def data_received(self, data: bytes) -> None:
        """Answer each complete request."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end]).lower()
            at = head.find(b"content-length:")
            if head.startswith(b"pri "):  # the router probes for HTTP/2
                self._transport.abort()
                return
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            del self._data[: end + 4 + length]
            body = self.reply if head.startswith(b"post") else b'{"status":"ok","version":"0.5.16","model_path":"m"}'
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )


def serve(port: int, num_tokens: int) -> None:
    """Run the server process."""
    Answering.reply = recorded(num_tokens)

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", port, backlog=4096)
        await server.serve_forever()

    asyncio.run(run())


def body_of(name: str, prompt: list[int], params: SamplingParams) -> dict[str, Any]:
    """Return the request body that HttpEngine sends."""
    asked = {"input_ids": prompt, "sampling_params": sampling_json(params), "return_logprob": True, "stream": False}
    return asked | {"rid": name}


def httpx_way(url: str) -> Way:
    """Send all requests with one httpx.AsyncClient, as slime does."""
    import httpx

    async def way(requests: Requests, params: SamplingParams) -> int:
        limits = httpx.Limits(max_connections=len(requests))
        async with httpx.AsyncClient(limits=limits, timeout=600, trust_env=False) as client:

            async def one(name: str, prompt: list[int]) -> int:
                reply = await client.post(f"{url}/generate", content=orjson.dumps(body_of(name, prompt, params)))
                return len(orjson.loads(reply.content)["meta_info"]["output_token_logprobs"])

            return sum(await asyncio.gather(*(one(name, prompt) for name, prompt in requests)))

    return way


def aiohttp_way(url: str) -> Way:
    """Send all requests with one aiohttp.ClientSession."""
    import aiohttp

    async def way(requests: Requests, params: SamplingParams) -> int:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

            async def one(name: str, prompt: list[int]) -> int:
                body = orjson.dumps(body_of(name, prompt, params))
                headers = {"Content-Type": "application/json"}
                async with client.post(f"{url}/generate", data=body, headers=headers) as reply:
                    return len(orjson.loads(await reply.read())["meta_info"]["output_token_logprobs"])

            return sum(await asyncio.gather(*(one(name, prompt) for name, prompt in requests)))

    return way


def furlong_way(engine: HttpEngine) -> Way:
    """Send all requests with furlong's HttpEngine."""

    async def way(requests: Requests, params: SamplingParams) -> int:
        done = await asyncio.gather(*(engine.generate(prompt, params, session=name) for name, prompt in requests))
        return sum(len(completion.tokens) for completion in done)

    return way


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Return (CPU s of this process, wall s, CPU s of the router) for each client and round."""
    host = LocalHost()
    [port] = await host.reserve_ports(1)
    await host.release_ports([port])
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(port, args.response_len), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port}"
    clients = [SglangServer(url, ServerInfo.read({}), concurrency=args.requests) for _ in range(2)]
    ways: dict[str, Way] = {"aiohttp": aiohttp_way(url)} | ({"httpx": httpx_way(url)} if args.httpx else {})
    ways["direct"] = furlong_way(HttpEngine([clients[0]]))
    while not await clients[0].is_alive():
        await asyncio.sleep(0.05)
    router, pid = None, None
    if importlib.util.find_spec("sglang_router") is not None:
        router = SglangRouter(host, args.policy, folder / "router.log", concurrency=args.requests)
        front = await router.start()
        await router.add(clients[1])
        ways["router"] = furlong_way(HttpEngine([clients[1]], router=front))
        [pid] = [p.pid for p in psutil.Process().children() if "router" in " ".join(p.cmdline())]
    found: dict[str, list[tuple[float, float, float]]] = {}
    rng, params = random.Random(1), SamplingParams(max_new_tokens=args.response_len, ignore_eos=True, sampling_seed=1)
    try:
        for number in range(args.rounds + 1):
            for name, way in ways.items():
                prompts = [[rng.randrange(150_000) for _ in range(args.prompt_len)] for _ in range(args.requests // 4)]
                requests = [(f"{number}-{i}-{j}", prompt) for i, prompt in enumerate(prompts) for j in range(4)]
                begun, cpu, of_router = time.perf_counter(), time.process_time(), _cpu_s(pid)
                tokens = await way(requests, params)
                row = (time.process_time() - cpu, time.perf_counter() - begun, _cpu_s(pid) - of_router)
                if tokens != len(requests) * args.response_len:
                    raise SystemExit(f"{name}: wrong number of tokens received: {tokens}")
                if number:
                    found.setdefault(name, []).append(row)
    finally:
        for client in clients:
            await client.close()
        if router is not None:
            await router.close()
        server.kill()
    return found


def _cpu_s(pid: int | None) -> float:
    if pid is None:
        return 0.0
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> None:
    """Measure, then print one row per client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--response-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policy", default="cache_aware", help="routing policy of sglang-router")
    parser.add_argument(
        "--httpx", action="store_true", help="also measure httpx, whose CPU time per request grows with concurrency"
    )
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    args = parser.parse_args()
    gc.freeze()
    gc.set_threshold(100 * args.requests, 10, 10)  # as in a run
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(args, Path(folder)))
    print(f"{args.requests} requests, {args.prompt_len} + {args.response_len} tokens, medians of {args.rounds} rounds")
    print(f"{'client':8s} {'CPU us/request':>15s} {'/ aiohttp':>10s} {'wall s':>8s} {'router CPU s':>13s}")
    base = statistics.median(row[0] for row in found["aiohttp"])
    for name, rows in found.items():
        cpu, wall, of_router = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:8s} {cpu / args.requests * 1e6:15.0f} {cpu / base:10.2f} {wall:8.3f} {of_router:13.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
