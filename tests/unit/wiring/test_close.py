from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from furlong.interfaces import DeviceSharing
from furlong.weight_sync.remote_sync import RemoteSync
from furlong.wiring.build import Built
from furlong.wiring.engine import ServingParts


def closing(closed: list[str], name: str, *, is_async: bool = True) -> Any:
    """A part that records its close and fails in it."""

    async def close() -> None:
        close_now()

    def close_now() -> None:
        closed.append(name)
        raise OSError(name)

    return SimpleNamespace(close=close if is_async else close_now)


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
    assert closed == ["sync", "engine", "supervisor"]
