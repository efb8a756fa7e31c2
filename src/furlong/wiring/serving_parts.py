"""Builds what generates: the engine, its supervisor and routers, the weight sync, and the sharing of devices."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from furlong.config.checks.engine_checks import is_started
from furlong.config.checks.moe_checks import returns_routes
from furlong.config.engine_groups import (
    EngineGroup,
    ServedModel,
    engine_groups,
    engine_parts,
    is_split,
    served_models,
)
from furlong.config.evaluation import eval_specs
from furlong.config.sections import Config
from furlong.config.topology import uses_ray
from furlong.core.transports import transport_spec
from furlong.diagnosis.monitors.run_monitor import RunMonitor
from furlong.errors import ConfigError
from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.sglang.http_engine import HttpEngine
from furlong.inference.supervisor.engine_process import local_placements
from furlong.inference.supervisor.host import HostGpus, LocalHost
from furlong.inference.supervisor.router import SglangRouter
from furlong.inference.supervisor.server_launch import Launch, ServeLaunch, SglangLaunch
from furlong.inference.supervisor.supervisor import EngineSupervisor
from furlong.interfaces import DeviceSharing, Trainer, WeightSync
from furlong.loop.device_sharing import Colocated
from furlong.machine import choose_threads
from furlong.training.local_trainer import FrozenTrainer
from furlong.weight_sync.memory_sync import NoWeightSync
from furlong.weight_sync.remote_sync import RemoteSync
from furlong.wiring.cluster_parts import Cluster
from furlong.wiring.engine_parts import build_engine, build_sync, num_engines
from furlong.wiring.run_context import RunContext

logger = logging.getLogger(__name__)

Start = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class ServingParts:
    """The engine of a run, None where nothing is generated, and what belongs to it.

    context: The settings, with the addresses of the routers in the `args` of user functions.
    """

    context: RunContext
    engine: EmbeddedEngine | HttpEngine | None
    sync: WeightSync
    device_sharing: DeviceSharing
    supervisor: EngineSupervisor | None = None

    @staticmethod
    def nothing(context: RunContext) -> ServingParts:
        """Serving without an engine."""
        return ServingParts(context, None, NoWeightSync(), DeviceSharing())

    @property
    def starting(self) -> list[Start]:
        """Functions that start its processes and tasks."""
        return [] if self.supervisor is None else [self.supervisor.start]

    async def close(self) -> None:
        """Close weight sync, engine and supervisor, in this order; all of them, even if one raises."""
        async with contextlib.AsyncExitStack() as stack:  # in reverse order
            if self.supervisor is not None:
                stack.push_async_callback(self.supervisor.close)
            if self.engine is not None:
                stack.push_async_callback(self.engine.close)
            stack.push_async_callback(self.sync.close)


def build_serving(
    context: RunContext, trainer: Trainer, cluster: Cluster | None, watch: RunMonitor, opened: contextlib.ExitStack
) -> ServingParts:
    """Build the engine and what belongs to it; `opened` gets their cleanup. Raises ConfigError."""
    if routers := build_routers(context):
        context = context.with_routers(asyncio.run(_reserve_addresses(routers)))
        opened.callback(lambda: asyncio.run(_release(routers)))
    engine = build_engine(context)
    opened.callback(lambda: asyncio.run(engine.close()))
    sync = NoWeightSync() if isinstance(trainer, FrozenTrainer) else build_sync(context, trainer, engine)
    device_sharing = _device_sharing(context, trainer, engine)
    supervisor: EngineSupervisor | None = None
    if isinstance(engine, HttpEngine) and not is_started(context.config):
        supervisor = EngineSupervisor(context.config, engine, on_event=watch.notify)
    elif isinstance(engine, HttpEngine):
        supervisor = EngineSupervisor(
            context.config,
            engine,
            on_event=watch.notify,
            launches=_launches(context),
            placements=local_engine_placements(context) if cluster is None else cluster.engine_placements(),
            first_ranks=() if cluster is None else cluster.first_ranks,
            log_dir=_log_dir(context),
            routers=routers,
            weights=sync if isinstance(sync, RemoteSync) else None,
            devices=device_sharing,
        )
    return ServingParts(context, engine, sync, device_sharing, supervisor)


async def _reserve_addresses(routers: Mapping[str, SglangRouter]) -> dict[str, tuple[str, int]]:
    return {name: await router.reserve() for name, router in routers.items()}


async def _release(routers: Mapping[str, SglangRouter]) -> None:
    """Release the ports of routers that were not started."""
    for router in routers.values():
        await router.close()


def _device_sharing(context: RunContext, trainer: Trainer, engine: EmbeddedEngine | HttpEngine) -> DeviceSharing:
    """Choose how trainer and engine share devices. Raises ConfigError for a trainer that cannot leave them."""
    cluster = context.config.cluster
    if not (cluster.offload_train or cluster.offload_rollout) or not isinstance(engine, HttpEngine):
        return DeviceSharing()
    if context.config.debug.debug_rollout_only:
        raise ConfigError(
            "--debug-rollout-only: there is no trainer to offload; remove --debug-rollout-only, or --offload"
        )
    return Colocated(
        trainer, engine, offload_train=bool(cluster.offload_train), offload_rollout=bool(cluster.offload_rollout)
    )


def build_routers(context: RunContext) -> dict[str, SglangRouter]:
    """Build the router of each model on this machine, that of the trained model first; none for direct requests."""
    config = context.config
    cluster, engines = config.cluster, config.engines
    if not is_started(config) or engines.sglang_router_strategy == "direct":
        return {}
    host = LocalHost()
    return {
        model.name: SglangRouter(
            host,
            engines.sglang_router_strategy,
            _log_dir(context) / ("router.log" if model.is_trained else f"router-{model.name}.log"),
            concurrency=cluster.sglang_server_concurrency * model.num_engines,
            timeout_s=cluster.sglang_router_request_timeout_secs,
            api_key=cluster.sglang_api_key,
            options=engines.router_options,
            is_split=is_split(model.groups),
        )
        for model in sorted(served_models(config), key=lambda model: not model.is_trained)
    }


def _log_dir(context: RunContext) -> Path:
    return Path(context.config.engines.sglang_log_dir or context.folder / "logs")


def local_engine_placements(context: RunContext) -> list[list[HostGpus]]:
    """GPUs of the engines on this machine, after those of the trainer. Raises ConfigError if there are too few."""
    ranges = [(part.first_gpu, part.num_gpus) for part in engine_parts(engine_groups(context.config))]
    return local_placements(LocalHost(), ranges, first_gpu=_first_gpu(context))


def _first_gpu(context: RunContext) -> int | None:
    """First GPU of the engines: after those of the trainer, or 0 if there are too few or with --colocate."""
    config = context.config
    num_gpus = int(config.engines.rollout_num_gpus or 0)
    if context.device != "cuda":
        return None
    count = torch.cuda.device_count()
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


def check_startable(context: RunContext) -> None:
    """Check for SGLang, sglang-router and GPUs. Raises ConfigError for what is missing."""
    config = context.config
    if not is_started(config):
        return
    strategy = config.engines.sglang_router_strategy
    if config.cluster.engine == "sglang":
        is_on_cpu = config.engines.sglang_options.get("device") == "cpu"
        if is_on_cpu:
            _check_sglang_on_cpu(context)
        elif context.device != "cuda" and not uses_ray(config):  # a cluster has reserved its GPUs
            raise ConfigError(
                "--engine sglang needs a CUDA GPU, but none is visible; use --engine embedded on a CPU, or "
                "--sglang-device cpu with a CPU build of SGLang"
            )
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError("--engine sglang, but SGLang is not installed; pip install 'furlong[sglang]'")
    if strategy != "direct" and importlib.util.find_spec("sglang_router") is None:
        raise ConfigError(
            f"--sglang-router-strategy {strategy}, but sglang-router is not installed; pip install sglang-router, or "
            "--sglang-router-strategy direct"
        )


def _check_sglang_on_cpu(context: RunContext) -> None:
    """Raise ConfigError for settings that SGLang on CPUs does not support."""
    config = context.config
    if context.device == "cuda":
        raise ConfigError(
            "--sglang-device cpu, but the trainer is on a GPU and cannot send weights to a CPU engine; remove it, or "
            "hide the GPU with CUDA_VISIBLE_DEVICES="
        )
    if config.cluster.colocate:
        raise ConfigError("--sglang-device cpu with --colocate, which shares GPUs; remove --colocate")
    transport = config.sync.update_weight_transport
    if problem := transport_spec(transport).cpu_problem:
        raise ConfigError(f"--sglang-device cpu with --update-weight-transport {transport}: {problem}")


def check_sharing(context: RunContext) -> None:
    """Check --colocate. Raises ConfigError for a weight transport that does not work on shared GPUs.

    Warns unless both trainer and engines release their memory.
    """
    flags = context.config.cluster
    if context.config.debug.debug_rollout_only:
        return
    transport = context.config.sync.update_weight_transport
    if problem := transport_spec(transport).one_gpu_problem:
        raise ConfigError(
            f"--update-weight-transport {transport} with --colocate: {problem}; leave it out (ipc), or use disk"
        )
    kept = [name for name in ("offload_train", "offload_rollout") if not getattr(flags, name)]
    if kept:
        logger.warning(
            "%s: trainer and engines share GPUs but do not both release their memory; both must fit at once",
            " ".join(f"--no-{name.replace('_', '-')}" for name in kept),
        )


def _launches(context: RunContext) -> list[Launch]:
    """Return the launch settings of each engine, over all models."""
    config = context.config
    of_model = _sglang if config.cluster.engine == "sglang" else _serve
    launches: list[Launch] = []
    for model in served_models(config):
        launch = of_model(context, model)
        launches += [_of_group(launch, part.group) for part in engine_parts(model.groups)]
    return launches


def _sglang(context: RunContext, model: ServedModel) -> SglangLaunch:
    """SGLang with the trained model, or with another one in the dtype of its folder."""
    config, is_trained = context.config, model.is_trained
    defaults: dict[str, Any] = {}
    if is_trained and context.dtype != torch.float32:
        defaults["dtype"] = str(context.dtype).removeprefix("torch.")
    if config.train.deterministic_mode:
        defaults["enable_deterministic_inference"] = True
    return SglangLaunch(
        _folder(context, model),
        num_gpus=config.engines.rollout_num_gpus_per_engine,
        seed=config.train.seed,
        api_key=config.cluster.sglang_api_key,
        context_len=config.rollout.rollout_max_context_len if is_trained else None,
        has_text=not is_trained or _needs_text(config),
        is_colocated=config.cluster.colocate and bool(config.cluster.offload_rollout),
        return_routed_experts=is_trained and returns_routes(config),
        options=defaults | config.engines.sglang_options,
    )


def _serve(context: RunContext, model: ServedModel) -> ServeLaunch:
    """`furlong serve` with this model."""
    config, is_trained = context.config, model.is_trained
    dtype = config.cluster.embedded_dtype
    threads = choose_threads(config.cluster.num_threads, num_parts=num_engines(config) + 1)
    return ServeLaunch(
        _folder(context, model),
        dtype=str(context.dtype).removeprefix("torch.") if dtype == "auto" else dtype,
        device=context.device,
        seed=config.train.seed,
        api_key=config.cluster.sglang_api_key,
        context_len=config.rollout.rollout_max_context_len if is_trained else None,
        num_slots=config.cluster.embedded_num_slots,
        num_threads=threads.count,
        return_routed_experts=is_trained and returns_routes(config),
    )


def _folder(context: RunContext, model: ServedModel) -> Path:
    return context.model_dir if model.path is None else Path(model.path)


def _of_group(launch: SglangLaunch | ServeLaunch, group: EngineGroup) -> Launch:
    """Return the launch settings of the engines of a group, whose options override those of all engines."""
    assert group.role != "placeholder"
    if isinstance(launch, ServeLaunch):
        return launch
    options = {**launch.options, **group.options}
    return replace(launch, num_gpus=group.gpus_per_engine, options=options, role=group.role)


def _needs_text(config: Config) -> bool:
    """Whether servers need the tokenizer: for stop strings, and for user functions that may use the chat API."""
    sets = eval_specs(config)
    return bool(
        config.rollout.rollout_stop
        or config.rollout.custom_generate_function_path
        or any(spec.stop or spec.custom_generate_function_path for spec in sets)
    )
