"""An agent whose calls are streams of the three endpoints; every fourth one leaves after the first event."""

from __future__ import annotations

import itertools
from typing import Any

import httpx

CALLS = itertools.count()
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "1+2="}]},
    "messages": {"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 300},
    "responses": {"input": "1+2="},
}
TEXTS = ('"content":', "content_block_delta", "response.output_text.delta")  # in events that have text


async def stream(base_url: str) -> dict[str, Any]:
    """Read one stream; returns its endpoint, the number of events with text, and whether it was left."""
    number = next(CALLS)
    path, body = list(BODIES.items())[number % 3]
    leaves, num_events = number % 4 == 3, 0
    async with (
        httpx.AsyncClient(base_url=base_url, timeout=600) as client,
        client.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as reply,
    ):
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            num_events += line.startswith("data: ") and any(text in line for text in TEXTS)
            if leaves and num_events:
                break
    return {"path": path, "events": num_events, "left": leaves}
