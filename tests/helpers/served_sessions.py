"""A session server with one open session, and a client of it."""

from __future__ import annotations

import asyncio
import atexit
import functools
from collections.abc import Awaitable, Callable
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


@functools.cache
def _runner() -> asyncio.Runner:
    """The event loop of all tests, on which servers serve several of them."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


@functools.cache
def _shared_server(**options: Any) -> SessionServer:
    """A server of all tests with these options: its process takes 0.8 s to start."""
    runner, server = _runner(), SessionServer(**options)
    atexit.register(lambda: runner.run(server.close()))
    return server


def run(
    script: Script,
    body: Callable[[httpx.AsyncClient, OpenSession], Awaitable[Any]],
    *,
    model_name: str = "models/tiny",
    is_shared: bool = True,
    **options: Any,
) -> Any:
    """Return what `body` returns, which gets a client with the key of the session, and the session."""
    build = _shared_server if is_shared else SessionServer
    server = build(model_name=model_name, **options)

    async def main() -> Any:
        session = Session(ChatFormat(script.tokenizer), script, name="s", params=SamplingParams(), context_len=400)
        opened = server.open(session, nothing)
        try:
            async with httpx.AsyncClient(timeout=30, headers={"X-Api-Key": opened.key}) as client:
                return await asyncio.wait_for(body(client, opened), 60)
        finally:
            await server.end(opened)
            if not is_shared:
                await server.close()

    return _runner().run(main())
