"""A session server with one open session, and a client of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from chat_zoo import Script
from furlong.chat.template_boundary import ChatFormat
from furlong.interfaces import SamplingParams
from furlong.sessions.open_session import OpenSession
from furlong.sessions.session import Session
from furlong.sessions.session_server import SessionServer


async def nothing() -> None:
    pass


@asynccontextmanager
async def serving(script: Script, **options: Any) -> AsyncGenerator[tuple[httpx.AsyncClient, OpenSession]]:
    server = SessionServer(**{"model_name": "models/tiny", **options})
    await server.start()
    session = Session(ChatFormat(script.tokenizer), script, name="s", params=SamplingParams(), context_len=400)
    opened = server.open(session, nothing)
    try:
        async with httpx.AsyncClient(timeout=30) as client:
            yield client, opened
    finally:
        await server.end(opened)
        await server.close()


def run(script: Script, body: Callable[[httpx.AsyncClient, OpenSession], Awaitable[Any]], **options: Any) -> Any:
    """Return what `body` returns, which gets the client and the session."""

    async def main() -> Any:
        async with serving(script, **options) as (client, opened):
            return await asyncio.wait_for(body(client, opened), 60)

    return asyncio.run(main())
