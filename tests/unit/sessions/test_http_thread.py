"""The thread that speaks HTTP with agents: how it starts and ends, and what the run's event loop owes it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.request
from typing import Any

import httpx
import pytest

from chat_zoo import Script, bpe_tokenizer
from furlong.chat.template_boundary import ChatFormat
from furlong.errors import RolloutError
from furlong.interfaces import SamplingParams
from furlong.sessions.open_session import OpenSession
from furlong.sessions.session import Session
from furlong.sessions.session_server import SessionServer
from served_sessions import nothing, run


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "furlong-http"]


def test_a_session_starts_the_thread_and_close_ends_it():
    script, before = Script(bpe_tokenizer("plain")), len(threads())

    async def main() -> None:
        server = SessionServer()
        await server.start()
        assert len(threads()) == before
        server.open(Session(ChatFormat(script.tokenizer), script, name="s", params=SamplingParams()), nothing)
        assert len(threads()) == before + 1
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{server.address[1]}/health")).status_code == 200
        await server.close()
        assert len(threads()) == before
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address, timeout=5)

    asyncio.run(main())


def test_a_thread_that_dies_is_the_error_of_the_next_session(monkeypatch: pytest.MonkeyPatch):
    script = Script(bpe_tokenizer("plain"))
    session = Session(ChatFormat(script.tokenizer), script, name="s", params=SamplingParams())

    async def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no more")

    async def main() -> None:
        server, before = SessionServer(), len(threads())
        monkeypatch.setattr(server.http._server, "serve", fail)
        server.open(session, nothing)
        while len(threads()) > before:
            await asyncio.sleep(0.001)
        with pytest.raises(RolloutError, match="MemoryError: no more"):
            server.open(session, nothing)
        await server.close()

    asyncio.run(main())


def test_health_is_answered_while_the_event_loop_of_the_run_is_held():
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        address = opened.url.partition("/sessions")[0]
        (await client.get(f"{address}/health")).raise_for_status()  # the thread has started

        def ask() -> float:
            began = time.monotonic()
            with urllib.request.urlopen(f"{address}/health", timeout=10) as reply:
                assert reply.status == 200
            return time.monotonic() - began

        asking = asyncio.get_running_loop().run_in_executor(None, ask)
        time.sleep(3)
        assert await asking < 2

    run(Script(bpe_tokenizer("plain")), body)


def test_a_request_after_the_run_gets_an_answer():
    script = Script(bpe_tokenizer("plain"), "one")
    servers: list[SessionServer] = []

    async def main() -> str:
        servers.append(SessionServer())
        session = Session(ChatFormat(script.tokenizer), script, name="s", params=SamplingParams())
        return servers[0].open(session, nothing).url_with_key

    url = asyncio.run(main())
    reply = httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (410, "session_ended")
    asyncio.run(servers[0].close())
