"""Builds the engine, in this process or on servers, and its weight sync."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

import torch

from furlong.config.checks.engine_checks import is_started
from furlong.config.checks.moe_checks import returns_routes, routing_of
from furlong.config.engine_groups import engine_groups, engine_parts, is_split, trained_model
from furlong.config.sections import Config
from furlong.core.transports import transport_spec
from furlong.errors import ConfigError
from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.sglang.client import probe, url_of
from furlong.inference.sglang.http_engine import HttpEngine
from furlong.inference.sglang.server import SglangServer
from furlong.inference.sglang.server_info import ServerInfo
from furlong.interfaces import Engine, Trainer, WeightSync
from furlong.machine import raise_open_file_limit
from furlong.training.ranks import Ranks
from furlong.weight_sync.memory_sync import MemorySync, NoWeightSync
from furlong.weight_sync.remote_sync import TIMEOUT_S, LocalSync, RemoteSync, WeightSender
from furlong.weight_sync.transports.transport import Transport, TransportContext
from furlong.wiring.run_context import RunContext

SPARE_FILES = 256  # open files of this process besides connections

logger = logging.getLogger(__name__)


def build_engine(context: RunContext) -> EmbeddedEngine | HttpEngine:
    """Build the engine in this process, or connect to servers. Raises ConfigError naming a server that is missing."""
    if is_started(context.config):  # the supervisor adds the servers once they are up
        raise_open_file_limit(
            context.config.cluster.sglang_server_concurrency * num_engines(context.config) + SPARE_FILES
        )
        return HttpEngine(
            [],
            tokenizer=context.tokenizer,
            is_supervised=True,
            gives_up_unanswered=context.config.fault.use_fault_tolerance,
            needs_router=is_split(trained_model(context.config).groups),
            routing=routing_of(context.config),
        )
    if context.config.cluster.engine == "external":
        return _external(context)
    cluster, rollout = context.config.cluster, context.config.rollout
    dtype = context.dtype if cluster.embedded_dtype == "auto" else getattr(torch, cluster.embedded_dtype)
    return EmbeddedEngine(
        context.model_dir,
        dtype=dtype,
        device=context.device,
        num_slots=cluster.embedded_num_slots,
        context_len=rollout.rollout_max_context_len,
        tokenizer=context.tokenizer,
        return_routed_experts=returns_routes(context.config),
    )


def num_engines(config: Config) -> int:
    """Return the number of servers that the run starts."""
    return len(engine_parts(engine_groups(config))) if is_started(config) else 0


def build_sync(context: RunContext, trainer: Trainer, engine: Engine | None) -> WeightSync:
    """Build what sends the trainer's weights to the engine."""
    config = context.config
    if isinstance(engine, EmbeddedEngine):
        return MemorySync(
            trainer,
            engine,
            expected=engine.expected_checksums,
            engine_checksums=engine.resident_checksums if config.debug.check_weight_update_equal else None,
            verbose=bool(config.debug.debug_weight_sync),
        )
    if not isinstance(engine, HttpEngine):
        return NoWeightSync()
    options: dict[str, Any] = {
        "verify_while_serving": config.sync.update_weight_proof == "beside",
        "timeout_s": max(TIMEOUT_S, 2 * config.sync.update_weight_timeout),  # more than for one bucket or folder
        "was_lost": engine.any_lost if is_started(config) else None,
    }
    if isinstance(trainer, WeightSender):
        flags, on_gpu = config.sync, context.device == "cuda"
        spec = transport_spec(flags.update_weight_transport, mode=flags.update_weight_mode, on_gpu=on_gpu)
        return RemoteSync(trainer, engine.reachable, name=spec.name, **options)
    return LocalSync(
        trainer,
        engine.reachable,
        build_transport(context, [s.info.device_type for s in engine.servers], Ranks()),
        **options,
    )


def build_transport(context: RunContext, device_types: Sequence[str], ranks: Ranks) -> Transport:
    """Build one trainer rank's transport to engines on devices of these types. Called on all ranks at once."""
    config = context.config
    on_gpu = context.device == "cuda" and all(kind == "cuda" for kind in device_types)
    spec = transport_spec(config.sync.update_weight_transport, mode=config.sync.update_weight_mode, on_gpu=on_gpu)
    module, _, name = spec.implementation.partition(":")
    implementation: type[Transport] = getattr(importlib.import_module(module), name)
    return implementation(
        TransportContext(
            config.sync,
            model_dir=context.model_dir,
            run_dir=context.folder,
            on_gpu=on_gpu,
            rank=ranks.rank,
            world_size=ranks.world_size,
            verbose=bool(config.debug.debug_weight_sync),
        )
    )


def _external(context: RunContext) -> HttpEngine:
    cluster = context.config.cluster
    router = None
    addresses: Sequence[str] = [url_of(address) for address in cluster.rollout_external_engine_addrs or ()]
    if cluster.sglang_router_ip is not None:
        url = url_of(f"{cluster.sglang_router_ip}:{cluster.sglang_router_port}")
        addresses = _behind_router(url, addresses, cluster.sglang_api_key)
        total = cluster.sglang_server_concurrency * len(addresses)
        router = SglangServer(
            url,
            ServerInfo.read({}),
            api_key=cluster.sglang_api_key,
            concurrency=total,
            timeout_s=cluster.sglang_router_request_timeout_secs,
            keeps_together=False,
        )
    servers = [_server(context, url) for url in addresses]
    raise_open_file_limit(cluster.sglang_server_concurrency * len(servers) + SPARE_FILES)
    return HttpEngine(servers, router=router, tokenizer=context.tokenizer, routing=routing_of(context.config))


def _server(context: RunContext, url: str) -> SglangServer:
    cluster = context.config.cluster
    info = ServerInfo.read(probe(url, api_key=cluster.sglang_api_key))
    _check_external(info, url, context.config)
    logger.info("engine %s: %s, dtype %s, tp %d", url, info.software, info.dtype, info.tp_size)
    return SglangServer(
        url,
        info,
        api_key=cluster.sglang_api_key,
        concurrency=cluster.sglang_server_concurrency,
        timeout_s=cluster.sglang_router_request_timeout_secs,
    )


def _check_external(info: ServerInfo, url: str, config: Config) -> None:
    """Raise ConfigError for a server with settings that this run cannot use."""
    required = config.rollout.rollout_max_context_len
    if required is not None and info.context_len is not None and info.context_len < required:
        raise ConfigError(
            f"--rollout-max-context-len {required} exceeds the context length {info.context_len} of the engine at "
            f"{url}; lower it or start the engine with a longer context"
        )
    if info.num_http_processes > 1 and not config.debug.debug_rollout_only:
        raise ConfigError(
            f"the engine at {url} has {info.num_http_processes} HTTP processes, and only one of them learns about "
            "new weight versions; start it without --tokenizer-worker-num"
        )
    transport = config.sync.update_weight_transport
    problem = transport_spec(transport).speculation_problem
    if info.speculation and problem and not config.debug.debug_rollout_only:
        raise ConfigError(
            f"--update-weight-transport {transport} with the engine at {url}, which has --speculative-algorithm "
            f"{info.speculation}: {problem}"
        )
    if returns_routes(config) and not info.returns_routes:
        flag = "--use-rollout-routing-replay" if config.moe.use_rollout_routing_replay else "--log-routing-agreement"
        raise ConfigError(
            f"{flag} needs the routed experts of the engine at {url}, which does not return them; start it with "
            "--enable-return-routed-experts"
        )


def _behind_router(url: str, addresses: Sequence[str], api_key: str | None) -> list[str]:
    """The servers of a router. Raises ConfigError if `addresses` differ: a server would get no weights."""
    workers = [str(w["url"]).rstrip("/") for w in probe(url, api_key=api_key, path="/workers")["workers"]]
    if not workers:
        raise ConfigError(f"the router at {url} has no workers; start it with --worker-urls")
    if addresses and set(addresses) != set(workers):
        raise ConfigError(
            f"the router at {url} sends requests to {', '.join(sorted(workers))}, but --rollout-external-engine-addrs "
            f"names {', '.join(sorted(addresses))}; remove that flag to use the servers of the router"
        )
    return workers
