"""Restarts of the router, and of engines behind it, with a fake router. No process is started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from furlong.config.sections import Config, FaultFlags
from furlong.errors import ENGINE_HANGS, ENGINE_KILLED, EngineError, Loss
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.inference.supervisor.replica import EngineReplica
from furlong.inference.supervisor.supervisor import ReplicaSet


class FakeRouter:
    """A router that hangs from its first command until it is closed. Starts number `fails` fail."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.fails, self.num_starts, self.is_stuck = fails, 0, False
        self.ended = asyncio.Event()

    async def start(self) -> SglangServer:
        self.num_starts += 1
        if self.num_starts in self.fails:
            raise EngineError("the router did not answer within 120 s")
        self.ended.clear()
        return SglangServer("http://router", ServerInfo.read({}))

    async def close(self) -> None:
        self.is_stuck = False
        self.ended.set()

    async def remove(self, url: str) -> None:
        self.is_stuck = True
        await self.ended.wait()
        raise EngineError(f"no answer about {url}")

    async def add(self, server: SglangServer) -> None:
        raise AssertionError

    async def exit_loss(self) -> Loss | None:
        return Loss("signal 9", ENGINE_KILLED, "the router") if self.ended.is_set() else None

    async def hang_loss(self, timeout_s: float) -> Loss | None:
        return Loss("it hangs", ENGINE_HANGS, "the router") if self.is_stuck else None


def replica_set_of(router: FakeRouter, folder: Path, events: list[str], *, max_restarts: int) -> ReplicaSet:
    launch: Any = None  # nothing is started
    fault = FaultFlags(
        use_fault_tolerance=True,
        rollout_health_check_interval=0.01,
        rollout_health_check_timeout=0.01,
        rollout_max_engine_restarts=max_restarts,
    )
    return ReplicaSet(
        [launch], [], HttpEngine([], is_supervised=True), folder, config=Config(fault=fault), router=router,
        on_event=lambda name, **_: events.append(name),
    )  # fmt: skip


def test_a_hanging_router_is_restarted_while_an_engine_is_being_removed_from_it(tmp_path):
    async def body() -> None:
        router, events = FakeRouter(), list[str]()
        replicas = replica_set_of(router, tmp_path, events, max_restarts=1)
        await replicas.start()
        try:
            async with asyncio.timeout(20):
                await replicas._update_router(router, router.remove("http://engine"))
                while "router_restarted" not in events:
                    await asyncio.sleep(0.001)
        finally:
            await replicas.close()
        assert events == ["engines_started", "router_lost", "router_restarted"]
        assert replicas.engine.pool.failure is None

    asyncio.run(body())


@pytest.mark.parametrize(("max_restarts", "comes_back"), [(3, True), (2, False)])
def test_a_router_is_restarted_up_to_the_limit(max_restarts, comes_back, tmp_path):
    async def body() -> None:
        router, events = FakeRouter(fails=(2, 3)), list[str]()
        replicas = replica_set_of(router, tmp_path, events, max_restarts=max_restarts)
        await replicas.start()
        pool = replicas.engine.pool
        try:
            router.ended.set()  # it dies
            async with asyncio.timeout(20):
                while "router_restarted" not in events and pool.failure is None:
                    await asyncio.sleep(0.001)
        finally:
            await replicas.close()
        assert (pool.failure is None, router.num_starts) == (comes_back, max_restarts + 1)
        assert comes_back or "--rollout-max-engine-restarts 2;" in str(pool.failure)

    asyncio.run(body())


def test_an_error_in_the_supervisor_fails_the_requests(tmp_path):
    class OnFullDisk(FakeRouter):
        async def hang_loss(self, timeout_s: float) -> Loss | None:
            raise OSError(28, "No space left on device")

    replicas = replica_set_of(OnFullDisk(), tmp_path, [], max_restarts=1)

    async def body():
        await replicas.start()
        await asyncio.wait_for(replicas.engine.pool.usable(), 5)

    with pytest.raises(EngineError, match=r"OSError while .*No space left.*--load"):
        asyncio.run(body())


class NeverAdds(FakeRouter):
    """A router that never finishes adding an engine, which `dies` meanwhile."""

    def __init__(self, dies: asyncio.Event) -> None:
        super().__init__()
        self.dies, self.removed = dies, list[str]()

    async def add(self, server: SglangServer) -> None:
        self.dies.set()
        await asyncio.Event().wait()

    async def remove(self, url: str) -> None:
        self.removed.append(url)


def test_an_engine_that_dies_while_the_router_adds_it_is_restarted(tmp_path, monkeypatch):
    url = "http://127.0.0.1:1"

    async def bring_up(replica: EngineReplica, *args: Any, **options: Any) -> SglangServer:
        replica.server = SglangServer(url, ServerInfo.read({}))
        replica.server.is_paused = True  # no health checks: there is no process
        return replica.server

    monkeypatch.setattr(EngineReplica, "bring_up", bring_up)

    async def body() -> None:
        router = NeverAdds(asyncio.Event())
        replicas, replica = replica_set_of(router, tmp_path, [], max_restarts=1), EngineReplica(0, [])
        await bring_up(replica)

        async def stop(grace_s: float) -> None: ...

        async def exit_loss() -> Loss | None:
            return Loss("signal 9", ENGINE_KILLED, "engine 0") if router.dies.is_set() else None

        process: Any = SimpleNamespace(exit_loss=exit_loss, stop=stop)
        replica.process = process
        assert replica.server is not None
        replicas.engine.pool.add(replica.server)
        with pytest.raises(EngineError, match=r"engine 0: signal 9\n.* 1 times") as caught:
            await asyncio.wait_for(replicas._replace(replica, Loss("it hangs", ENGINE_HANGS), 0.0), 5)
        assert caught.value.code == ENGINE_KILLED
        assert router.removed == [url, url]  # when it was lost, and when the restart failed
        assert replicas.engine.servers == []

    asyncio.run(body())


class Records(FakeRouter):
    """A router that knows the engines that were added since its last start."""

    def __init__(self) -> None:
        super().__init__()
        self.known = list[str]()

    async def start(self) -> SglangServer:
        self.known.clear()
        return await super().start()

    async def add(self, server: SglangServer) -> None:
        self.known.append(server.url)


def test_a_router_that_is_restarted_during_a_weight_update_gets_its_engines_back(tmp_path):
    async def body() -> None:
        router, events = Records(), list[str]()
        replicas = replica_set_of(router, tmp_path, events, max_restarts=1)
        servers = [SglangServer(f"http://127.0.0.1:{port}", ServerInfo.read({})) for port in (1, 2, 3)]
        updating, lost, new = servers
        await replicas.start()
        try:
            for server in (updating, lost):
                await replicas._admit(server)
            assert router.known == [updating.url, lost.url]
            lost.lost = Loss("signal 9", ENGINE_KILLED)
            new.stale = "it only has the weights of its folder"  # it is admitted when it has others
            replicas.engine.pool.add(new)
            updating.begin_loading(2)
            router.ended.set()  # it dies
            async with asyncio.timeout(20):
                while "router_restarted" not in events:
                    await asyncio.sleep(0.001)
            updating.finish_loading(2)
        finally:
            await replicas.close()
        assert router.known == [updating.url]

    asyncio.run(body())
