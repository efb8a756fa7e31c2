"""The process that speaks HTTP with agents: how it starts and ends, and what it keeps away from the run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from typing import Any

import httpx
import psutil
import pytest

from chat_zoo import Script, bpe_tokenizer
from furlong.chat.messages import MessageError
from furlong.chat.template_boundary import ChatFormat
from furlong.errors import EngineError, RolloutError
from furlong.inference.request_error import RequestError
from furlong.inference.server.limits import RefusedError
from furlong.interfaces import Completion, SamplingParams
from furlong.sessions.front.front_host import FrontHost
from furlong.sessions.front.wire import UnexpectedError, error_from, error_values
from furlong.sessions.open_session import OpenSession
from furlong.sessions.session import Session
from furlong.sessions.session_errors import EndedError, FullContextError
from furlong.sessions.session_server import SessionServer
from served_sessions import nothing, run

USER = {"role": "user", "content": "what is the sum?"}


EARLIER: set[int] = set()  # processes of servers that tests share


@pytest.fixture(autouse=True)
def _only_processes_of_this_test():
    EARLIER.clear()
    EARLIER.update(each.pid for each in fronts())


def fronts() -> list[psutil.Process]:
    """Return the processes that speak HTTP for this one, since the test began."""
    found: list[psutil.Process] = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "furlong.sessions.front" in " ".join(each.cmdline()) and each.pid not in EARLIER:
                found.append(each)
    return found


@pytest.mark.slow
def test_a_host_that_is_closed_at_any_time_of_its_start_leaves_nothing():
    async def body():
        for iterations in [*range(12), 20, 50]:
            listener = socket.create_server(("127.0.0.1", 0))
            host = FrontHost(listener, {}, lambda _: None, lambda: None)
            host.start_soon()
            for _ in range(iterations):
                await asyncio.sleep(0.001 * (iterations > 12))
            await host.close()
            assert listener.fileno() == -1
            assert not fronts()
        await asyncio.sleep(0.01)  # transports close in the next iteration

    before = psutil.Process().num_fds()
    with warnings.catch_warnings(action="error"):
        asyncio.run(body())
        gc.collect()
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("kind", [EndedError, FullContextError, MessageError, RequestError, EngineError, RolloutError])
def test_errors_keep_their_class_between_the_processes(kind):
    error = error_from(*error_values(kind("why")))
    assert (type(error), str(error)) == (kind, "why")


def test_errors_of_other_classes_keep_what_clients_are_told():
    refused = error_from(*error_values(RefusedError("too many", 429)))
    assert isinstance(refused, RefusedError)
    assert refused.status == 429
    assert type(error_from(*error_values(type("Own", (EngineError,), {})("why")))) is EngineError
    unexpected = error_from(*error_values(KeyError("x")))
    assert (type(unexpected), str(unexpected)) == (UnexpectedError, "KeyError: 'x'; the log has the traceback")


@pytest.mark.slow
def test_the_process_imports_no_torch():
    code = "import sys, furlong.sessions.front.front_process; print(*{'torch', 'transformers'} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


@pytest.mark.slow
def test_a_retry_after_the_process_was_killed_gets_the_answer_of_the_first_attempt(caplog):
    release = asyncio.Event()

    class Held(Script):
        async def __call__(self, *arguments: Any) -> Completion:
            await release.wait()
            return await super().__call__(*arguments)

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        url = f"{opened.url}/v1/chat/completions"
        first = asyncio.create_task(client.post(url, json={"messages": [USER]}))
        async with asyncio.timeout(20):
            while not opened.requests:
                await asyncio.sleep(0.01)
        (process,) = fronts()
        process.kill()
        with pytest.raises(httpx.TransportError):
            await first
        release.set()
        retry = {"x-stainless-retry-count": "1"}
        reply = await client.post(url, json={"messages": [USER]}, headers=retry)
        assert reply.json()["choices"][0]["message"]["content"] == "one"
        assert (len(opened.session.tree.nodes), opened.session.tree.nodes[0].is_delivered) == (1, True)
        assert len(fronts()) == 1

    run(Held(bpe_tokenizer("plain"), "one", "two"), body, is_shared=False)
    assert "was killed by signal 9; it is started again" in caplog.text
    assert fronts() == []


@pytest.mark.slow
def test_a_process_that_ends_again_and_again_is_an_error_of_the_next_session():
    script = Script(bpe_tokenizer("plain"))

    async def open_and_kill(server: SessionServer, session: Session) -> None:
        while True:
            for process in fronts():
                process.kill()
            await asyncio.sleep(0.05)
            await server.end(server.open(session, nothing))

    async def main() -> None:
        server = SessionServer()
        session = Session(ChatFormat(script.tokenizer), script, name="s", params=SamplingParams())
        try:
            with pytest.raises(EngineError, match=r"was killed by signal 9.*, the last of 3 ends in 60 s"):
                await asyncio.wait_for(open_and_kill(server, session), 60)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(server.address, timeout=5)
        finally:
            await server.close()

    asyncio.run(main())


def test_a_session_starts_the_process():
    script = Script(bpe_tokenizer("plain"))

    async def main() -> None:
        server = SessionServer()
        await server.start()
        await asyncio.sleep(0.05)
        assert fronts() == []
        server.open(Session(ChatFormat(script.tokenizer), script, name="s", params=SamplingParams()), nothing)
        async with asyncio.timeout(20):
            while not fronts():
                await asyncio.sleep(0.01)
        await server.close()
        assert fronts() == []

    asyncio.run(main())


@pytest.mark.slow
def test_health_is_answered_while_the_event_loop_of_the_run_is_held():
    async def body(client: httpx.AsyncClient, opened: OpenSession) -> None:
        address = opened.url.partition("/sessions")[0]
        (await client.get(f"{address}/health")).raise_for_status()  # the process has started

        def ask() -> float:
            began = time.monotonic()
            with urllib.request.urlopen(f"{address}/health", timeout=10) as reply:
                assert reply.status == 200
            return time.monotonic() - began

        asking = asyncio.get_running_loop().run_in_executor(None, ask)
        time.sleep(3)
        assert await asking < 1

    run(Script(bpe_tokenizer("plain")), body)


_SERVES = """
import asyncio, psutil, sys
from furlong.sessions.session_offers import SessionOffers
from furlong.sessions.session_server import SessionServer
async def main():
    server = SessionServer(offers=SessionOffers(None))
    await server.start()
    print(server.address[1], psutil.Process().children()[0].pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.slow
def test_the_process_and_its_port_end_with_the_run_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", _SERVES], stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        port, pid = map(int, served.stdout.readline().split())
        os.kill(pid, signal.SIGTERM)  # of a terminal or a job manager: the run decides when it ends
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
        served.kill()
    end = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the process outlives the run"
        time.sleep(0.02)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.slow
def test_large_messages_that_are_refused_leave_no_memory_behind():
    mib = 1 << 20

    async def body(client: httpx.AsyncClient, opened: OpenSession) -> list[int]:
        (front,) = fronts()
        used: list[int] = []
        for text in ("short", *["a " * (4 * mib)] * 4):
            request = {"messages": [{"role": "user", "content": text}]}
            used.append(front.memory_info().rss)
            await client.post(f"{opened.url}/v1/chat/completions", json=request)
        async with asyncio.timeout(10):
            while front.memory_info().rss > used[1] + 4 * mib:  # one of them has 8 MiB
                await asyncio.sleep(0.1)
        return used

    run(Script(bpe_tokenizer("qwen"), "one"), body, is_shared=False)
