"""Attack `furlong serve` with one request or many, and measure `/health` and memory meanwhile.

    OMP_NUM_THREADS=1 python benchmarks/cpu/server_attacks.py [--connections 2000] [--only NAME ...] [--sigterm]

The server has a random model of 1M parameters. A separate process asks `/health` every 20 ms, each time on a new
connection, and reads the server's memory. After each attack a completion must be generated. The last attack opens many
connections at once, three times: a third never read their streams, a third stall in headers or body, a third are reset.

Columns: what the server answered, the longest answer of `/health` in seconds, the peak of the server's memory above
that before the attack, and what is left of it afterwards, in MB.

With `--sigterm`, each attack is instead made on a server of its own, which gets SIGTERM one second after the attack
began. The columns are then the seconds until it has ended, its exit code and what it left behind.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import multiprocessing
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

RELEASE_S, RELEASED_BYTES = 10.0, 100 << 20  # an idle server returns memory once a second
MIB = 1 << 20
GREEDY = {"temperature": 0, "ignore_eos": True}
# Sends SIGTERM to a process, and prints the seconds until it has ended.
TERMINATE = """
import os, sys, time
pid, began = int(sys.argv[1]), time.monotonic()
os.kill(pid, 15)
while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z" and time.monotonic() - began < 30:
    time.sleep(0.02)
print(time.monotonic() - began)
"""
PAUSE_S = 0.02  # between two requests of /health
RESET = b"\1\0\0\0\0\0\0\0"  # SO_LINGER: close with RST
FLAGS = ["--trust-request-chat-template", "--header-timeout", "3", "--body-timeout", "3", "--write-timeout", "3"]


@dataclass
class Server:
    """A running server, its process, and how long `/health` took."""

    url: str
    process: psutil.Popen
    health_s: float = 0.0
    late_s: float = 0.0
    peak_bytes: int = 0

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Send a request."""
        return httpx.post(self.url + path, json=body, timeout=300, trust_env=False)

    def connect(self) -> socket.socket:
        """Open a connection."""
        where = urlsplit(self.url)
        return socket.create_connection((where.hostname, where.port), timeout=30)

    def stream(self) -> bytes:
        """Return the bytes of a request for a stream."""
        return raw_post({"text": "a", "stream": True, "sampling_params": {**GREEDY, "max_new_tokens": 200}})

    def check(self) -> None:
        """Generate a completion."""
        self.post("/generate", text="a", sampling_params={"max_new_tokens": 2}).raise_for_status()

    def wait_until_idle(self) -> None:
        """Wait until no request runs."""
        while self.process.is_running():
            load = httpx.get(f"{self.url}/get_load", timeout=300, trust_env=False)
            if load.status_code == 200 and not load.json()[0]["num_reqs"]:
                return
            time.sleep(0.05)

    @contextlib.contextmanager
    def observed(self) -> Generator[None]:
        """Ask `/health` and read the memory all the time, in a separate process."""
        context = multiprocessing.get_context("forkserver")
        here, there = context.Pipe()
        observer = context.Process(target=observe, args=(self.url, self.process.pid, there))
        observer.start()
        here.recv()
        try:
            yield
        finally:
            here.send("stop")
            self.health_s, self.late_s, self.peak_bytes = here.recv()
            observer.join()


Attack = Callable[[Server], str]  # returns what was answered
Attacks = Mapping[str, Attack]


def memory_of(process: psutil.Process) -> int:
    """Resident bytes of a process and its children."""
    total = 0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total


def observe(url: str, pid: int, pipe: Connection) -> None:
    """When `pipe` has a message, send the longest answer of `/health`, the longest delay of this process, and the peak.

    Seconds and bytes. A delay is what the machine adds to a pause of `PAUSE_S`, if other processes use its cores.
    """
    process, where, longest_s, late_s = psutil.Process(pid), urlsplit(url), 0.0, 0.0
    peak = memory_of(process)
    pipe.send("started")
    paused = time.perf_counter()
    while not pipe.poll(PAUSE_S):
        began = time.perf_counter()
        late_s = max(late_s, began - paused - PAUSE_S)
        with socket.create_connection((where.hostname, where.port)) as peer:
            peer.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert peer.recv(12) == b"HTTP/1.1 200"
        longest_s = max(longest_s, time.perf_counter() - began)
        peak = max(peak, memory_of(process))
        paused = time.perf_counter()
    pipe.send((longest_s, late_s, peak))


@contextlib.contextmanager
def running_server(folder: Path, *flags: str) -> Generator[Server]:
    """Start `furlong serve` on a free port."""
    words = [sys.executable, "-m", "furlong", "serve", "--model-path", str(folder), "--port", "0", "--threads", "1"]
    with (
        tempfile.TemporaryFile("w+") as log,
        psutil.Popen([*words, *flags], stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            found = re.search(r"(http://\S+)", process.stdout.readline())
            if found is None:
                log.seek(0)
                sys.exit(log.read())
            yield Server(found[1], process)
            log.seek(0)
            if "Traceback" in (text := log.read()):
                sys.exit(text)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(10)


def counted(replies: list[int]) -> str:
    """Status codes with their numbers."""
    return ", ".join(f"{count} × {code}" if count > 1 else str(code) for code, count in Counter(replies).items())


def request(path: str, **body: Any) -> Attack:
    """An attack of one request."""
    return lambda server: counted([server.post(path, **body).status_code])


def raw(content: bytes) -> Attack:
    """An attack of bytes that no HTTP client sends; returns the status code, or that the connection was closed."""

    def attack(server: Server) -> str:
        with server.connect() as peer:
            with contextlib.suppress(ConnectionError):  # refused while it is being sent
                peer.sendall(content)
            with contextlib.suppress(ConnectionError):
                return peer.recv(64).decode("latin-1")[9:12] or "closed"
        return "reset"

    return attack


def labels(server: Server) -> str:
    """Version labels that are none, and a generation after each."""
    codes: list[int] = []
    for value in ("", "-1", "a\nb", 5.5, 10**30, "9" * 30, -1, None, [], {}, True, "x" * 10_000, "\ud800", "0"):
        body = json.dumps({"new_version": value}).encode()
        codes.append(httpx.post(f"{server.url}/update_weight_version", content=body, trust_env=False).status_code)
        server.post("/generate", text="a", sampling_params={"max_new_tokens": 1}).raise_for_status()
    return counted(codes)


def broken_off_bucket(server: Server) -> str:
    """A version of which one tensor arrives; generation waits for the others, then all of it is sent."""
    import torch
    from safetensors.torch import load_file, save

    def send(tensors: dict[str, torch.Tensor]) -> httpx.Response:
        parts = [base64.b64encode(save(tensors)).decode()]
        body = {"load_format": "safetensors", "serialized_named_tensors": parts, "weight_version": "broken"}
        return server.post("/update_weights_from_tensor", **body)

    folder = Path(server.process.cmdline()[server.process.cmdline().index("--model-path") + 1])
    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    with ThreadPoolExecutor(9) as pool:
        codes = [send({name: weights[name]}).status_code]
        waiting = [pool.submit(server.post, "/generate", text="a") for _ in range(8)]
        time.sleep(2)
        codes.append(send({n: t for n, t in weights.items() if n != name}).status_code)
        return counted([*codes, *(reply.result().status_code for reply in waiting)])


def at_once(count: int, path: str, **body: Any) -> Attack:
    """An attack of equal requests at once."""

    def attack(server: Server) -> str:
        with ThreadPoolExecutor(count) as pool:
            replies = [pool.submit(server.post, path, **body) for _ in range(count)]
            return counted([reply.result().status_code for reply in replies])

    return attack


def raw_post(body: dict[str, Any], path: str = "/generate") -> bytes:
    """The bytes of a request."""
    return raw_bytes(json.dumps(body).encode(), path)


def raw_bytes(content: bytes, path: str = "/generate") -> bytes:
    """The bytes of a request whose body may be no JSON."""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def unread_replies(num_tokens: int) -> Attack:
    """Large replies whose clients read nothing."""

    def attack(server: Server) -> str:
        body = {
            "text": ["ab"] * 16,
            "return_logprob": True,
            "sampling_params": {**GREEDY, "max_new_tokens": num_tokens},
        }
        peers = [server.connect() for _ in range(8)]
        for peer in peers:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.sendall(raw_post(body))
        server.wait_until_idle()
        time.sleep(1)
        for peer in peers:
            peer.close()
        return f"{len(peers)} unread"

    return attack


def groups_of_nobody(server: Server) -> str:
    """Joins of process groups that nobody comes to; given up afterwards."""
    with socket.socket() as nobody, ThreadPoolExecutor(12) as pool:
        nobody.bind(("127.0.0.1", 0))
        nobody.listen()
        group = {"master_address": "127.0.0.1", "master_port": nobody.getsockname()[1], "rank_offset": 1}
        joins = [
            pool.submit(server.post, "/init_weights_update_group", group_name=f"g{i}", world_size=2, **group)
            for i in range(12)
        ]
        time.sleep(1)
        server.post("/update_weight_version", new_version="1").raise_for_status()
        for i in range(12):
            server.post("/destroy_weights_update_group", group_name=f"g{i}")
        return counted([join.result().status_code for join in joins])


def beside_others(body: dict[str, Any]) -> Attack:
    """An attack that must not slow down other requests: returns how many times longer they take."""

    def attack(server: Server) -> str:
        other = {"text": "1+1=", "sampling_params": {**GREEDY, "max_new_tokens": 200}}

        def seconds() -> float:
            began = time.perf_counter()
            server.post("/generate", **other).raise_for_status()
            return time.perf_counter() - began

        before = statistics.median(seconds() for _ in range(5))
        code = server.post("/generate", **body).status_code
        after = statistics.median(seconds() for _ in range(5))
        return f"{code}; later requests take {after / before:.2f} times as long"

    return attack


def connections(count: int, rounds: int) -> Attack:
    """Slow readers, slow writers and resets at once; returns descriptors and memory after each round."""

    def attack(server: Server) -> str:
        data, sizes, files = server.stream(), list[int](), list[int]()
        for _ in range(rounds):
            peers: list[socket.socket] = []
            for i in range(count):
                peer = server.connect()
                if i % 3 == 0:  # never reads
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    peer.sendall(data)
                elif i % 3 == 1:  # stalls
                    peer.sendall(data[: i % len(data)])
                else:
                    peer.sendall(data)
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    peer.close()
                peers.append(peer)
            time.sleep(4)  # beyond the time limits
            for peer in peers:
                peer.close()
            server.wait_until_idle()
            files.append(server.process.num_fds())
            sizes.append(memory_of(server.process) // MIB)
        return f"{count} × {rounds}; MB after each round {sizes}, open files {files}"

    return attack


def attacks(*, num_connections: int, scale: int) -> dict[str, Attack]:
    """All attacks by name; sizes are divided by `scale`."""
    bomb = "{% for i in range(30) %}{% set x.y = x.y ~ x.y %}{% endfor %}{{ x.y }}"
    grow = "{% set x = namespace(y='a') %}" + bomb
    spin = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    chat = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1}
    many = {"temperature": 1, "max_new_tokens": 1, "n": 1024 // scale}
    stops = [f"{i:04d}" + "x" * 1000 for i in range(128)]
    stream: dict[str, Any] = {"text": "ab", "stream": True, "return_logprob": True}
    stream["sampling_params"] = {**GREEDY, "max_new_tokens": 2000 // scale}
    return {
        "text of 8 MB": request("/generate", text="ab " * (2_700_000 // scale)),
        "text of 30 MB, 8 times": at_once(8, "/generate", text="é" * (15_000_000 // scale)),
        "prompt of 30 MB for OpenAI": request("/v1/completions", prompt="a " * (15_000_000 // scale)),
        "chat of 200,000 messages": request(
            "/v1/chat/completions", messages=[{"role": "user", "content": "a"}] * (200_000 // scale)
        ),
        "input_ids of 10M tokens": request("/generate", input_ids=[5] * (10_000_000 // scale)),
        "key of 30 MB": request("/generate", text="a", sampling_params={"x" * (30_000_000 // scale): 1}),
        "number of 4,000 digits": request("/generate", text="a", sampling_params={"top_k": 10**4000}),
        "template of 1e9 characters": request("/v1/chat/completions", chat_template=grow, **chat),
        "template of 1e10 loops, 4 times": at_once(4, "/v1/chat/completions", chat_template=spin, **chat),
        "200 prompts, n 1,024": request("/generate", text=["ab"] * 200, sampling_params={**many, "n": 1024}),
        "4 prompts, n 1,024": request("/generate", text=["ab"] * 4, sampling_params=many),
        "4 prompts, n 1,024, 4 times": at_once(4, "/generate", text=["ab"] * 4, sampling_params=many),
        "300,000 stop ids": beside_others({"text": "a", "sampling_params": {"stop_token_ids": list(range(300_000))}}),
        "128 stop strings, n 256": beside_others(
            {"text": "a", "sampling_params": {**many, "n": 256 // scale, "max_new_tokens": 20, "stop": stops}}
        ),
        "48 cumulative streams": at_once(48 // scale, "/generate", **stream),
        "48 incremental streams": at_once(48 // scale, "/generate", incremental_streaming_output=True, **stream),
        "large replies that nobody reads": unread_replies(500 // scale),
        "12 groups of nobody": groups_of_nobody,
        "bucket that breaks off": broken_off_bucket,
        "labels that are none": labels,
        "JSON of 1M nested lists": raw(raw_bytes(b"[" * (1_000_000 // scale))),
        "JSON of 10M objects": raw(raw_bytes(b'{"text":[' + b"{}," * (10_000_000 // scale) + b"{}]}")),
        **protocol_attacks(),
        "connections": connections(num_connections, 3),
    }


def protocol_attacks() -> dict[str, Attack]:
    """Attacks before a request is read, by name."""
    return {
        "body of 10 GB": raw(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n" + b"x" * MIB),
        "header of 10 MB": raw(b"GET / HTTP/1.1\r\nHost: " + b"x" * 10 * MIB),
        "100,000 headers": raw(b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 100_000 + b"\r\n"),
    }


def measured(server: Server, attack: Attack) -> tuple[str, float, float, float]:
    """Run one attack; returns the answers, the slowest `/health` in seconds, and MB at the peak and afterwards."""
    server.check()
    before = memory_of(server.process)
    with server.observed():
        answers = attack(server)
        server.wait_until_idle()
    server.check()
    deadline = time.monotonic() + RELEASE_S
    while (left := memory_of(server.process) - before) > RELEASED_BYTES and time.monotonic() < deadline:
        time.sleep(0.1)
    return answers, server.health_s, (server.peak_bytes - before) / MIB, left / MIB


def ended(server: Server, attack: Attack) -> tuple[float, int | None, int]:
    """Send SIGTERM to a server under attack; returns the seconds until it ended, its code and the processes left."""

    def attacking() -> None:
        with contextlib.suppress(Exception):  # the server ends meanwhile
            attack(server)

    server.check()
    threading.Thread(target=attacking, daemon=True).start()
    time.sleep(1)
    children = server.process.children(recursive=True)
    timing = [sys.executable, "-S", "-E", "-c", TERMINATE, str(server.process.pid)]  # this process is busy as a client
    seconds = float(subprocess.run(timing, capture_output=True, check=True).stdout)
    code: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired, psutil.TimeoutExpired):
        code = server.process.wait(30)
    time.sleep(0.2)
    return seconds, code, sum(child.is_running() for child in children)


def main() -> None:
    """Print the table."""
    from furlong.models.presets import write_preset  # not in the process that observes

    args = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_preset("tiny", Path(scratch) / "model")
        chosen = args.chosen(attacks(num_connections=args.connections, scale=args.scale))
        if args.sigterm:
            print_ends(lambda: running_server(folder, *FLAGS), chosen)
            return
        with running_server(folder, *FLAGS) as server:
            warm_up = {"text": "a", "sampling_params": {**GREEDY, "max_new_tokens": 2000}}
            server.post("/generate", **warm_up).raise_for_status()
            print_measured(server, chosen)


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    connections: int
    scale: int
    only: list[str]
    sigterm: bool

    def chosen(self, attacks: Attacks) -> Attacks:
        """Return the attacks with these names."""
        return {name: attack for name, attack in attacks.items() if not self.only or any(w in name for w in self.only)}


def arguments(text: str) -> Arguments:
    """Read the command line of a script with this documentation."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2000, help="connections at once in the last attack")
    parser.add_argument("--scale", type=int, default=1, help="divide the sizes of the attacks by this")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help="attacks whose names contain one of these"
    )
    parser.add_argument("--sigterm", action="store_true", help="measure how long SIGTERM takes during each attack")
    return Arguments(**vars(parser.parse_args()))


def print_measured(server: Server, chosen: Attacks) -> None:
    """Print the table of `/health` and memory."""
    print(f"{'attack':34} {'health s':>8} {'peak MB':>8} {'left MB':>8}  answers")
    for name, attack in chosen.items():
        answers, health_s, peak, left = measured(server, attack)
        print(f"{name:34} {health_s:8.2f} {peak:8.0f} {left:8.0f}  {answers}", flush=True)


def print_ends(start: Callable[[], contextlib.AbstractContextManager[Server]], chosen: Attacks) -> None:
    """Print the table of SIGTERM."""
    print(f"{'attack':34} {'SIGTERM s':>9} {'code':>4} {'processes left':>14}")
    for name, attack in chosen.items():
        with start() as server:
            seconds, code, left = ended(server, attack)
            print(f"{name:34} {seconds:9.2f} {code!s:>4} {left:14}", flush=True)


if __name__ == "__main__":
    main()
