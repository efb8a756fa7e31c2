"""`EngineSupervisor` keeps the engine servers of a run available, from start to shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from furlong.config.engine_groups import is_split, served_models
from furlong.config.sections import Config
from furlong.inference.sglang.http_engine import HttpEngine
from furlong.inference.supervisor.host import HostGpus
from furlong.inference.supervisor.launch import Launch
from furlong.inference.supervisor.monitors import LoadMonitor, SilenceMonitor
from furlong.inference.supervisor.replica_set import DeviceHandover, OnEvent, ReplicaSet, Router, WeightLoader


class EngineSupervisor:
    """Starts, monitors, replaces and stops the servers behind an `HttpEngine`.

    Servers that the run did not start (--engine external) are only monitored: `launch` and `placements` are None then.
    One replica set per served model holds the engine processes, their router and their health checks. A lost engine of
    any model that cannot be replaced fails the requests of `engine`, which ends the run.

    Args:
        config: The run's configuration.
        engine: Requests for the trained model go through it. The caller closes it, too.
        on_event: Called with the events of `ReplicaSet`, and with `engine_silent` (`SilenceMonitor`).
        launch: How to start each engine, numbered over all models.
        placements: GPUs of each engine, in the same order.
        first_ranks: Trainer rank on the first GPU of each engine, where they share GPUs.
        log_dir: Folder for the logs of the engines.
        routers: Router of each model by name; requests go to the engines directly where there is none.
        weights: Loads the current weights into a restarted engine of the trained model; None if nothing is trained.
        devices: Hands the devices of a colocated trainer to an engine that is restarted.
    """

    def __init__(
        self,
        config: Config,
        engine: HttpEngine,
        *,
        on_event: OnEvent,
        launch: Launch | None = None,
        placements: Sequence[Sequence[HostGpus]] = (),
        first_ranks: Sequence[int] = (),
        log_dir: Path = Path("logs"),
        routers: Mapping[str, Router] | None = None,
        weights: WeightLoader | None = None,
        devices: DeviceHandover | None = None,
    ) -> None:
        self._replica_sets: list[ReplicaSet] = []
        self._monitors: list[Callable[[], Coroutine[Any, Any, None]]] = [LoadMonitor(engine.pool).check]
        if not config.fault.use_fault_tolerance:
            self._monitors.append(SilenceMonitor(engine.pool, on_event).check)
        self._tasks: list[asyncio.Task[None]] = []
        first = 0
        for model in served_models(config) if launch is not None else ():
            last = first + model.num_engines
            assert launch is not None
            trained = model.is_trained
            replicas = ReplicaSet(
                launch,
                placements[first:last],
                engine if trained else HttpEngine([], is_supervised=True, needs_router=is_split(model.groups)),
                log_dir,
                cluster=config.cluster,
                engines=config.engines,
                fault=config.fault,
                min_context_len=config.rollout.rollout_max_context_len if trained else None,
                router=(routers or {}).get(model.name),
                devices=devices if trained else None,
                first_index=first,
                first_ranks=first_ranks[first:last],
                weights=weights if trained else None,
                fail=engine.fail,
                on_event=on_event,
            )
            self._replica_sets.insert(0 if trained else len(self._replica_sets), replicas)
            first = last

    async def start(self) -> None:
        """Start all engines and routers concurrently, and the monitors. Raises EngineError if an engine fails to."""
        self._tasks = [asyncio.create_task(_repeat(check)) for check in self._monitors]
        await asyncio.gather(*(replicas.start() for replicas in self._replica_sets))

    async def close(self) -> None:
        """Stop monitors, engines and routers; all of them, even if one raises."""
        async with contextlib.AsyncExitStack() as stack:  # in reverse order
            for replicas in self._replica_sets:
                stack.push_async_callback(replicas.close)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


async def _repeat(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        await check()
