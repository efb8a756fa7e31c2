"""Server-sent events, within a limit of bytes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import orjson
from starlette.responses import StreamingResponse

from furlong.inference.server.limits import RequestGuard, flag_of

DONE = b"data: [DONE]\n\n"


def event_stream(guard: RequestGuard, events: AsyncIterator[bytes]) -> StreamingResponse:
    """Reply with server-sent events of checked requests, up to the limits of streams and bytes."""
    guard.open_stream()
    return StreamingResponse(_bounded(events, guard.limits.max_stream_bytes), media_type="text/event-stream")


async def _bounded(events: AsyncIterator[bytes], limit: int) -> AsyncGenerator[bytes]:
    """Forward events until they exceed `limit` bytes; then end with an error event."""
    num_bytes = 0
    async with contextlib.aclosing(events) as source:  # pyright: ignore[reportArgumentType]  a generator
        async for event in source:
            num_bytes += len(event)
            if num_bytes > limit:
                message = (
                    f"this stream exceeds {limit} bytes ({flag_of('max_stream_bytes')}), because each event repeats "
                    'the whole text; set "incremental_streaming_output": true, or do not stream'
                )
                yield sse({"error": {"message": message, "type": "invalid_request_error", "code": 413}})
                yield DONE
                return
            yield event


def sse(event: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(event) + b"\n\n"
