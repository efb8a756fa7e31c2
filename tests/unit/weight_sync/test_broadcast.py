"""BroadcastTransport against scripted servers: refusals are errors at once; nothing waits for an absent peer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from fakes_engine import run, tiny_model
from furlong.errors import SyncError
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.weight_sync.remote_sync import LocalSync
from furlong.weight_sync.transports.broadcast import BroadcastTransport
from served_engine import ScriptedServer, Untrained
from transport_context import transport_context

STATE = {name: tensor.clone() for name, tensor in tiny_model("qwen2")[1].state_dict().items()}


@contextlib.contextmanager
def refusing(status, message, **info):
    async def answer(path, body):
        return status, {"success": False, "message": message}

    server = ScriptedServer(answer)
    client = SglangServer(server.url, ServerInfo.read({"version": "0.5.16", **info}))

    async def servers():
        return [client]

    try:
        yield (
            server,
            client,
            LocalSync(Untrained(STATE), servers, BroadcastTransport(transport_context(4096))),
        )
    finally:
        server.stop()


@pytest.mark.parametrize("status", [200, 400])
def test_a_server_that_does_not_join_is_an_error_at_once(status):
    with refusing(status, "the group exists") as (server, client, sync):

        async def body():
            with pytest.raises(SyncError, match=rf"1 of 1 engines failed to join.*{server.url}.*the group exists"):
                await sync.update_weights(1)

        started = time.monotonic()
        run(client, body)
        assert time.monotonic() - started < 20  # not the 300 s of the group
        (path, asked), *_ = server.asked
        assert path == "/init_weights_update_group"
        assert (asked["rank_offset"], asked["world_size"], asked["backend"]) == (1, 2, "gloo")
        assert asked["master_address"] == "127.0.0.1"


def test_processes_that_share_attention_in_data_parallel_are_all_of_the_group():
    with refusing(400, "not today", tp_size=4, dp_size=2, enable_dp_attention=True) as (server, client, sync):

        async def body():
            with pytest.raises(SyncError, match="not today"):
                await sync.update_weights(1)

        run(client, body)
        assert server.asked[0][1]["world_size"] == 5


def test_layout_that_broadcast_does_not_support_is_refused_with_a_fix():
    with refusing(200, "", pp_size=2) as (server, client, sync):

        async def body():
            with pytest.raises(SyncError, match=r"pp_size 2.*--update-weight-transport disk"):
                await sync.update_weights(1)

        run(client, body)
        assert server.asked == []


def test_server_without_a_usable_address_is_an_error_with_a_fix(monkeypatch):
    def unknown(host, port, kind):
        raise OSError(-2, f"{host} is not known")

    monkeypatch.setattr("furlong.weight_sync.transports.broadcast.socket_for", unknown)

    async def servers():
        return [SglangServer("http://[::1]:9", ServerInfo.read({"version": "0.5.16"}))]

    async def body():
        with pytest.raises(SyncError, match=r"no route to http://\[::1\]:9: .*--update-weight-transport disk"):
            await LocalSync(Untrained(STATE), servers, BroadcastTransport(transport_context(9))).update_weights(1)

    asyncio.run(body())


@contextlib.contextmanager
def joining(hangs: str):
    """A server that joins the group and receives nothing, its client, and the end of its requests to path `hangs`."""
    members: list[ProcessGroupGloo] = []
    stuck = threading.Event()

    def join(asked: dict[str, Any]) -> None:
        store: Store = TCPStore(asked["master_address"], asked["master_port"], 2, is_master=False)
        for prefix in (asked["group_name"], f"{asked['group_name']}/", "cpu/"):  # as torch's groups have them
            store = PrefixStore(prefix, store)
        members.append(ProcessGroupGloo(store, 1, 2, timedelta(seconds=60)))

    async def answer(path, body):
        if path == "/init_weights_update_group":
            await asyncio.to_thread(join, body)
        if path == hangs:
            await asyncio.to_thread(stuck.wait)
        return 200, {"success": True}

    server = ScriptedServer(answer)
    try:
        yield server, SglangServer(server.url, ServerInfo.read({"version": "0.5.16"}))
    finally:
        stuck.set()
        members.clear()
        server.stop()


def test_a_server_that_joins_and_then_stops_is_named_after_its_limit_and_the_group_is_left_behind():
    with joining("/update_weights_from_distributed") as (server, client):

        async def servers():
            return [client]

        async def body():
            transport = BroadcastTransport(transport_context(4096, timeout=2))  # in which it joins, too
            with pytest.raises(SyncError, match=rf"receive bucket 0 .*{server.url}: did not answer within 2 s"):
                await LocalSync(Untrained(STATE), servers, transport).update_weights(1)

        started = time.monotonic()
        run(client, body)
        assert time.monotonic() - started < 30  # gloo's own limit is the server's, and not minutes


@pytest.mark.parametrize("hangs", ["/init_weights_update_group", "/update_weights_from_distributed"])
def test_an_update_that_is_cancelled_leaves_no_requests_behind(hangs):
    with joining(hangs) as (server, client):

        async def servers():
            return [client]

        async def body():
            transport = BroadcastTransport(transport_context(4096, timeout=2))
            update = asyncio.create_task(LocalSync(Untrained(STATE), servers, transport).update_weights(1))
            while hangs not in [path for path, _ in server.asked]:
                await asyncio.sleep(0.001)
            update.cancel()
            await asyncio.wait([update])
            assert asyncio.all_tasks() == {asyncio.current_task()}

        run(client, body)
