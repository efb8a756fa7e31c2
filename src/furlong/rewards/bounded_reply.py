"""Replies of HTTP servers that users name, read up to a limit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from furlong.core.text import redact_credentials

if TYPE_CHECKING:
    import httpx  # slow to import, and only callers with a client need it

SHOWN_CHARS = 200


class ReplyError(ValueError):
    """A reply is too large, does not decompress, is a redirect or an error, or not JSON. `status` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


async def read_json(reply: httpx.Response, limit_bytes: int) -> Any:
    """Read the JSON body of a streamed reply with a status of success.

    Raises ReplyError for another status, for more than `limit_bytes` after decompression, and for a body that is not
    JSON in UTF-8. httpx's errors of the transport pass through.
    """
    content, status = await _read(reply, limit_bytes), reply.status_code
    if reply.is_redirect:
        target = redact_credentials(reply.headers.get("location", ""))[:SHOWN_CHARS]
        raise ReplyError(f"HTTP {status}, a redirect to {target!r}, which is not followed", reply.status_code)
    if not reply.is_success:
        raise ReplyError(f"HTTP {status}: {_shown(content)}", status)
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ReplyError(
            f"the reply is not JSON: {_shown(content)} ({str(error)[:SHOWN_CHARS]})", reply.status_code
        ) from error


async def _read(reply: httpx.Response, limit_bytes: int) -> bytes:
    import httpx

    parts, num_bytes = list[bytes](), 0
    try:
        async for part in reply.aiter_bytes():
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > limit_bytes:
                raise ReplyError(f"the reply has more than {limit_bytes:,} bytes", reply.status_code)
    except httpx.DecodingError as error:
        encoding = reply.headers.get("content-encoding", "")[:SHOWN_CHARS]
        raise ReplyError(
            f"the reply is not in its Content-Encoding {encoding!r}: {error}", reply.status_code
        ) from error
    return b"".join(parts)


def _shown(content: bytes) -> str:
    text = content[: 4 * SHOWN_CHARS].decode(errors="replace")[:SHOWN_CHARS]
    return redact_credentials("".join(each if each.isprintable() else " " for each in text))
