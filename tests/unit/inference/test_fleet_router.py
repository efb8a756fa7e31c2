"""A router that hangs, or does not come up, and engines that are replaced behind it. Nothing is started here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from furlong.config.sections import FaultFlags
from furlong.errors import EngineError
from furlong.inference.sglang.http_engine import HttpEngine
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_info import ServerInfo
from furlong.inference.supervisor.engine_process import EngineReplica
from furlong.inference.supervisor.replica_set import ReplicaSet


class FakeFront:
    """A router that hangs from its first command on, until it is ended; of its starts the numbers `fails` fail."""

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

    async def exit_reason(self) -> str:
        return "the router was ended by signal 9" if self.ended.is_set() else ""

    async def hang_reason(self, timeout_s: float) -> str:
        return "the router hangs" if self.is_stuck else ""


def fleet_of(front: FakeFront, folder: Path, heard: list[str], *, max_restarts: int) -> ReplicaSet:
    launch: Any = None  # there are no engines
    fault = FaultFlags(
        use_fault_tolerance=True,
        rollout_health_check_interval=0.01,
        rollout_health_check_timeout=0.01,
        rollout_max_engine_restarts=max_restarts,
    )
    return ReplicaSet(
        launch, [], HttpEngine([], is_supervised=True), folder, fault=fault, router=front,
        on_event=lambda name, **_: heard.append(name),
    )  # fmt: skip


def test_a_router_that_hangs_is_ended_although_an_engine_waits_to_be_taken_out_of_it(tmp_path):
    async def body() -> None:
        front, heard = FakeFront(), list[str]()
        fleet = fleet_of(front, tmp_path, heard, max_restarts=1)
        await fleet.start()
        try:
            async with asyncio.timeout(20):
                await fleet._update_router(front, front.remove("http://engine"))
                while "router_restarted" not in heard:
                    await asyncio.sleep(0.001)
        finally:
            await fleet.close()
        assert heard == ["engines_started", "router_lost", "router_restarted"]
        assert fleet.engine.pool.failure is None

    asyncio.run(body())


@pytest.mark.parametrize(("max_restarts", "comes_back"), [(3, True), (2, False)])
def test_a_router_that_does_not_come_up_is_tried_again_as_often_as_is_allowed(max_restarts, comes_back, tmp_path):
    async def body() -> None:
        front, heard = FakeFront(fails=(2, 3)), list[str]()
        fleet = fleet_of(front, tmp_path, heard, max_restarts=max_restarts)
        await fleet.start()
        pool = fleet.engine.pool
        try:
            front.ended.set()  # it dies
            async with asyncio.timeout(20):
                while "router_restarted" not in heard and pool.failure is None:
                    await asyncio.sleep(0.001)
        finally:
            await fleet.close()
        assert (pool.failure is None, front.num_starts) == (comes_back, max_restarts + 1)
        assert comes_back or "--rollout-max-engine-restarts 2;" in str(pool.failure)

    asyncio.run(body())


def test_what_goes_wrong_where_nobody_awaits_it_ends_the_run(tmp_path):
    class OnFullDisk(FakeFront):
        async def hang_reason(self, timeout_s: float) -> str:
            raise OSError(28, "No space left on device")

    fleet = fleet_of(OnFullDisk(), tmp_path, [], max_restarts=1)

    async def body():
        await fleet.start()
        await asyncio.wait_for(fleet.engine.pool.usable(), 5)

    with pytest.raises(EngineError, match=r"OSError while .*No space left.*--load"):
        asyncio.run(body())


class NeverTakes(FakeFront):
    """A router that does not take an engine in, which `dies` meanwhile."""

    def __init__(self, dies: asyncio.Event) -> None:
        super().__init__()
        self.dies, self.removed = dies, list[str]()

    async def add(self, server: SglangServer) -> None:
        self.dies.set()
        await asyncio.Event().wait()

    async def remove(self, url: str) -> None:
        self.removed.append(url)


def test_an_engine_that_dies_while_the_router_takes_it_in_is_started_again(tmp_path, monkeypatch):
    url = "http://127.0.0.1:1"

    async def bring_up(replica: EngineReplica, *args: Any, **options: Any) -> None:
        replica.server = SglangServer(url, ServerInfo.read({}))
        replica.server.is_paused = True  # its health checks rest: nobody is there

    monkeypatch.setattr(EngineReplica, "bring_up", bring_up)

    async def body() -> None:
        front = NeverTakes(asyncio.Event())
        fleet, replica = fleet_of(front, tmp_path, [], max_restarts=1), EngineReplica(0, [])
        await bring_up(replica)

        async def stop(grace_s: float) -> None: ...

        async def exit_reason() -> str:
            return "engine 0 was ended by signal 9" if front.dies.is_set() else ""

        process: Any = SimpleNamespace(exit_reason=exit_reason, stop=stop)
        replica.process = process
        assert replica.server is not None
        fleet.engine.pool.add(replica.server)
        with pytest.raises(EngineError, match=r"engine 0 was ended by signal 9\n.* 1 times"):
            await asyncio.wait_for(fleet._replace(replica, "it hangs", 0.0), 5)
        assert front.removed == [url, url]  # when it was lost, and when it did not come back
        assert fleet.engine.servers == []

    asyncio.run(body())
