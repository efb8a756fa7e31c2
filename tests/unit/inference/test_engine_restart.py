"""Engines that fail to start, or to load their weights after a restart. No process is started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from furlong.errors import ENGINE_HANGS, ENGINE_UNANSWERED, EngineError, SyncError, UnreachableError
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.inference.supervisor.replica import EngineReplica
from furlong.inference.supervisor.supervisor import ReplicaSet
from furlong.weight_sync.transports.transport import late_fields


@pytest.mark.parametrize("is_broken", [False, True])
def test_an_engine_that_does_not_answer_a_weight_load_is_lost(is_broken, tmp_path):
    server = SglangServer("http://127.0.0.1:1", ServerInfo.read({}))
    server.stale = "it has the weights of its folder only"

    class BrokenLoader:
        async def load_into(self, server: SglangServer, version: int) -> None:
            if is_broken:
                raise SyncError(f"{server.url}: closed", broken={server.url: "closed"})
            what = late_fields(version, 1.0, [server.url], transport="ipc")
            raise SyncError(f"{server.url}: did not answer within 1 s", late=what)

    replicas = ReplicaSet([], [], HttpEngine([], is_supervised=True), tmp_path, weights=BrokenLoader())
    replicas._replicas = [EngineReplica(0, [], _past_versions=[3])]

    with pytest.raises(EngineError, match="closed" if is_broken else "within 1 s") as caught:
        asyncio.run(asyncio.wait_for(replicas._load_weights(server), 5))
    assert caught.value.code == (ENGINE_UNANSWERED if is_broken else ENGINE_HANGS)


def test_an_engine_is_disconnected_if_another_one_fails_to_start(tmp_path, monkeypatch):
    server = SglangServer("http://127.0.0.1:1", ServerInfo.read({}))

    async def bring_up(replica: EngineReplica, *args: Any, **options: Any) -> SglangServer:
        if replica.index:
            raise EngineError("out of memory")
        replica.server = server
        return server

    monkeypatch.setattr(EngineReplica, "bring_up", bring_up)

    async def body() -> None:
        launch: Any = None  # nothing is started
        replicas = ReplicaSet([launch] * 2, [[], []], HttpEngine([], is_supervised=True), tmp_path)
        with pytest.raises(EngineError, match="out of memory"):
            await replicas.start()
        with pytest.raises(UnreachableError, match="is closed"):
            await server.ask("/health")

    asyncio.run(body())
