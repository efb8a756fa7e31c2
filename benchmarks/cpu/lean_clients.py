"""A process of agents that post chat requests with as little work as possible, so that the server is what is measured.

Reads one base URL a line from stdin. For each it plays an episode of `--turns` turns over its own connection,
waiting `--tool-ms` on average after each answer, and then writes the seconds of its turns as one line of JSON to
stdout. Ends with stdin.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import orjson

QUESTION = "1+2="


def tool_time(mean_s: float) -> float:
    """Return the seconds that a tool takes, half to one and a half of the mean, so that turns do not come at once."""
    return mean_s * random.uniform(0.5, 1.5)


def start_time(tool_s: float) -> float:
    """Return the seconds until an episode's first turn, so that episodes do not begin at once."""
    return random.uniform(0.0, tool_s)


def next_question(turn: int) -> str:
    """Return what a tool answers."""
    return f"{turn}+4="


class _Connection(asyncio.Protocol):
    """Sends one request at a time and reads its answer, which must have a content-length."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._received[:head_end]).lower()
        at = head.index(b"content-length:") + len(b"content-length:")
        size = int(head[at:].split(b"\r\n", 1)[0])
        end = head_end + 4 + size
        if len(self._received) < end or self._answer is None:
            return
        body, self._received = bytes(self._received[head_end + 4 : end]), self._received[end:]
        answer, self._answer = self._answer, None
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            answer.set_exception(RuntimeError(f"{head.decode()} {body.decode()}"))
        else:
            answer.set_result(body)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server closed the connection"))

    async def post(self, head: bytes, body: bytes) -> bytes:
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(head + str(len(body)).encode() + b"\r\n\r\n" + body)
        return await self._answer

    def close(self) -> None:
        self._transport.close()


async def play(url: str, turns: int, tool_s: float) -> list[float]:
    """Play an episode; return the seconds of its turns."""
    where, seconds = urlsplit(url), list[float]()
    _, connection = await asyncio.get_running_loop().create_connection(_Connection, where.hostname, where.port)
    head = (
        f"POST {where.path}/v1/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
        "Content-Type: application/json\r\nContent-Length: "
    ).encode()
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    await asyncio.sleep(start_time(tool_s))
    for turn in range(turns):
        began = time.perf_counter()
        reply = orjson.loads(await connection.post(head, orjson.dumps({"messages": messages})))
        seconds.append(time.perf_counter() - began)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": next_question(turn)}]
        await asyncio.sleep(tool_time(tool_s))
    connection.close()
    return seconds


async def _serve(turns: int, tool_s: float) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def one(url: str) -> None:
        line = json.dumps([url, await play(url, turns, tool_s)])
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    async with asyncio.TaskGroup() as playing:
        while line := await reader.readline():
            playing.create_task(one(line.decode().strip()))


def main() -> None:
    """Play the episodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tool-ms", type=float, default=0.0)
    options = parser.parse_args()
    gc.disable()  # a collection would hold all agents of this process, as if the server did
    asyncio.run(_serve(options.turns, options.tool_ms / 1000))


if __name__ == "__main__":
    main()
