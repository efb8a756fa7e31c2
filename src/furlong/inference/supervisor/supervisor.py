"""`EngineSupervisor` keeps the engine servers of a run available, from start to shutdown, and monitors them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from furlong.config.engine_groups import engine_groups, engine_parts, is_split, served_models
from furlong.config.sections import Config
from furlong.core.transports import transport_spec
from furlong.errors import ConfigError, EngineError
from furlong.inference.sglang.engine_answers import as_objects, whole
from furlong.inference.sglang.generate_requests import GENERATE
from furlong.inference.sglang.http_engine import HttpEngine
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_pool import TOKEN_TIMEOUT_S, ServerPool
from furlong.inference.supervisor.engine_process import local_placements
from furlong.inference.supervisor.host import HostGpus, LocalHost
from furlong.inference.supervisor.replica_set import OnEvent, ReplicaSet, WeightLoader
from furlong.inference.supervisor.router import SglangRouter
from furlong.inference.supervisor.server_launch import Launch
from furlong.interfaces import DeviceSharing

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 2.0  # between two load samples
LOAD_TIMEOUT_S = 2.0  # for a server to report its load
SILENT_S = 30.0  # without an answer, before a server is probed


@dataclass(eq=False)
class LoadMonitor:
    """Samples the load of each server while requests run behind a router, which does not report it.

    `ServerPool.take_load` returns the means. A sample that a server does not answer counts for none of them.
    """

    pool: ServerPool

    async def check(self) -> None:
        """Wait for the interval and take one sample."""
        await asyncio.sleep(LOAD_INTERVAL_S)
        if self.pool.router is None or not self.pool.num_sent:
            return
        servers = [server for server in self.pool.alive() if server.is_usable]
        counts = [count for count in await asyncio.gather(*map(num_requests, servers)) if count is not None]
        if len(counts) == len(servers):
            self.pool.note_load(servers, counts)


async def num_requests(server: SglangServer) -> int | None:
    """Running and queued requests of a server; None if it does not report them."""
    where = f"GET {server.url}/v1/loads"
    try:
        answer = await server.ask_object("/v1/loads", timeout_s=LOAD_TIMEOUT_S)
        loads = as_objects(answer.get("loads"), where, "loads")
        names = ("num_running_reqs", "num_waiting_reqs")
        return sum(whole(rank, name, where, default=0) for rank in loads for name in names)
    except EngineError as error:
        logger.debug("%s does not report its load: %s", server.url, error)
        return None


@dataclass(eq=False)
class SilenceMonitor:
    """Reports servers that accept requests but do not answer: stopped, asleep, or stuck in a kernel.

    It only reports; without it, such a server would be noticed when its requests time out, hours later. It is not
    needed with --use-fault-tolerance, whose health checks detect hanging engines.

    A server that has not answered for `SILENT_S` seconds is asked for a token, or for its health if the open request
    is not a generation. If it does not answer that either, `on_event` is called with `engine_silent` (url, running,
    asked, seconds, health): running requests, path of the oldest one, seconds since its last answer, and the error of
    the probe. It is called again each time the silence has doubled.
    """

    pool: ServerPool
    on_event: OnEvent
    _reported: dict[SglangServer, float] = field(default_factory=dict[SglangServer, float], init=False)

    async def check(self) -> None:
        """Wait for the interval and check each server once."""
        await asyncio.sleep(SILENT_S / 4)
        await asyncio.gather(*(self._check(server) for server in self.pool.alive()))

    async def _check(self, server: SglangServer) -> None:
        owed = server.oldest_unanswered() or self._owed_by_router()
        answered_s = server.answered_s
        if owed is None or time.monotonic() - max(answered_s, owed[1]) < SILENT_S:
            if self._reported.pop(server, None) is not None:
                logger.info("%s answers again", server.url)
            return
        path, asked_s = owed
        health = await (server.generation_error(TOKEN_TIMEOUT_S) if path == GENERATE else _health_error(server))
        now_s = time.monotonic()
        if not health:
            server.answered_s = now_s
        seconds = now_s - max(answered_s, asked_s)
        if server.lost or server.answered_s > answered_s or seconds < 2 * self._reported.get(server, 0.0):
            return
        self._reported[server] = seconds
        router = self.pool.router
        self.on_event(
            "engine_silent",
            url=server.url,
            running=server.running if router is None else router.running,
            asked=path,
            seconds=round(seconds, 1),
            health=health,
        )

    def _owed_by_router(self) -> tuple[str, float] | None:
        """The oldest unanswered request of the router, which any server may have."""
        return None if self.pool.router is None else self.pool.router.oldest_unanswered()


async def _health_error(server: SglangServer) -> str:
    """Why the server does not answer its health check; "" if it does."""
    try:
        await server.ask("/health", timeout_s=TOKEN_TIMEOUT_S)
    except EngineError as error:
        return str(error)
    return ""


class EngineSupervisor:
    """Starts, monitors, replaces and stops the servers behind an `HttpEngine`.

    Servers that the run did not start (--engine external) are only monitored: `launches` is empty then.
    One replica set per served model holds the engine processes, their router and their health checks. A lost engine of
    any model that cannot be replaced fails the requests of `engine`, which ends the run.

    Args:
        config: The run's configuration.
        engine: Requests for the trained model go through it. The caller closes it, too.
        on_event: Called with the events of `ReplicaSet`, and with `engine_silent` (`SilenceMonitor`).
        log_dir: Folder for the logs of engines and routers.
        launches: How to start each engine, over all models.
        placements: GPUs of each engine, in the same order.
        first_ranks: Trainer rank on the first GPU of each engine, where they share GPUs.
        weights: Loads the current weights into a restarted engine of the trained model; None if nothing is trained.
        devices: Hands the devices of a colocated trainer to an engine that is restarted.
    """

    def __init__(
        self,
        config: Config,
        engine: HttpEngine,
        *,
        on_event: OnEvent,
        log_dir: Path,
        launches: Sequence[Launch] = (),
        placements: Sequence[Sequence[HostGpus]] = (),
        first_ranks: Sequence[int] = (),
        weights: WeightLoader | None = None,
        devices: DeviceSharing | None = None,
    ) -> None:
        self._replica_sets: list[ReplicaSet] = []
        self._routers = _build_routers(config, log_dir) if launches else {}
        self._monitors: list[Callable[[], Coroutine[Any, Any, None]]] = [LoadMonitor(engine.pool).check]
        if not config.fault.use_fault_tolerance:
            self._monitors.append(SilenceMonitor(engine.pool, on_event).check)
        self._tasks: list[asyncio.Task[None]] = []
        first = 0
        for model in served_models(config) if launches else ():
            last = first + model.num_engines
            trained = model.is_trained
            replicas = ReplicaSet(
                launches[first:last],
                placements[first:last],
                engine if trained else HttpEngine([], is_supervised=True, needs_router=is_split(model.groups)),
                log_dir,
                cluster=config.cluster,
                engines=config.engines,
                fault=config.fault,
                report_s=config.sync.update_weight_timeout,
                min_context_len=config.rollout.rollout_max_context_len if trained else None,
                router=self._routers.get(model.name),
                devices=(devices if trained else None) or DeviceSharing(),
                first_index=first,
                first_ranks=first_ranks[first:last],
                weights=weights if trained else None,
                fail=engine.fail,
                on_event=on_event,
            )
            self._replica_sets.insert(0 if trained else len(self._replica_sets), replicas)
            first = last

    async def reserve_addresses(self) -> dict[str, tuple[str, int]]:
        """Choose host and port of each model's router, that of the trained model first; {} for direct requests."""
        return {name: await router.reserve() for name, router in self._routers.items()}

    async def start(self) -> None:
        """Start all engines and routers concurrently, and the monitors. Raises EngineError if an engine fails to."""
        self._tasks = [asyncio.create_task(_repeat(check)) for check in self._monitors]
        await asyncio.gather(*(replicas.start() for replicas in self._replica_sets))

    async def close(self) -> None:
        """Stop monitors, engines and routers, started or not; all of them, even if one raises."""
        async with contextlib.AsyncExitStack() as stack:  # in reverse order
            for replicas in self._replica_sets:
                stack.push_async_callback(replicas.close)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _build_routers(config: Config, log_dir: Path) -> dict[str, SglangRouter]:
    """Return the router of each model on this machine, that of the trained model first; none for direct requests."""
    cluster, engines = config.cluster, config.engines
    if engines.sglang_router_strategy == "direct":
        return {}
    host = LocalHost()
    return {
        model.name: SglangRouter(
            host,
            engines.sglang_router_strategy,
            log_dir / ("router.log" if model.is_trained else f"router-{model.name}.log"),
            concurrency=cluster.sglang_server_concurrency * model.num_engines,
            timeout_s=cluster.sglang_router_request_timeout_secs,
            api_key=cluster.sglang_api_key,
            options=engines.router_options,
            is_split=is_split(model.groups),
        )
        for model in sorted(served_models(config), key=lambda model: not model.is_trained)
    }


def local_engine_placements(config: Config, device: str) -> list[list[HostGpus]]:
    """Return the GPUs of each engine on this machine, after those of the trainer; the CPUs if `device` is "cpu".

    Raises ConfigError if there are too few.
    """
    parts = engine_parts(engine_groups(config))
    first_gpu = _first_gpu(config) if device == "cuda" else None
    return local_placements(LocalHost(), [(part.first_gpu, part.num_gpus) for part in parts], first_gpu=first_gpu)


def _first_gpu(config: Config) -> int:
    """First GPU of the engines: after those of the trainer, or 0 if there are too few or with --colocate."""
    num_gpus, count = int(config.engines.rollout_num_gpus or 0), torch.cuda.device_count()
    is_alone = config.debug.debug_rollout_only or config.cluster.colocate
    trains = 0 if is_alone else config.cluster.actor_num_gpus_per_node
    if count >= num_gpus + trains:
        return trains
    if count < num_gpus:
        raise ConfigError(f"--rollout-num-gpus is {num_gpus}, but {count} GPUs are visible; lower it")
    logger.info(
        "engines share GPU 0 with the trainer: %d GPUs are visible, %d are requested for engines", count, num_gpus
    )
    if problem := transport_spec(config.sync.update_weight_transport).one_gpu_problem:
        raise ConfigError(
            f"--rollout-num-gpus {num_gpus} of {count} GPUs leaves none for the trainer, and {problem}; use "
            "--update-weight-transport ipc or disk, or fewer GPUs for engines"
        )
    return 0


async def _repeat(check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        await check()
