"""Builds what generates: the engine, its supervisor, the weight sync, and the sharing of devices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from furlong.config.engine_groups import engine_groups, engine_parts, is_split, trained_model
from furlong.config.facts import is_served, is_started, returns_routes, routing_of
from furlong.config.sections import Config
from furlong.core.transports import transport_spec
from furlong.diagnosis.monitors.monitor import RunMonitor
from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.sglang.external import connect_external
from furlong.inference.supervisor.launch import build_launches
from furlong.inference.supervisor.supervisor import EngineSupervisor, local_engine_placements
from furlong.interfaces import DeviceSharing, Engine, Trainer, WeightSync
from furlong.loop.device_sharing import Colocated
from furlong.machine import choose_threads, raise_open_file_limit
from furlong.training.ranks import Ranks
from furlong.weight_sync.memory_sync import MemorySync
from furlong.weight_sync.remote_sync import TIMEOUT_S, LocalSync, RemoteSync
from furlong.wiring.cluster import Cluster
from furlong.wiring.context import RunContext, close_all
from furlong.wiring.training import TrainingParts, build_transport, engine_scheme

SPARE_FILES = 256  # open files of this process besides connections

logger = logging.getLogger(__name__)

Start = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class ServingParts:
    """The engine of a run, None where nothing is generated, and what belongs to it.

    router_addresses: host and port of the router of each model, for user functions.
    """

    engine: Engine | None = None
    sync: WeightSync = field(default_factory=WeightSync)
    device_sharing: DeviceSharing = field(default_factory=DeviceSharing)
    supervisor: EngineSupervisor | None = None
    router_addresses: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])

    @property
    def starting(self) -> list[Start]:
        """Functions that start its processes and tasks."""
        return [] if self.supervisor is None else [self.supervisor.start]

    async def close(self) -> None:
        """Stop watching, close weight sync and engine, stop the engines; all of them, even if one raises.

        A health check or a restart would use what is closed.
        """
        engine, supervisor = self.engine, self.supervisor
        await close_all(
            None if supervisor is None else supervisor.stop_watching,
            self.sync.close,
            None if engine is None else engine.close,
            None if supervisor is None else supervisor.close,
        )


def build_serving(
    context: RunContext,
    training: TrainingParts,
    cluster: Cluster | None,
    watch: RunMonitor,
    opened: contextlib.ExitStack,
) -> ServingParts:
    """Build the engine and what belongs to it; `opened` gets their cleanup. Raises ConfigError."""
    if is_served(context.config):
        return _build_servers(context, training, cluster, watch, opened)
    return _build_embedded(context, training.trainer, opened)


def _build_embedded(context: RunContext, trainer: Trainer, opened: contextlib.ExitStack) -> ServingParts:
    config, cluster = context.config, context.config.cluster
    engine = EmbeddedEngine(
        context.model_dir,
        dtype=context.dtype if cluster.embedded_dtype == "auto" else getattr(torch, cluster.embedded_dtype),
        device=context.device,
        num_slots=cluster.embedded_num_slots,
        context_len=config.rollout.rollout_max_context_len,
        tokenizer=context.tokenizer,
        return_routed_experts=returns_routes(config),
    )
    opened.callback(lambda: asyncio.run(engine.close()))
    if config.debug.debug_rollout_only:
        return ServingParts(engine)
    table = engine.model.table
    resident = partial(engine.execute, table.resident_checksums)
    sync = MemorySync(
        trainer,
        engine,
        as_stored=table.as_stored,
        engine_checksums=resident if config.debug.check_weight_update_equal else None,
        scheme=engine_scheme(context),
        verbose=bool(config.debug.debug_weight_sync),
    )
    return ServingParts(engine, sync)


def _build_servers(
    context: RunContext,
    training: TrainingParts,
    cluster: Cluster | None,
    watch: RunMonitor,
    opened: contextlib.ExitStack,
) -> ServingParts:
    config = context.config
    engine = _http_engine(context)
    opened.callback(lambda: asyncio.run(engine.close()))
    sync = None if config.debug.debug_rollout_only else _remote_sync(context, training, engine)
    device_sharing = _device_sharing(context, training.trainer, engine)
    log_dir = Path(config.engines.sglang_log_dir or context.folder / "logs")
    if not is_started(config):
        dtypes = sorted({server.info.kv_cache_dtype for server in engine.servers})
        watch.notify("engines_connected", num=len(engine.servers), kv_cache_dtypes=dtypes)
        supervisor = EngineSupervisor(config, engine, on_event=watch.notify, log_dir=log_dir)
        return ServingParts(engine, sync or WeightSync(), device_sharing, supervisor)
    supervisor = EngineSupervisor(
        config,
        engine,
        on_event=watch.notify,
        log_dir=log_dir,
        launches=build_launches(
            config,
            model_dir=context.model_dir,
            dtype=str(context.dtype).removeprefix("torch."),
            device=context.device,
            num_threads=choose_threads(config.cluster.num_threads, num_parts=_num_engines(config) + 1).count,
        ),
        placements=local_engine_placements(config, context.device) if cluster is None else cluster.engine_placements(),
        first_ranks=() if cluster is None else cluster.first_ranks,
        weights=sync,
        devices=device_sharing,
        router_key=context.client_key,
    )
    opened.callback(lambda: asyncio.run(supervisor.close()))
    return ServingParts(
        engine, sync or WeightSync(), device_sharing, supervisor, asyncio.run(supervisor.reserve_addresses())
    )


def _num_engines(config: Config) -> int:
    return len(engine_parts(engine_groups(config)))


def _http_engine(context: RunContext) -> HttpEngine:
    config = context.config
    if is_started(config):  # the supervisor adds the servers once they are up
        num_servers = _num_engines(config)
        engine = HttpEngine(
            [],
            tokenizer=context.tokenizer,
            is_supervised=True,
            gives_up_unanswered=config.fault.use_fault_tolerance,
            needs_router=is_split(trained_model(config).groups),
            routing=routing_of(config),
        )
    else:
        servers, router = connect_external(config, context.tokenizer)
        num_servers = len(servers)
        engine = HttpEngine(
            servers,
            router=router,
            tokenizer=context.tokenizer,
            routing=routing_of(config),
        )
    raise_open_file_limit(config.cluster.sglang_server_concurrency * num_servers + SPARE_FILES)
    return engine


def _remote_sync(context: RunContext, training: TrainingParts, engine: HttpEngine) -> RemoteSync:
    config, flags = context.config, context.config.sync
    timeout_s = max(TIMEOUT_S, 2 * flags.update_weight_timeout)  # more than for one bucket or folder
    verify_while_serving = flags.verify_weights == "during"
    was_lost = engine.pool.any_lost if is_started(config) else None
    if training.ray_trainer is None:
        return LocalSync(
            training.trainer,
            engine.pool.reachable,
            build_transport(context, [server.info.device_type for server in engine.servers], Ranks()),
            scheme=engine_scheme(context),
            timeout_s=timeout_s,
            verify_while_serving=verify_while_serving,
            was_lost=was_lost,
        )
    spec = transport_spec(flags.update_weight_transport, mode=flags.update_weight_mode, on_gpu=context.device == "cuda")
    return RemoteSync(
        training.ray_trainer,
        engine.pool.reachable,
        name=spec.name,
        timeout_s=timeout_s,
        verify_while_serving=verify_while_serving,
        was_lost=was_lost,
    )


def _device_sharing(context: RunContext, trainer: Trainer, engine: HttpEngine) -> DeviceSharing:
    """Choose how trainer and engines share devices. Raises ConfigError for a trainer that cannot leave them."""
    cluster = context.config.cluster
    if not cluster.colocate or not (cluster.offload_train or cluster.offload_rollout):
        return DeviceSharing()
    return Colocated(
        trainer, engine, offload_train=bool(cluster.offload_train), offload_rollout=bool(cluster.offload_rollout)
    )


def warn_of_sharing(config: Config, sources: Mapping[str, str]) -> None:
    """Warn of flags with which trainer or engines do not release their memory on the GPUs that they share.

    The memory plan keeps both only where they fit; `sources` tells its choices from flags.
    """
    kept = [
        name
        for name in ("offload_train", "offload_rollout")
        if not getattr(config.cluster, name) and not sources.get(name, "").startswith("derived")
    ]
    if kept and not config.debug.debug_rollout_only:
        logger.warning(
            "%s: trainer and engines share GPUs but do not both release their memory; both must fit at once",
            " ".join(f"--no-{name.replace('_', '-')}" for name in kept),
        )
