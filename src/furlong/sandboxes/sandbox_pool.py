"""Sandboxes that are opened ahead of the episodes that use them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping

from furlong.errors import ConfigError
from furlong.sandboxes.code_sandbox import CodeSandbox, SandboxLimits, build_sandbox, opened


class SandboxPool:
    """Keeps `size` open sandboxes ready. Each is used once, and deleted after its use.

    episode_s: the longest use. A sandbox that would live shorter than that is replaced by a new one, so the `ttl_s` of
    the limits must be longer; otherwise ConfigError is raised.

    >>> pool = SandboxPool(size=8, image="python:3.12", episode_s=600)  # doctest: +SKIP
    >>> async with pool.take() as s: ...  # doctest: +SKIP
    """

    def __init__(
        self,
        size: int,
        image: str | None = None,
        limits: SandboxLimits | None = None,
        *,
        episode_s: float = 600.0,
        backend: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._limits = limits or SandboxLimits()
        if self._limits.ttl_s <= episode_s:
            raise ConfigError(
                f"sandboxes live for ttl_s={self._limits.ttl_s:g} s, but an episode may take "
                f"episode_s={episode_s:g} s; raise ttl_s above it"
            )
        if size < 1:
            raise ConfigError(f"SandboxPool has size {size}; keep at least 1 sandbox ready")
        self._image, self._backend, self._environment = image, backend, environment
        self._size, self._episode_s = size, episode_s
        self._ready: list[tuple[float, asyncio.Task[CodeSandbox]]] = []

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncGenerator[CodeSandbox]:
        """Use a ready sandbox in the body. Raises InfraError if none can be opened."""
        self._fill()
        while True:
            until, task = self._ready.pop(0)
            if time.monotonic() + self._episode_s < until:
                break
            await _discard(task)
            self._fill()
        self._fill()
        try:
            taken = await task
        except asyncio.CancelledError:
            await _discard(task)
            raise
        try:
            yield taken
        finally:
            await taken.close()

    async def close(self) -> None:
        """Delete the sandboxes that are ready."""
        ready, self._ready = self._ready, []
        await asyncio.gather(*(_discard(task) for _, task in ready))

    def _fill(self) -> None:
        while len(self._ready) < self._size:
            made = build_sandbox(self._image, self._limits, backend=self._backend, environment=self._environment)
            self._ready.append((time.monotonic() + self._limits.ttl_s, asyncio.create_task(opened(made))))


async def _discard(task: asyncio.Task[CodeSandbox]) -> None:
    task.cancel()
    done = (await asyncio.gather(task, return_exceptions=True))[0]
    if not isinstance(done, BaseException):
        await done.close()
