"""Keeps the engine servers of a run available: start, health checks, replacement, shutdown.

One `ReplicaSet` per served model; `EngineSupervisor` has all of them. A lost replica is replaced in this order: it is
removed from the router, so that it gets no new requests; its processes are killed, so that its running requests fail
and are sent elsewhere; it is restarted; the current weights are loaded into it and verified; only then is it added to
the router again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from furlong.config.engine_groups import engine_groups, engine_parts, is_split, served_models
from furlong.config.sections import Config
from furlong.core.text import random_key
from furlong.core.transports import transport_spec
from furlong.errors import (
    ENGINE_EXITED,
    ENGINE_HANGS,
    ENGINE_UNANSWERED,
    ConfigError,
    EngineError,
    FurlongError,
    Loss,
    SyncError,
)
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.sglang.pool import TOKEN_TIMEOUT_S, ServerPool
from furlong.inference.sglang.server import GENERATE, PROBE_S, SglangServer
from furlong.inference.supervisor.launch import Launch
from furlong.inference.supervisor.process import STOP_S, HostGpus, LocalHost, unless_lost
from furlong.inference.supervisor.replica import EngineReplica, SglangRouter
from furlong.interfaces import DeviceSharing

logger = logging.getLogger(__name__)

POLL_S = 0.1  # between two looks at the process of an engine
REPORT_S = 30.0  # between two log lines about engines that are still starting
RETRY_S, MAX_RETRY_S = 1.0, 60.0  # between two attempts to load weights into a restarted engine
LOAD_INTERVAL_S = 2.0  # between two load samples
LOAD_TIMEOUT_S = 2.0  # for a server to report its load
SILENT_S = 30.0  # without an answer, before a server is asked for a token
ENGINE_FIX = (
    "The run cannot continue without it. With --use-fault-tolerance it is restarted. Its log shows the cause, most "
    "often too little memory"
)
ROUTER_FIX = (
    "The run cannot continue without it. With --use-fault-tolerance it is restarted; --sglang-router-strategy direct "
    "needs no router"
)

OnEvent = Callable[..., None]


class WeightLoader(Protocol):
    """Loads weights into one server (`weight_sync.remote_sync.RemoteSync`, a layer above)."""

    async def load_into(self, server: SglangServer, version: int) -> object:
        """Load and verify the weights sent last. Raises SyncError if only the next weight update can provide them."""
        ...


@dataclass
class ReplicaSet:
    """Start, watch, replace and stop the engines of one model.

    Without --use-fault-tolerance, the death of an engine fails every request with an EngineError that quotes the end
    of its log, and so ends the run. `fail` fails the requests; the default is that of `engine`, which for a model that
    is not trained has no requests of the run. Engines are numbered from `first_index` over all models, in logs and in
    calls of `launches`.

    Args:
        launches: How to start each engine.
        placements: GPUs of each engine, one `HostGpus` for each of its nodes.
        engine: Requests go through it; `start` adds the servers to its pool.
        log_dir: Folder for the logs of the engines.
        min_context_len: Required context length. None: any.
        probe_s: Timeout of the health check before and after weight updates.
        router: Started with the engines; None sends requests to the engines directly.
        devices: Gives them to a colocated engine that is restarted.
        first_ranks: Trainer rank on the first GPU of each engine, where they share GPUs.
        weights: Loads the current weights into a restarted engine; None if its folder has them.
        on_event: Called with `engines_started` (num, seconds), `engine_lost` (engine, url, reason, why, code),
            `engine_restarted` (engine, url, version, seconds), `router_lost` (why, code) and `router_restarted` (url,
            seconds).
    """

    launches: Sequence[Launch]
    placements: Sequence[Sequence[HostGpus]]
    engine: HttpEngine
    log_dir: Path
    config: Config = field(default_factory=Config)
    min_context_len: int | None = None
    probe_s: float = PROBE_S
    router: SglangRouter | None = None
    devices: DeviceSharing = field(default_factory=DeviceSharing)
    first_index: int = 0
    first_ranks: Sequence[int] = ()
    weights: WeightLoader | None = None
    fail: Callable[[EngineError], None] | None = None
    on_event: OnEvent = field(default=lambda _name, **_fields: None)
    num_restarts: int = field(default=0, init=False)
    _replicas: list[EngineReplica] = field(default_factory=list[EngineReplica], init=False)
    _watchers: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]], init=False)
    _router_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _admitted: list[SglangServer] = field(default_factory=list[SglangServer], init=False)

    async def start(self) -> None:
        """Start all engines concurrently, wait until each of them answers, then watch them.

        Logs every 30 seconds which are still starting. Raises EngineError with the log of the first one that fails to
        start, and ConfigError for one whose context is too short; all processes are stopped then.
        """
        started = time.perf_counter()
        ranks = self.first_ranks or [0] * len(self.placements)
        numbered = enumerate(zip(self.placements, ranks, strict=True), self.first_index)
        self._replicas = [EngineReplica(index, placement, rank) for index, (placement, rank) in numbered]
        logger.info("starting %d engines; their logs are in %s", len(self._replicas), self.log_dir)
        tasks = {asyncio.create_task(self._bring_up(replica)): replica for replica in self._replicas}
        try:
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, timeout=REPORT_S, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
                if pending:
                    missing = ", ".join(tasks[task].name for task in pending)
                    logger.info("%.0f s: waiting for %s", time.perf_counter() - started, missing)
            if self.router is not None:
                self.engine.pool.use_router(await self.router.start())
            for replica in self._replicas:
                assert replica.server is not None
                await self._admit(replica.server)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop_all()
            raise
        seconds = time.perf_counter() - started
        logger.info("%d engines are up after %.1f s", len(self._replicas), seconds)
        self.on_event("engines_started", num=len(self._replicas), seconds=seconds)
        self._watchers = [
            asyncio.create_task(self._watch(replica, partial(self._replace, replica), ENGINE_FIX))
            for replica in self._replicas
        ]
        if self.router is not None:
            restart = partial(self._restart_router, self.router)
            self._watchers.append(asyncio.create_task(self._watch(self.router, restart, ROUTER_FIX)))

    async def stop_watching(self) -> None:
        """Stop health checks and restarts; the engines keep running."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    async def close(self) -> None:
        """Stop watching, stop all engines and close the connections; returns when the processes are gone."""
        await self.stop_watching()
        await self._stop_all()
        await self.engine.close()

    async def _stop_all(self) -> None:
        if self.router is not None:
            await self.router.close()
        await asyncio.gather(*(replica.stop(STOP_S) for replica in self._replicas))

    # -- health ------------------------------------------------------------------------------------------------

    async def _watch(
        self, target: EngineReplica | SglangRouter, replace: Callable[[Loss, float], Awaitable[None]], fix: str
    ) -> None:
        """Watch an engine or the router and `replace` it whenever it is lost; any other error ends the run's requests.

        `replace` gets the loss and the `time.perf_counter` of the loss. `fix` is the advice without fault tolerance.
        """
        try:
            while True:
                loss = await self._loss(target)
                if not self.config.fault.use_fault_tolerance:
                    raise loss.error(suffix=f"\n{fix}")
                await replace(loss, time.perf_counter())
        except FurlongError as error:
            self._fail_requests(error if isinstance(error, EngineError) else EngineError(str(error), code=error.code))
        except Exception as error:  # this task is never awaited: without an error, requests would wait forever
            logger.exception("the supervisor of the engines failed")
            what = f"{type(error).__name__} while watching or replacing an engine or the router: {error}"
            fix = "the log has the traceback. Resume with the same command and --load"
            self._fail_requests(EngineError(f"{what}; {fix}"))

    def _fail_requests(self, error: EngineError) -> None:
        fail = self.fail or self.engine.fail
        fail(error)

    async def _loss(self, target: EngineReplica | SglangRouter) -> Loss:
        fault = self.config.fault
        check_s = time.monotonic() + (fault.rollout_health_check_first_wait if fault.use_fault_tolerance else 0.0)
        while (loss := await target.exit_loss()) is None:
            if fault.use_fault_tolerance and time.monotonic() >= check_s:
                if (hang := await target.hang_loss(fault.rollout_health_check_timeout)) is not None:
                    await asyncio.sleep(POLL_S)  # the exit of a process that just died is a better reason
                    return await target.exit_loss() or hang
                check_s = time.monotonic() + fault.rollout_health_check_interval
            await asyncio.sleep(POLL_S)
        return loss

    def _count_restart(self, loss: Loss) -> str:
        limit = self.config.fault.rollout_max_engine_restarts
        if self.num_restarts >= limit:
            raise loss.error(
                suffix=f"\nEngines were restarted {self.num_restarts} times, the limit of "
                f"--rollout-max-engine-restarts {limit}; the logs of the engines are in {self.log_dir}"
            )
        self.num_restarts += 1
        return f"{self.num_restarts} of {limit}"

    # -- the router --------------------------------------------------------------------------------------------

    async def _update_router(self, router: SglangRouter, command: Awaitable[None]) -> None:
        """Await a command to the router. One that has died learns its engines when it is restarted."""
        async with self._router_lock:
            try:
                await command
            except EngineError:
                if not self.config.fault.use_fault_tolerance or await router.exit_loss() is None:
                    raise

    async def _restart_router(self, router: SglangRouter, loss: Loss, lost_s: float) -> None:
        pool = self.engine.pool
        logger.error("router_lost: %s", loss)
        self.on_event("router_lost", why=str(loss), code=loss.code)
        await pool.leave_router(loss)
        while True:
            logger.info("restarting the router (%s)", self._count_restart(loss))
            await router.close()  # fails the command that holds the lock
            try:
                async with self._router_lock:
                    client = await router.start()
                    # Also those that load weights at the moment: they are usable again when the update ends.
                    for server in [each for each in self._admitted if each.lost is None]:
                        await _add_to_router(router, server)
                    pool.use_router(client)
                break
            except EngineError as error:
                loss = Loss(str(error), error.code)
                logger.error("the router failed to restart: %s", error)
        seconds = time.perf_counter() - lost_s
        logger.info("router_restarted: at %s, %.1f s after it was lost", client.url, seconds)
        self.on_event("router_restarted", url=client.url, seconds=seconds)

    # -- one replica -------------------------------------------------------------------------------------------

    async def _bring_up(self, replica: EngineReplica) -> SglangServer:
        return await replica.bring_up(
            self.launches[replica.index - self.first_index],
            log_dir=self.log_dir,
            config=self.config,
            probe_s=self.probe_s,
            min_context_len=self.min_context_len,
        )

    async def _admit(self, server: SglangServer) -> None:
        pool = self.engine.pool
        if server not in pool.servers:
            pool.add(server)
        self._admitted = [each for each in self._admitted if each.lost is None] + [server]
        if self.router is not None:
            await self._update_router(self.router, _add_to_router(self.router, server))
        pool.notify_change()

    async def _replace(self, replica: EngineReplica, loss: Loss, lost_s: float) -> None:
        server = replica.server
        assert server is not None
        self.engine.pool.mark_lost(server, loss)
        logger.error("engine_lost: %s", loss)
        self.on_event(
            "engine_lost", engine=replica.index, url=server.url, reason=loss.reason, why=str(loss), code=loss.code
        )
        await self._discard(replica, loss)
        while True:
            logger.info("restarting engine %d (%s)", replica.index, self._count_restart(loss))
            try:
                async with self.devices.starting() as settle:
                    server = await self._bring_up(replica)
                    if self.weights is not None:
                        server.stale = "it only has the weights of its folder"
                    await settle(server)
                    self.engine.pool.add(server)
                await self._while_alive(replica, "while its weights were loaded", self._load_weights(server))
                await self._while_alive(replica, "before it received requests", self._admit(server))
            except FurlongError as error:
                if isinstance(error, ConfigError):
                    raise
                loss = Loss(str(error), error.code)
                logger.error("engine %d failed to restart: %s", replica.index, error)
                await self._discard(replica, Loss("it failed to restart", ENGINE_EXITED))
                continue
            seconds = time.perf_counter() - lost_s
            logger.info(
                "engine_restarted: engine %d at %s has weight version %s, %.1f s after it was lost",
                replica.index, server.url, server.version, seconds,
            )  # fmt: skip
            self.on_event(
                "engine_restarted", engine=replica.index, url=server.url, version=server.version, seconds=seconds
            )
            return

    async def _while_alive(self, replica: EngineReplica, when: str, work: Coroutine[Any, Any, None]) -> None:
        async def loss() -> None:
            raise (await self._loss(replica)).error(prefix=f"{when}: ")

        await unless_lost(work, loss())

    async def _load_weights(self, server: SglangServer) -> None:
        """Load the newest weights that any engine has had, or wait for the weight update that brings them.

        Only the next update can if the trainer has trained since. Raises EngineError if none comes in time, or if the
        server fails to load them. Does nothing without `weights`: those of the folder are current.
        """
        if self.weights is None:
            return
        began_s, wait_s = time.monotonic(), RETRY_S
        timeout_s = self.config.engines.sglang_server_start_timeout
        why = "no weights were sent yet"
        while server.stale:
            versions = [replica.version for replica in self._replicas if replica.version is not None]
            if versions:
                try:
                    async with self.devices.reloading():
                        await self.weights.load_into(server, max(versions))
                except SyncError as error:
                    why = str(error)
                    if server.url in error.broken:
                        raise EngineError(f"{server.url} gave no answer: {why}", code=ENGINE_UNANSWERED) from error
                    if error.late is not None and server.url in error.late["missing"]:
                        raise EngineError(f"{server.url} hangs: {why}", code=ENGINE_HANGS) from error
                    logger.info("%s waits for the next weight update: %s", server.url, why)
                    server.awaits_weights = not self.devices.is_colocated  # a colocated trainer updates it in its turn
                    self.engine.pool.notify_change()
            until_s = time.monotonic() + wait_s
            while server.stale and time.monotonic() < until_s:
                await asyncio.sleep(POLL_S)
            wait_s = min(2 * wait_s, MAX_RETRY_S)
            if server.stale and time.monotonic() - began_s > timeout_s:
                raise EngineError(
                    f"{server.url} got no weights in {timeout_s:g} s: {why}. With --update-weight-transport disk the "
                    "last version stays on disk and can be loaded at any time"
                )

    async def _discard(self, replica: EngineReplica, loss: Loss) -> None:
        server, pool = replica.server, self.engine.pool
        is_member = server is not None and server in pool.servers
        if server is not None and is_member:
            pool.mark_lost(server, loss)
            if self.router is not None:
                await self._update_router(self.router, self.router.remove(server.url))
        await replica.stop()
        if server is not None and is_member:
            await pool.remove(server)


async def _add_to_router(router: SglangRouter, server: SglangServer) -> None:
    async def loss() -> None:
        while not server.lost:
            await asyncio.sleep(POLL_S)

    await unless_lost(router.add(server), loss())


async def watch_load(pool: ServerPool) -> None:
    """Sample the load of each server while requests run behind a router, which does not report it.

    `ServerPool.take_load` returns the means. A sample that a server does not answer counts for none of them.
    """
    while True:
        await asyncio.sleep(LOAD_INTERVAL_S)
        if pool.router is None or not pool.num_sent:
            continue
        servers = [server for server in pool.alive() if server.is_usable]
        counts = await asyncio.gather(*(server.num_requests(LOAD_TIMEOUT_S) for server in servers))
        if len(known := [count for count in counts if count is not None]) == len(servers):
            pool.note_load(servers, known)


async def watch_silence(pool: ServerPool, on_event: OnEvent) -> None:
    """Report servers that accept requests but do not answer: stopped, asleep, or stuck in a kernel.

    With --use-fault-tolerance health checks replace such a server; otherwise its requests would time out hours later.
    A server that has requests and has answered none for `SILENT_S` seconds is asked for a token. If it does not answer
    that either, `on_event` is called with `engine_silent`, and again each time the silence has doubled.
    """
    quiet_s: dict[SglangServer, float] = {}
    reported_s: dict[SglangServer, float] = {}

    async def check(server: SglangServer) -> None:
        num_running, since_s = (pool.router or server).running, quiet_s.setdefault(server, time.monotonic())
        if num_running and server.answered_s <= since_s:
            if time.monotonic() - since_s < SILENT_S:
                return
            if health := await server.generation_error(TOKEN_TIMEOUT_S):
                seconds = time.monotonic() - since_s
                if server.is_usable and server.answered_s <= since_s and seconds >= 2 * reported_s.get(server, 0.0):
                    reported_s[server] = seconds
                    on_event(
                        "engine_silent", url=server.url, running=num_running, asked=GENERATE,
                        seconds=round(seconds, 1), health=health,
                    )  # fmt: skip
                return
        quiet_s[server] = time.monotonic()
        if reported_s.pop(server, None) is not None:
            logger.info("%s answers again", server.url)

    while True:
        await asyncio.sleep(SILENT_S / 4)
        await asyncio.gather(*(check(server) for server in pool.alive()))


class EngineSupervisor:
    """Starts, monitors, replaces and stops the servers behind an `HttpEngine`.

    Servers that the run did not start (--engine external) are only monitored: `launches` is empty then.
    One replica set per served model holds the engine processes, their router and their health checks. A lost engine of
    any model that cannot be replaced fails the requests of `engine`, which ends the run.

    Args:
        config: The run's configuration.
        engine: Requests for the trained model go through it. The caller closes it, too.
        on_event: Called with the events of `ReplicaSet`, and with `engine_silent` (`watch_silence`).
        log_dir: Folder for the logs of engines and routers.
        launches: How to start each engine, over all models.
        placements: GPUs of each engine, in the same order.
        first_ranks: Trainer rank on the first GPU of each engine, where they share GPUs.
        weights: Loads the current weights into a restarted engine of the trained model; None if nothing is trained.
        devices: Hands the devices of a colocated trainer to an engine that is restarted.
        router_key: API key of the routers, which user functions must send, too.
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
        router_key: str | None = None,
    ) -> None:
        self._replica_sets: list[ReplicaSet] = []
        self._routers = _build_routers(config, log_dir, router_key) if launches else {}
        self._monitors: list[Callable[[], Coroutine[Any, Any, None]]] = [partial(watch_load, engine.pool)]
        if not config.fault.use_fault_tolerance:
            self._monitors.append(partial(watch_silence, engine.pool, on_event))
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
                config,
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
        self._tasks = [asyncio.create_task(monitor()) for monitor in self._monitors]
        await asyncio.gather(*(replicas.start() for replicas in self._replica_sets))

    async def stop_watching(self) -> None:
        """Stop health checks, restarts and monitors; the engines keep running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(replicas.stop_watching() for replicas in self._replica_sets))

    async def close(self) -> None:
        """Stop monitors, engines and routers, started or not; all of them, even if one raises."""
        async with contextlib.AsyncExitStack() as stack:  # in reverse order
            for replicas in self._replica_sets:
                stack.push_async_callback(replicas.close)
            await self.stop_watching()


def _build_routers(config: Config, log_dir: Path, api_key: str | None) -> dict[str, SglangRouter]:
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
            api_key=api_key,
            control_key=cluster.sglang_api_key or random_key("ek"),
            options=engines.router_options,
            is_split=is_split(model.groups),
            port=cluster.sglang_router_port if model.is_trained else None,
        )
        for model in sorted(served_models(config), key=lambda model: not model.is_trained)
    }


def local_engine_placements(config: Config, device: str) -> list[list[HostGpus]]:
    """Return the GPUs of each engine on this machine, after those of the trainer; the CPUs if `device` is "cpu".

    Raises ConfigError if there are too few.
    """
    host, parts = LocalHost(), engine_parts(engine_groups(config))
    if device != "cuda":
        return [[HostGpus(host)] for _ in parts]
    first_gpu = _first_gpu(config)
    return [[HostGpus(host, first_gpu + part.first_gpu, part.num_gpus)] for part in parts]


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
