"""Builds the engine servers that a run starts for itself."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from furlong.build.shared import Shared
from furlong.config.engine_groups import EngineGroup, engine_groups, engine_parts, is_split
from furlong.config.evaluation import eval_specs
from furlong.config.sections import Config
from furlong.config.validate_engine import is_started
from furlong.config.validate_moe import returns_routes
from furlong.engines.fleet import Clients, Fleet, OnEvent, Tolerance
from furlong.engines.host import LocalHost
from furlong.engines.launch import GroupedLaunch, Launch, Place, ServeLaunch, SglangLaunch, local_places
from furlong.engines.sglang_http import HttpEngine
from furlong.engines.sglang_router import SglangRouter
from furlong.errors import ConfigError
from furlong.machine import choose_threads
from furlong.ports import WeightSync
from furlong.sync.remote import RemoteSync

logger = logging.getLogger(__name__)


def build_fleet(
    shared: Shared,
    engine: HttpEngine,
    sync: WeightSync,
    *,
    on_event: OnEvent,
    places: Sequence[Sequence[Place]] | None = None,
    first_ranks: Sequence[int] = (),
) -> Fleet:
    """Make the fleet of `engine`; nothing is started. Without `places` the engines are on this machine.

    `first_ranks`: of each engine, the trainer rank on its first GPU where they share GPUs.
    `sync` gives an engine that was started again the weights of the others.
    """
    config = shared.config
    if isinstance(sync, RemoteSync):
        sync.was_lost = engine.any_lost
    where = local_engine_places(shared) if places is None else places
    return Fleet(
        _launch(shared),
        where,
        engine,
        first_ranks=first_ranks,
        log_dir=Path(config.engines.sglang_log_dir or shared.folder / "logs"),
        start_timeout_s=config.engines.sglang_server_start_timeout,
        clients=Clients(
            concurrency=config.cluster.sglang_server_concurrency,
            timeout_s=config.cluster.sglang_router_request_timeout_secs,
            min_context_len=config.rollout.rollout_max_context_len,
        ),
        tolerance=_tolerance(config),
        front=_router(shared),
        load_into=sync.load_into if isinstance(sync, RemoteSync) else None,
        on_event=on_event,
    )


def _router(shared: Shared) -> SglangRouter | None:
    """The router of this machine, unless requests go to the engines directly."""
    config = shared.config
    cluster, engines = config.cluster, config.engines
    if engines.sglang_router_strategy == "direct":
        return None
    if importlib.util.find_spec("sglang_router") is None:
        raise ConfigError(
            f"--sglang-router-strategy {engines.sglang_router_strategy}, but sglang-router is not installed; "
            "pip install sglang-router, or --sglang-router-strategy direct"
        )
    return SglangRouter(
        LocalHost(),
        engines.sglang_router_strategy,
        Path(engines.sglang_log_dir or shared.folder / "logs") / "router.log",
        concurrency=cluster.sglang_server_concurrency * num_engines(config),
        timeout_s=cluster.sglang_router_request_timeout_secs,
        api_key=cluster.sglang_api_key,
        options=engines.router_options,
        is_split=is_split(engine_groups(config)),
    )


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
        if config.cluster.engine == "sglang":
            raise ConfigError("--engine sglang needs a CUDA GPU, but none is visible; use --engine embedded on a CPU")
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
    config = shared.config
    if config.cluster.engine == "sglang":
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError("--engine sglang, but SGLang is not installed; pip install 'furlong[sglang]'")
        dtype = str(shared.dtype).removeprefix("torch.")
        own: dict[str, Any] = {} if shared.dtype == torch.float32 else {"dtype": dtype}
        if config.train.deterministic_mode:
            own["enable_deterministic_inference"] = True
        base = SglangLaunch(
            shared.model_dir,
            num_gpus=config.engines.rollout_num_gpus_per_engine,
            seed=config.train.seed,
            api_key=config.cluster.sglang_api_key,
            context_len=config.rollout.rollout_max_context_len,
            has_text=_needs_text(config),
            is_colocated=config.cluster.colocate and bool(config.cluster.offload_rollout),
            return_routed_experts=returns_routes(config),
            options=own | config.engines.sglang_options,
        )
        return GroupedLaunch([_of_group(base, part.group) for part in engine_parts(engine_groups(config))])
    dtype = config.cluster.embedded_dtype
    threads = choose_threads(config.cluster.num_threads, num_parts=num_engines(config) + 1)
    return ServeLaunch(
        shared.model_dir,
        dtype=str(shared.dtype).removeprefix("torch.") if dtype == "auto" else dtype,
        device=shared.device,
        seed=config.train.seed,
        api_key=config.cluster.sglang_api_key,
        context_len=config.rollout.rollout_max_context_len,
        num_slots=config.cluster.embedded_num_slots,
        num_threads=threads.count,
        return_routed_experts=returns_routes(config),
    )


def _of_group(base: SglangLaunch, group: EngineGroup) -> SglangLaunch:
    """How the engines of a group are started, whose options go before those of all."""
    assert group.role != "placeholder"
    return replace(base, num_gpus=group.gpus_per_engine, options={**base.options, **group.options}, does=group.role)


def _needs_text(config: Config) -> bool:
    """Whether servers must know the tokenizer: for stop strings, and for functions that may ask for chat."""
    sets = eval_specs(config)
    return bool(
        config.rollout.rollout_stop
        or config.rollout.custom_generate_function_path
        or any(spec.stop or spec.custom_generate_function_path for spec in sets)
    )
