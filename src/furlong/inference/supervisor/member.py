"""One engine of a fleet, through all of its restarts: how it is started, and whether it lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from furlong.errors import ConfigError
from furlong.inference.sglang.client import PROBE_S
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_info import ServerInfo
from furlong.inference.supervisor.host import Place
from furlong.inference.supervisor.server_launch import Launch, LaunchedEngine, start_engine

logger = logging.getLogger(__name__)

DEAD_S = 0.0  # grace for a process that is given up
ENDING_S = 0.5  # for a process whose connections broke to have ended: the kernel closes them before that shows
LOOK_S = 0.02  # between two looks whether it has


@dataclass(frozen=True)
class Clients:
    """How this process talks to each server."""

    concurrency: int = 512
    timeout_s: float = 14400.0
    probe_s: float = PROBE_S
    min_context_len: int | None = None


@dataclass(eq=False)
class Member:
    """Engine `index`. `first_rank` is the trainer rank on its first GPU, where they share GPUs."""

    index: int
    places: Sequence[Place]
    first_rank: int = 0
    launched: LaunchedEngine | None = None
    server: SglangServer | None = None
    _had: list[int] = field(default_factory=list[int])

    @property
    def name(self) -> str:
        """Number and, once it was started, address and process."""
        return f"engine {self.index}" if self.launched is None else self.launched.where

    @property
    def version(self) -> int | None:
        """The newest weights that it has had, before it was started again too; None if it never had any."""
        return max([*self._had, *self._versions()], default=None)

    def _versions(self) -> list[int]:
        return [] if self.server is None or self.server.version is None else [self.server.version]

    async def bring_up(self, launch: Launch, clients: Clients, *, log_dir: Path, timeout_s: float) -> None:
        """Start it and wait until it answers; `server` is its client then.

        Raises EngineError with its log if it does not come up, and ConfigError if its context is too short.
        """
        self._had += self._versions()
        self.server = None
        self.launched = await start_engine(launch, self.index, self.places, log_dir=log_dir)
        await self.launched.wait_until_up(timeout_s)
        server = SglangServer(
            self.launched.url,
            ServerInfo.read({}),
            api_key=launch.api_key,
            concurrency=clients.concurrency,
            timeout_s=clients.timeout_s,
            probe_s=clients.probe_s,
        )
        server.role, server.bootstrap_port = self.launched.role, self.launched.bootstrap_port
        server.first_rank = self.first_rank
        server.info = info = ServerInfo.read(await server.ask("/server_info"))
        wanted = clients.min_context_len
        if wanted is not None and info.context_len is not None and info.context_len < wanted:
            await server.close()
            raise ConfigError(
                f"--rollout-max-context-len {wanted} is more than the {info.context_len} tokens of the engine at "
                f"{server.url}; lower it or --sglang-context-length {wanted}"
            )
        logger.info("engine %s: %s, dtype %s, tp %d", server.url, info.software, info.dtype, info.tp_size)
        if server.device_dtypes:
            await server.checksums()  # compiles its kernels, which the first publication would wait for
        if not info.is_furlong:
            await server.freeze_objects()
        self.server = server

    async def death(self) -> str:
        """Why it is lost: its process ended, or a request found nobody there; "" as long as neither is known."""
        assert self.launched is not None
        assert self.server is not None
        why = await self.launched.death()
        if why or not self.server.lost:
            return why
        deadline = time.monotonic() + ENDING_S
        while not why and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
            why = await self.launched.death()
        return why or f"{self.name} {self.server.lost}; {await self.launched.last_lines()}"

    async def hangs(self, timeout_s: float) -> str:
        """Why it does not generate although it should; "" if it does, or should not at the moment."""
        server = self.server
        assert self.launched is not None
        assert server is not None
        if why := await server.is_silent(timeout_s):
            return f"{self.name} hangs: {why}; {await self.launched.last_lines()}"
        return ""

    async def stop(self) -> None:
        """End its processes at once; they may be gone already."""
        if self.launched is not None:
            with contextlib.suppress(ProcessLookupError):
                await self.launched.stop(DEAD_S)


async def stop_all(members: Sequence[Member]) -> None:
    """End the processes of all of these in good order; returns when they are gone."""
    await asyncio.gather(*(member.launched.stop() for member in members if member.launched is not None))
