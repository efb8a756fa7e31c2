"""Attack the session server of a run with one request or many, and measure `/health` and memory meanwhile.

    OMP_NUM_THREADS=1 python benchmarks/cpu/session_attacks.py [--connections 2000] [--only NAME ...] [--sigterm]

The server is that of `furlong train --online-sessions` with a random model of 1M parameters, whose driver generates,
trains and serves on one event loop. Columns and flags are those of `server_attacks.py`.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from server_attacks import (
    Attack,
    Attacks,
    Server,
    arguments,
    at_once,
    connections,
    print_ends,
    print_measured,
    protocol_attacks,
    raw,
    raw_bytes,
    raw_post,
    request,
)


class Sessions(Server):
    """The session server of a run that waits for applications. Attacks have one session."""

    path = ""

    def take(self) -> str:
        """Take a session; returns the path of its chat completions."""
        taken = self.post("/sessions", wait=60).raise_for_status().json()
        self.path = f"{urlsplit(taken['url']).path}/v1/chat/completions"
        return self.path

    def stream(self) -> bytes:
        """Return the bytes of a request for a stream."""
        return raw_post({"messages": [{"role": "user", "content": "1"}], "stream": True}, self.path)

    def check(self) -> None:
        """Generate an answer in the session, which is a new one if an attack has used it up."""
        chat = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 2}
        if not self.path or self.post(self.path, **chat).status_code != 200:
            self.post(self.take(), **chat).raise_for_status()

    def wait_until_idle(self) -> None:
        """Wait until a request is answered at once."""
        time.sleep(1)


def session_attacks(*, num_connections: int, scale: int) -> Attacks:
    """Attacks on a session by name; sizes are divided by `scale`."""

    def chat(**body: Any) -> Attack:
        return lambda server: request(path_of(server), **{"messages": [{"role": "user", "content": "1"}], **body})(
            server
        )

    def sent(content: bytes) -> Attack:
        return lambda server: raw(raw_bytes(content, path_of(server)))(server)

    def path_of(server: Server) -> str:
        assert isinstance(server, Sessions)
        return server.path

    many = [{"role": "user", "content": "a"}] * (200_000 // scale)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    return {
        "text of 30 MB": chat(messages=[{"role": "user", "content": "é" * (15_000_000 // scale)}]),
        "200,000 messages": chat(messages=many),
        "100,000 tools": chat(tools=[tool] * (100_000 // scale)),
        "n 1,000,000": chat(n=1_000_000),
        "stop of 100,000 strings": chat(stop=["x"] * (100_000 // scale)),
        "number of 4,000 digits": chat(max_tokens=10**4000),
        "48 streams at once": lambda server: at_once(
            48 // scale or 1, path_of(server), messages=[{"role": "user", "content": "1"}], stream=True
        )(server),
        "2,000 sessions that do not exist": at_once(64, "/sessions/none/v1/chat/completions", messages=[]),
        "100 waits for a session": at_once(100, "/sessions", wait=2),
        "JSON of 1M nested lists": sent(b"[" * (1_000_000 // scale)),
        "JSON of 10M objects": sent(b'{"messages":[' + b"{}," * (10_000_000 // scale) + b"{}]}"),
        **protocol_attacks(),
        "connections": connections(num_connections, 3),
    }


@contextlib.contextmanager
def running_sessions(folder: Path, *flags: str) -> Generator[Server]:
    """Start `furlong train --online-sessions`; `folder` is that of the model."""
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        words = [
            *("--hf-checkpoint", str(folder), "--prompt-data", "episodes:64", "--online-sessions"),
            *("--session-server-port", str(port), "--num-rollout", "1", "--rollout-batch-size", "8"),
            *("--n-samples-per-prompt", "8", "--rollout-max-response-len", "64", "--num-threads", "1"),
            *("--output-dir", f"{scratch}/run", "--no-use-tensorboard", *flags),
        ]
        with (
            Path(f"{scratch}/log.txt").open("w+") as log,
            psutil.Popen([sys.executable, "-m", "furlong", "train", *words], stdout=log, stderr=log) as process,
        ):
            server = Sessions(f"http://127.0.0.1:{port}", process)
            try:
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        server.take()
                        break
                    if process.poll() is not None:
                        sys.exit(Path(log.name).read_text())
                    time.sleep(0.2)
                yield server
                if "Traceback" in (text := Path(log.name).read_text()):
                    sys.exit(text)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait(30)


def main() -> None:
    """Print the table."""
    from furlong.models.presets import write_preset

    args = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_preset("tiny", Path(scratch) / "model")
        chosen = args.chosen(session_attacks(num_connections=args.connections, scale=args.scale))
        if args.sigterm:
            print_ends(lambda: running_sessions(folder), chosen)
            return
        with running_sessions(folder) as server:
            print_measured(server, chosen)


if __name__ == "__main__":
    main()
