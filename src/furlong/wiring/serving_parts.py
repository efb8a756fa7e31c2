"""Builds what generates: the engine, its servers and their watches, the way of weights to it, who has the devices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from furlong.config.checks.engine_checks import is_started
from furlong.diagnosis.monitors.run_monitor import RunMonitor
from furlong.errors import ConfigError
from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.sglang.http_engine import HttpEngine
from furlong.inference.sglang.load_watch import LoadWatch
from furlong.inference.sglang.router import SglangRouter
from furlong.inference.sglang.silence_watch import SilenceWatch
from furlong.inference.supervisor.fleet import Fleet
from furlong.inference.supervisor.periodic import Repeated
from furlong.interfaces import DeviceSharing, Trainer, WeightSync
from furlong.loop.device_sharing import Colocated, SeparateDevices
from furlong.training.frozen_trainer import FrozenTrainer
from furlong.weight_sync.no_sync import NoEngines
from furlong.weight_sync.remote_sync import RemoteSync
from furlong.wiring.cluster_parts import Cluster
from furlong.wiring.engine_parts import build_engine, build_sync
from furlong.wiring.server_parts import build_fleets, build_routers
from furlong.wiring.shared import Shared

Start = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Serving:
    """The engine of a run, None where nothing is generated, and what belongs to it.

    shared: as it came, with the addresses of routers in what functions of the user's get as `args`.
    """

    shared: Shared
    engine: EmbeddedEngine | HttpEngine | None
    sync: WeightSync
    device_sharing: DeviceSharing
    fleets: Sequence[Fleet] = ()
    watches: Sequence[Repeated] = ()

    @staticmethod
    def nothing(shared: Shared) -> Serving:
        """No engine."""
        return Serving(shared, None, NoEngines(), SeparateDevices())

    @property
    def starting(self) -> list[Start]:
        """How to start what of it runs elsewhere or on its own; all at the same time."""
        return [part.start for part in (*self.fleets, *self.watches)]

    async def close(self) -> None:
        """End requests, connections and processes: all of them, whichever raises."""
        async with contextlib.AsyncExitStack() as stack:  # the last one first
            for part in (*self.fleets, *self.watches):
                stack.push_async_callback(part.close)
            if self.engine is not None:
                stack.push_async_callback(self.engine.close)
            if isinstance(self.sync, RemoteSync):
                stack.push_async_callback(self.sync.close)


def build_serving(
    shared: Shared, trainer: Trainer, cluster: Cluster | None, watch: RunMonitor, opened: contextlib.ExitStack
) -> Serving:
    """Build the engine and what belongs to it; `opened` hears how to close it. Raises ConfigError."""
    if routers := build_routers(shared):
        shared = shared.with_routers(asyncio.run(_addresses(routers)))
        opened.callback(lambda: asyncio.run(_let_go(routers)))
    engine = build_engine(shared)
    opened.callback(lambda: asyncio.run(engine.close()))
    sync = NoEngines() if isinstance(trainer, FrozenTrainer) else build_sync(shared, trainer, engine)
    device_sharing = _device_sharing(shared, trainer, engine)
    fleets: list[Fleet] = []
    watches: list[Repeated] = []
    if isinstance(engine, HttpEngine):
        if is_started(shared.config):
            fleets = _fleets(shared, engine, sync, device_sharing, cluster, watch, routers)
        watches.append(Repeated(LoadWatch(engine.pool).look))
        if not shared.config.fault.use_fault_tolerance:
            watches.append(Repeated(SilenceWatch(engine.pool, watch.notify).look))
    return Serving(shared, engine, sync, device_sharing, fleets, watches)


async def _addresses(routers: Mapping[str, SglangRouter]) -> dict[str, tuple[str, int]]:
    """Where the routers will be."""
    return {name: await router.reserve() for name, router in routers.items()}


async def _let_go(routers: Mapping[str, SglangRouter]) -> None:
    """Give back the ports of routers that are not started."""
    for router in routers.values():
        await router.close()


def _fleets(
    shared: Shared,
    engine: HttpEngine,
    sync: WeightSync,
    device_sharing: DeviceSharing,
    cluster: Cluster | None,
    watch: RunMonitor,
    routers: Mapping[str, SglangRouter],
) -> list[Fleet]:
    """The servers that the run starts, on this machine or where the cluster places them."""
    fleets = build_fleets(
        shared,
        engine,
        sync,
        routers,
        on_event=watch.notify,
        places=None if cluster is None else cluster.engine_places(),
        first_ranks=() if cluster is None else cluster.first_ranks,
    )
    if isinstance(device_sharing, Colocated):
        fleets[0].room = device_sharing
    return fleets


def _device_sharing(shared: Shared, trainer: Trainer, engine: EmbeddedEngine | HttpEngine) -> DeviceSharing:
    """Who owns the devices. Raises ConfigError for a trainer that cannot leave them."""
    cluster = shared.config.cluster
    if not (cluster.offload_train or cluster.offload_rollout) or not isinstance(engine, HttpEngine):
        return SeparateDevices()
    if shared.config.debug.debug_rollout_only:
        raise ConfigError(
            "--debug-rollout-only: there is no trainer to offload; remove --debug-rollout-only, or --offload"
        )
    return Colocated(
        trainer, engine, offload_train=bool(cluster.offload_train), offload_rollout=bool(cluster.offload_rollout)
    )
