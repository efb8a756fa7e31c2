from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from furlong.config.sections import Config, FaultFlags
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.inference.supervisor.replica import EngineReplica
from furlong.inference.supervisor.supervisor import EngineSupervisor, ReplicaSet
from furlong.interfaces import DeviceSharing
from furlong.weight_sync.remote_sync import RemoteSync
from furlong.wiring.build import Built
from furlong.wiring.engine import ServingParts


def closing(closed: list[str], name: str, *, is_async: bool = True) -> Any:
    """A part that records its close, and the end of its watching, and fails in both."""

    async def close() -> None:
        close_now()

    def close_now() -> None:
        closed.append(name)
        raise OSError(name)

    async def stop_watching() -> None:
        closed.append(f"watching {name}")
        raise OSError(name)

    return SimpleNamespace(close=close if is_async else close_now, stop_watching=stop_watching)


def test_everything_is_closed_in_order_whatever_raises():
    closed: list[str] = []
    closes = partial(closing, closed)
    built = SimpleNamespace(
        serving=closes("serving"),
        parts=SimpleNamespace(trainer=closes("trainer"), source=closes("source", is_async=False)),
        checkpoints=SimpleNamespace(inputs=closes("inputs", is_async=False)),
        rewards=[closes("reward")],
        cluster=closes("cluster", is_async=False),
        hooks=SimpleNamespace(tear_down=closes("hooks").close),
        listeners=[],
    )
    with pytest.raises(OSError, match="cluster"):
        asyncio.run(Built.close(built))  # pyright: ignore[reportArgumentType]
    assert closed == ["serving", "trainer", "inputs", "source", "reward", "hooks", "cluster"]


def test_engines_are_stopped_although_closing_the_weight_sync_fails(monkeypatch):
    closed: list[str] = []
    closes = partial(closing, closed)
    monkeypatch.setattr(RemoteSync, "close", lambda _: closes("sync").close())
    sync = RemoteSync(closes("ranks"), closes("servers"), name="test")
    serving = ServingParts(closes("engine"), sync, DeviceSharing(), closes("supervisor"))
    with pytest.raises(OSError, match="supervisor"):
        asyncio.run(serving.close())
    assert closed == ["watching supervisor", "sync", "engine", "supervisor"]


class SlowToClose(SglangServer):
    """A server that passes its health checks, records them, and takes a while to close."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", ServerInfo.read({}))
        self.asked = list[str]()

    async def generation_error(self, timeout_s: float) -> str:
        self.asked.append("health")
        return ""

    async def close(self) -> None:
        self.asked.append("close")
        await asyncio.sleep(0.1)
        await super().close()


def test_no_health_check_begins_while_the_engine_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr("furlong.inference.supervisor.supervisor.POLL_S", 0.001)
    monkeypatch.setattr(EngineReplica, "bring_up", bring_up)
    config = Config(fault=FaultFlags(use_fault_tolerance=True, rollout_health_check_interval=0.001))

    async def body() -> list[str]:
        engine = HttpEngine([], is_supervised=True)
        supervisor = EngineSupervisor(config, engine, on_event=lambda name, **_: None, log_dir=tmp_path)
        launch: Any = None  # nothing is started
        supervisor._replica_sets.append(ReplicaSet([launch], [[]], engine, tmp_path, config))
        await supervisor.start()
        [server] = engine.servers
        assert isinstance(server, SlowToClose)
        async with asyncio.timeout(20):
            while "health" not in server.asked:
                await asyncio.sleep(0.001)
        await ServingParts(engine, supervisor=supervisor).close()
        return server.asked

    asked = asyncio.run(body())
    assert "health" not in asked[asked.index("close") :]


async def bring_up(replica: EngineReplica, *args: Any, **options: Any) -> SglangServer:
    """Connect a replica to a process that does nothing."""

    async def nothing(grace_s: float = 0.0) -> None: ...

    process: Any = SimpleNamespace(exit_loss=nothing, stop=nothing)
    replica.process, replica.server = process, SlowToClose()
    return replica.server
