from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from furlong.build import Built


def test_everything_is_closed_in_order_whatever_raises():
    closed: list[str] = []

    def closes(name: str, *, is_async: bool = True):
        async def close() -> None:
            close_now()

        def close_now() -> None:
            closed.append(name)
            raise OSError(name)

        return SimpleNamespace(close=close if is_async else close_now)

    built = SimpleNamespace(
        serving=closes("serving"),
        parts=SimpleNamespace(trainer=closes("trainer"), source=closes("source", is_async=False)),
        rewards=[closes("reward")],
        cluster=closes("cluster", is_async=False),
    )
    with pytest.raises(OSError, match="cluster"):
        asyncio.run(Built.close(built))  # pyright: ignore[reportArgumentType]
    assert closed == ["serving", "trainer", "source", "reward", "cluster"]
