"""Agents that stream their answers over HTTP, in each protocol, and some that leave in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from furlong.agent import policy, session
from furlong.sessions.tree import TreeNode

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
MAX_TOKENS, ATTEMPTS = 48, 8


@dataclass(frozen=True)
class Streamed:
    """What a client got, and its answer. num_early: pieces of text before the answer was complete."""

    path: str
    text: str
    num_early: int
    answer: TreeNode


SEEN: list[Streamed] = []  # of this process
LEFT: list[TreeNode] = []  # answers whose client left


def flags(folder: Path) -> dict[str, Any]:
    """Return the flags of a run with these agents."""
    (folder / "chat.jinja").write_text(TEMPLATE)
    SEEN.clear()
    LEFT.clear()
    return {
        "custom_generate_function_path": "streaming_agents.generate", "chat_template_path": folder / "chat.jinja",
        "rollout_max_response_len": MAX_TOKENS,
    }  # fmt: skip


def _body(path: str, text: str) -> dict[str, Any]:
    if path == "responses":
        return {"input": text, "stream": True}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": MAX_TOKENS, "stream": True}


def _piece(path: str, event: dict[str, Any]) -> str:
    """Return the text of an event."""
    if path == "chat/completions":
        return event["choices"][0]["delta"].get("content") or ""
    if path == "messages":
        return event["delta"]["text"] if event["type"] == "content_block_delta" else ""
    return event["delta"] if event["type"] == "response.output_text.delta" else ""


async def _pieces(url: str, path: str, text: str) -> AsyncGenerator[str]:
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{url}/v1/{path}", json=_body(path, text)) as reply,
    ):
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {") and (piece := _piece(path, json.loads(line.removeprefix("data: ")))):
                yield piece


async def generate(args, sample, sampling_params):
    """Stream one answer. Every fourth agent leaves after a piece, until one of its answers is cut by that."""
    opened, text = session(sample), policy().decode(sample.tokens)
    nodes = opened.session.tree.nodes
    path = ("chat/completions", "messages", "responses")[sample.index % 4 % 3]
    if sample.index % 4 == 3:
        for attempt in range(1, ATTEMPTS + 1):
            stream = _pieces(opened.url_with_key, path, text)
            async for _ in stream:
                break
            await stream.aclose()
            while len(nodes) < attempt:
                await asyncio.sleep(0.005)
            LEFT.append(nodes[-1])
            if nodes[-1].is_cut:
                break
        return sample
    pieces, num_early = list[str](), 0
    async for piece in _pieces(opened.url_with_key, path, text):
        pieces.append(piece)
        num_early += not nodes
    SEEN.append(Streamed(path, "".join(pieces), num_early, nodes[0]))
    return sample
