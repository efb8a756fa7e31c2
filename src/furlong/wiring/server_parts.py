"""Builds the engine servers that a run starts for itself."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from furlong.errors import ConfigError
from furlong.inference.sglang.http_engine import HttpEngine
from furlong.inference.sglang.router import SglangRouter
from furlong.inference.supervisor.fleet import Fleet, OnEvent, Tolerance
from furlong.inference.supervisor.host import LocalHost, Place
from furlong.inference.supervisor.member import Clients
from furlong.inference.supervisor.server_launch import GroupedLaunch, Launch, ServeLaunch, SglangLaunch, local_places
from furlong.interfaces import WeightSync
from furlong.machine import choose_threads
from furlong.weight_sync.remote_sync import RemoteSync
from furlong.wiring.shared import Shared

logger = logging.getLogger(__name__)


def build_fleets(
    shared: Shared,
    engine: HttpEngine,
    sync: WeightSync,
    routers: Mapping[str, SglangRouter],
    *,
    on_event: OnEvent,
    places: Sequence[Sequence[Place]] | None = None,
    first_ranks: Sequence[int] = (),
) -> list[Fleet]:
    """Make the fleets of all models, the first one of `engine` and the model that is trained; nothing is started.

    Without `places` the engines are on this machine. `first_ranks`: of each engine, the trainer rank on its first GPU
    where they share GPUs. `sync` gives an engine that was started again the weights of the others. `routers` are those
    of `build_routers`. An engine of another model that is lost ends the run like one of `engine`.
    """
    config = shared.config
    where = local_engine_places(shared) if places is None else places
    launch, fleets, first = _launch(shared), list[Fleet](), 0
    for model in served_models(config):
        last = first + model.num_engines
        fleet = Fleet(
            launch,
            where[first:last],
            engine if model.is_trained else HttpEngine([], is_supervised=True, needs_router=is_split(model.groups)),
            log_dir=_log_dir(shared),
            start_timeout_s=config.engines.sglang_server_start_timeout,
            clients=Clients(
                concurrency=config.cluster.sglang_server_concurrency,
                timeout_s=config.cluster.sglang_router_request_timeout_secs,
                min_context_len=config.rollout.rollout_max_context_len if model.is_trained else None,
            ),
            tolerance=_tolerance(config),
            front=routers.get(model.name),
            first_index=first,
            first_ranks=first_ranks[first:last],
            load_into=sync.load_into if isinstance(sync, RemoteSync) and model.is_trained else None,
            fail=engine.fail,
            on_event=on_event,
        )
        fleets.insert(0 if model.is_trained else len(fleets), fleet)
        first = last
    return fleets


def build_routers(shared: Shared) -> dict[str, SglangRouter]:
    """The router of each model, on this machine, that of the trained one first; none where requests need none."""
    config = shared.config
    cluster, engines = config.cluster, config.engines
    if not is_started(config) or engines.sglang_router_strategy == "direct":
        return {}
    host = LocalHost()
    return {
        model.name: SglangRouter(
            host,
            engines.sglang_router_strategy,
            _log_dir(shared) / ("router.log" if model.is_trained else f"router-{model.name}.log"),
            concurrency=cluster.sglang_server_concurrency * model.num_engines,
            timeout_s=cluster.sglang_router_request_timeout_secs,
            api_key=cluster.sglang_api_key,
            options=engines.router_options,
            is_split=is_split(model.groups),
        )
        for model in sorted(served_models(config), key=lambda model: not model.is_trained)
    }


def _log_dir(shared: Shared) -> Path:
    return Path(shared.config.engines.sglang_log_dir or shared.folder / "logs")


def _tolerance(config: Config) -> Tolerance | None:
    fault = config.fault
    if not fault.use_fault_tolerance:
        return None
    return Tolerance(
        interval_s=fault.rollout_health_check_interval,
        timeout_s=fault.rollout_health_check_timeout,
        first_wait_s=fault.rollout_health_check_first_wait,
        max_restarts=fault.rollout_max_engine_restarts,
    )


def num_engines(config: Config) -> int:
    """How many servers furlong starts."""
    if not is_started(config):
        return 0
    return len(engine_parts(engine_groups(config)))


def local_engine_places(shared: Shared) -> list[list[Place]]:
    """Places of the engines on this machine, after the trainer's GPUs. Raises ConfigError if GPUs are lacking."""
    config = shared.config
    parts = [(part.first_gpu, part.num_gpus) for part in engine_parts(engine_groups(config))]
    return local_places(LocalHost(), parts, first_gpu=_first_gpu(shared))


def _first_gpu(shared: Shared) -> int | None:
    """The first GPU of the engines: after the trainer's if there are enough, else or with --colocate the same."""
    config = shared.config
    wanted = int(config.engines.rollout_num_gpus or 0)
    if shared.device != "cuda":
        return None
    count = torch.cuda.device_count()
    is_alone = config.debug.debug_rollout_only or config.cluster.colocate
    trains = 0 if is_alone else config.cluster.actor_num_gpus_per_node
    if count >= wanted + trains:
        return trains
    if count < wanted:
        raise ConfigError(f"--rollout-num-gpus {wanted}, but {count} GPUs are visible; lower it")
    logger.info("engines share GPU 0 with the trainer: %d GPUs are visible, %d are asked for engines", count, wanted)
    if config.sync.update_weight_transport == "nccl":
        raise ConfigError(
            f"--rollout-num-gpus {wanted} of {count} GPUs leaves none for the trainer, and NCCL does not join two "
            "processes on one GPU; use --update-weight-transport ipc or disk, or fewer GPUs for engines"
        )
    return 0


def check_startable(shared: Shared) -> None:
    """Look for what engines and routers are started with and on. Raises ConfigError for what is not there."""
    config = shared.config
    if not is_started(config):
        return
    strategy = config.engines.sglang_router_strategy
    if config.cluster.engine == "sglang":
        is_on_cpu = config.engines.sglang_options.get("device") == "cpu"
        if is_on_cpu:
            _check_sglang_on_cpu(shared)
        elif shared.device != "cuda" and not uses_ray(config):  # a cluster has been asked for GPUs
            raise ConfigError(
                "--engine sglang needs a CUDA GPU, but none is visible; use --engine embedded on a CPU, or "
                "--sglang-device cpu with an SGLang that runs there"
            )
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError("--engine sglang, but SGLang is not installed; pip install 'furlong[sglang]'")
    if strategy != "direct" and importlib.util.find_spec("sglang_router") is None:
        raise ConfigError(
            f"--sglang-router-strategy {strategy}, but sglang-router is not installed; pip install sglang-router, or "
            "--sglang-router-strategy direct"
        )


def _check_sglang_on_cpu(shared: Shared) -> None:
    """Raise ConfigError for what wants a GPU of SGLang, or of the trainer alone."""
    config = shared.config
    if shared.device == "cuda":
        raise ConfigError(
            "--sglang-device cpu, but the trainer is on a GPU, from which weights do not get there; leave it out, or "
            "hide the GPU with CUDA_VISIBLE_DEVICES="
        )
    if config.cluster.colocate:
        raise ConfigError("--sglang-device cpu with --colocate, which shares GPUs; leave out --colocate")
    if config.sync.update_weight_transport == "ipc":
        raise ConfigError(
            "--sglang-device cpu with --update-weight-transport ipc, by which SGLang takes memory of a GPU; use nccl, "
            "which is gloo there, or disk"
        )


def check_sharing(shared: Shared) -> None:
    """Look at what --colocate puts on the same GPUs. Raises ConfigError for weights that cannot go from one to other.

    Warns if not both sides give their memory away.
    """
    flags = shared.config.cluster
    if shared.config.debug.debug_rollout_only:
        return
    if shared.config.sync.update_weight_transport == "nccl":
        raise ConfigError(
            "--update-weight-transport nccl with --colocate: NCCL does not join two processes on one GPU; leave it out "
            "(ipc), or use disk"
        )
    kept = [name for name in ("offload_train", "offload_rollout") if not getattr(flags, name)]
    if kept:
        logger.warning(
            "%s: trainer and engines share GPUs, and not both give their memory away; leave room for both",
            " ".join(f"--no-{name.replace('_', '-')}" for name in kept),
        )


def _launch(shared: Shared) -> Launch:
    """How each engine is started, counted over all models."""
    config = shared.config
    of_model = _sglang if config.cluster.engine == "sglang" else _serve
    launches: list[Launch] = []
    for model in served_models(config):
        launch = of_model(shared, model)
        launches += [_of_group(launch, part.group) for part in engine_parts(model.groups)]
    return GroupedLaunch(launches)


def _sglang(shared: Shared, model: ServedModel) -> SglangLaunch:
    """SGLang with the trained model, or with another one in the precision that its folder says."""
    config, is_trained = shared.config, model.is_trained
    own: dict[str, Any] = {}
    if is_trained and shared.dtype != torch.float32:
        own["dtype"] = str(shared.dtype).removeprefix("torch.")
    if config.train.deterministic_mode:
        own["enable_deterministic_inference"] = True
    return SglangLaunch(
        _folder(shared, model),
        num_gpus=config.engines.rollout_num_gpus_per_engine,
        seed=config.train.seed,
        api_key=config.cluster.sglang_api_key,
        context_len=config.rollout.rollout_max_context_len if is_trained else None,
        has_text=not is_trained or _needs_text(config),
        is_colocated=config.cluster.colocate and bool(config.cluster.offload_rollout),
        return_routed_experts=is_trained and returns_routes(config),
        options=own | config.engines.sglang_options,
    )


def _serve(shared: Shared, model: ServedModel) -> ServeLaunch:
    """`furlong serve` with this model."""
    config, is_trained = shared.config, model.is_trained
    dtype = config.cluster.embedded_dtype
    threads = choose_threads(config.cluster.num_threads, num_parts=num_engines(config) + 1)
    return ServeLaunch(
        _folder(shared, model),
        dtype=str(shared.dtype).removeprefix("torch.") if dtype == "auto" else dtype,
        device=shared.device,
        seed=config.train.seed,
        api_key=config.cluster.sglang_api_key,
        context_len=config.rollout.rollout_max_context_len if is_trained else None,
        num_slots=config.cluster.embedded_num_slots,
        num_threads=threads.count,
        return_routed_experts=is_trained and returns_routes(config),
    )


def _folder(shared: Shared, model: ServedModel) -> Path:
    return shared.model_dir if model.path is None else Path(model.path)


def _of_group(launch: SglangLaunch | ServeLaunch, group: EngineGroup) -> Launch:
    """How the engines of a group are started, whose options go before those of all."""
    assert group.role != "placeholder"
    if isinstance(launch, ServeLaunch):
        return launch
    return replace(launch, num_gpus=group.gpus_per_engine, options={**launch.options, **group.options}, does=group.role)


def _needs_text(config: Config) -> bool:
    """Whether servers must know the tokenizer: for stop strings, and for functions that may ask for chat."""
    sets = eval_specs(config)
    return bool(
        config.rollout.rollout_stop
        or config.rollout.custom_generate_function_path
        or any(spec.stop or spec.custom_generate_function_path for spec in sets)
    )
