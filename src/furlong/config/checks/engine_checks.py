"""Rules of engines, weight transports, placement and the device, without access to a cluster."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

from furlong.catalogue import Problem
from furlong.config.engine_groups import EngineGroup, is_split, layout_problems, served_models
from furlong.config.facts import SERVERS, is_served, is_started, without_engines
from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config, MegatronFlags, OptimFlags, TrainFlags
from furlong.config.topology import Topology, uses_ray
from furlong.core.text import shortened
from furlong.core.transports import transport_spec
from furlong.errors import ConfigError


def engine_problems(config: Config) -> Iterator[str]:
    """Yield one message per problem. `config` includes derived values."""
    cluster, engines = config.cluster, config.engines
    addresses = cluster.rollout_external_engine_addrs
    if cluster.engine == "external" and not addresses and cluster.sglang_router_ip is None:
        yield (
            "--engine external without servers; give --rollout-external-engine-addrs HOST:PORT ..., or "
            "--sglang-router-ip and --sglang-router-port"
        )
    if addresses and len(set(addresses)) != len(addresses):
        yield f"--rollout-external-engine-addrs {' '.join(addresses)} names a server twice; name each server once"
    key = cluster.sglang_api_key or ""
    if key.strip() and (key != key.strip() or not all(" " <= letter <= "~" for letter in key)):
        yield (
            "--sglang-api-key contains a line break, surrounding spaces or non-ASCII characters, which an HTTP header "
            "cannot contain; remove them, or use another key"
        )
    if engines.sglang_options and cluster.engine not in ("sglang", "auto"):
        name = next(iter(engines.sglang_options)).replace("_", "-")
        yield f"--sglang-{name} has no effect with --engine {cluster.engine}; remove it, or use --engine sglang"
    if engines.router_options and engines.sglang_router_strategy == "direct":
        name = next(iter(engines.router_options)).replace("_", "-")
        yield (
            f"--router-{name} has no effect without a router; give --sglang-router-strategy cache_aware, or remove it"
        )
    yield from _groups(config)
    if engines.sglang_config is None:
        yield from _counts(config)
        alike = EngineGroup("regular", 0, engines.rollout_num_gpus_per_engine)
        yield from _layouts(config, "--sglang-", [alike])
    yield from _transport(config)
    if cluster.colocate:
        yield from _colocated(config)
    if uses_ray(config):
        yield from _on_ray(config)


def _groups(config: Config) -> Iterator[str]:
    flags, direct = config.engines, config.engines.sglang_router_strategy == "direct"
    requested = [name for name in ("sglang_config", "prefill_num_servers") if getattr(flags, name) is not None]
    if len(requested) != 1 or config.cluster.engine == "external":
        return  # two cannot be combined, and external engines have no groups: both are declared on the flags
    flag = flag_specs(Config)[requested[0]].flag
    try:
        models = served_models(config)
    except ConfigError as error:
        yield from error.problems
        return
    groups = [group for model in models for group in model.groups]
    if len(models) > 1 and direct:
        yield (
            f"--sglang-router-strategy direct with {len(models)} models in --sglang-config: functions reach a model "
            "through its router; remove it"
        )
    if len(models) > 1 and config.cluster.colocate:
        yield (
            f"--colocate with {len(models)} models in --sglang-config: a model that is not trained cannot release its "
            "weights; give trainer and engines separate GPUs (--actor-num-gpus-per-node, without --colocate)"
        )
    if flags.sglang_config is not None:
        for model in models:
            yield from _layouts(config, f"{flag}, model {model.name}: ", model.groups, is_trained=model.is_trained)
    total = sum(group.num_gpus for group in groups)
    if total != flags.rollout_num_gpus:
        yield (
            f"--sglang-config has groups of {total} GPUs in total, but --rollout-num-gpus is {flags.rollout_num_gpus}; "
            "remove that flag, or make them equal"
        )
    if len(models) == 1 and is_split(groups) and direct:
        yield f"--sglang-router-strategy direct with {flag}: a router has to connect prefill and decode; remove it"
    if config.cluster.engine == "embedded":
        if is_split(groups):
            yield f"{flag} splits prefill and decode, which the embedded engine does not support; use --engine sglang"
        if any(group.options or (group.gpus_per_engine != 1 and group.num_engines) for group in groups):
            yield (
                f"{flag}: the embedded engine supports no overrides and runs on one device; use "
                "num_gpus_per_engine 1 without overrides, or --engine sglang"
            )


def _counts(config: Config) -> Iterator[str]:
    engine, total, each = (
        config.cluster.engine,
        config.engines.rollout_num_gpus,
        config.engines.rollout_num_gpus_per_engine,
    )
    if engine == "sglang" and total is None and not without_engines(config):
        yield "--engine sglang without GPUs; add --rollout-num-gpus N"
    if total is not None and each > 0 and total % each:
        yield (
            f"--rollout-num-gpus {total} is not a multiple of --rollout-num-gpus-per-engine {each}; "
            f"give {total - total % each or each} or {total - total % each + each} GPUs"
        )
    if engine == "embedded" and total is not None and each != 1:
        yield (
            f"--rollout-num-gpus-per-engine {each}: the embedded engine runs on one device; remove it, or use "
            "--engine sglang"
        )


def _layouts(config: Config, prefix: str, groups: Sequence[EngineGroup], *, is_trained: bool = True) -> Iterator[str]:
    """Parallel layouts of SGLang engines in these groups. `prefix` precedes the name of an option in messages."""
    transport = config.sync.update_weight_transport
    spec = transport_spec(transport)
    publishes = is_trained and is_started(config) and not config.debug.debug_rollout_only
    for group in groups:
        options = {**config.engines.sglang_options, **group.options}
        problems = [] if group.role == "placeholder" else list(layout_problems(options, group.gpus_per_engine))
        yield from (prefix + problem for problem in problems)
        by = f"with --update-weight-transport {transport}"
        if not problems and publishes and int(options.get("pp_size", 1)) > 1 and spec.pipeline_problem:
            yield f"{prefix}pp-size {options['pp_size']} {by}: {spec.pipeline_problem}"
        if publishes and spec.speculation_problem and (drafts := options.get("speculative_algorithm")):
            yield f"{prefix}speculative-algorithm {drafts} {by}: {spec.speculation_problem}"
        if publishes and (num := int(options.get("tokenizer_worker_num", 1))) > 1:
            yield (
                f"{prefix}tokenizer-worker-num {num}: each SGLang HTTP process has its own weight version, and "
                "only one of them is updated; remove it"
            )


def _transport(config: Config) -> Iterator[str]:
    engine, sync = config.cluster.engine, config.sync
    transport, spec = sync.update_weight_transport, transport_spec(sync.update_weight_transport)
    if is_served(config) and not spec.reaches_servers:
        what = f"--engine is {engine}" if engine != "embedded" else "--rollout-num-gpus starts servers"
        yield (
            f"--update-weight-transport {transport} only reaches an engine in this process, but {what}; use nccl "
            "(gloo on a CPU), or disk with a directory that the servers share"
        )
    has_file = config.engines.sglang_config is not None  # of servers, although it may be unreadable
    if not is_served(config) and engine not in SERVERS and spec.reaches_servers and not has_file:
        yield (
            f"--update-weight-transport {transport} is for servers, but --engine is {engine}; remove it, or add "
            "--rollout-num-gpus or --rollout-external-engine-addrs"
        )
    if sync.update_weight_mode == "delta" and not config.cluster.colocate and not spec.can_send_deltas:
        yield f"--update-weight-mode delta is not supported by {transport}; add --update-weight-transport disk"


def _colocated(config: Config) -> Iterator[str]:
    cluster, sync = config.cluster, config.sync
    if without := without_engines(config):
        yield f"{without} needs no engines; remove --colocate"
    if config.rollout.async_buffer_size:
        yield Problem(
            f"--colocate with --async-buffer-size {config.rollout.async_buffer_size}: engines cannot generate while "
            "the trainer uses their GPUs; use --rollout-num-gpus N instead of --colocate, or --async-buffer-size 0",
            "CFG03",
        )
    if sync.update_weight_mode == "delta":
        yield (
            "--update-weight-mode delta saves bytes on the way to other machines, but --colocate hands weights over in "
            "GPU memory, and a delta would add a copy of the model in host memory and files; remove one of them"
        )
    if cluster.offload_rollout and sync.update_weights_interval != 1:
        yield (
            f"--update-weights-interval {sync.update_weights_interval} with --colocate: offloaded engines lose their "
            "weights in each step; use 1, or --no-offload-rollout if both fit"
        )
    ranks, num_gpus = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node, config.engines.rollout_num_gpus or 0
    is_shared = transport_spec(sync.update_weight_transport).needs_shared_gpus
    if is_shared and num_gpus > ranks and not config.debug.debug_rollout_only:
        yield (
            f"--rollout-num-gpus {num_gpus} with --colocate on {ranks} training GPUs: engines on other GPUs cannot get "
            f"weights by {sync.update_weight_transport}; lower it, or use --update-weight-transport disk"
        )


def _on_ray(config: Config) -> Iterator[str]:
    topology, without = Topology.of(config), without_engines(config)
    if without and is_started(config) and not config.cluster.colocate:
        yield f"{without} needs no engines; remove --rollout-num-gpus"
    if not without and not is_served(config):
        yield (
            "the trainer runs on Ray, but there are no engine servers, and an engine in this process cannot get its "
            "weights; add --rollout-num-gpus N for separate GPUs, --colocate for the trainer's GPUs, or "
            "--rollout-external-engine-addrs"
        )
    node = topology.engine_node_gpus
    for size in sorted({size for _, size in topology.engine_parts if size > node and size % node}):
        yield (
            f"--rollout-num-gpus-per-engine {size} exceeds one machine (--num-gpus-per-node {node}), but is not "
            "a multiple of it; use whole machines"
        )
    for name, value in config.cluster.train_env_vars.items():
        if not isinstance(value, str):
            yield f"--train-env-vars: {name} is {shortened(value)}, expected a string; put it in quotes"


def device_problems(config: Config, device: str) -> Iterator[str]:
    """Yield one message per problem of a run whose trainer is on `device` ("cpu" or "cuda")."""
    debug, cluster = config.debug, config.cluster
    if device == "cpu" and debug.record_memory_history:
        yield "--record-memory-history records GPU memory, and this machine has no GPU; remove it"
    if debug.debug_rollout_only:
        return
    if device == "cpu" and uses_ray(config) and cluster.distributed_backend == "nccl":
        yield "--distributed-backend nccl needs GPUs, but training runs on the CPU; use gloo, or remove it"
    if problem := offload_problem(config.optim, device):
        yield problem
    dtype = "bfloat16" if config.train.bf16 or (device == "cuda" and not config.train.fp32) else "float32"
    if problem := attention_problem(config.train, config.megatron, device, dtype):
        yield problem
    transport = config.sync.update_weight_transport
    if device == "cuda" and cluster.colocate and (problem := transport_spec(transport).one_gpu_problem):
        yield f"--update-weight-transport {transport} with --colocate: {problem}; leave it out (ipc), or use disk"


def offload_problem(flags: OptimFlags, device: str) -> str | None:
    """Return the problem of offloading optimizer states from a device; None if there is none."""
    if device != "cpu" or not (flags.optimizer_cpu_offload or flags.offload_optimizer_states):
        return None
    flag = "--optimizer-cpu-offload" if flags.optimizer_cpu_offload else "--offload-optimizer-states"
    return f"{flag} has no effect: training runs on the CPU; remove it"


def attention_problem(train: TrainFlags, megatron: MegatronFlags, device: str, dtype: str) -> str | None:
    """Return why Megatron's flash attention cannot be used; None if it can, or is not requested."""
    if train.train_backend != "megatron" or megatron.attention_backend != "flash":
        return None
    if device == "cuda" and dtype == "bfloat16":
        return None
    return f"--attention-backend flash needs CUDA and bfloat16; this run has {device} and {dtype}; use auto"


def start_problems(config: Config, device: str) -> Iterator[str]:
    """Yield what is missing to start engine servers: SGLang, sglang-router, or GPUs."""
    if not is_started(config):
        return
    strategy, transport = config.engines.sglang_router_strategy, config.sync.update_weight_transport
    if config.cluster.engine == "sglang":
        if config.engines.sglang_options.get("device") != "cpu":
            if device != "cuda" and not uses_ray(config):  # a cluster has reserved its GPUs
                yield (
                    "--engine sglang needs a CUDA GPU, but none is visible; use --engine embedded on a CPU, or "
                    "--sglang-device cpu with a CPU build of SGLang"
                )
        elif device == "cuda":
            yield (
                "--sglang-device cpu, but the trainer is on a GPU and cannot send weights to a CPU engine; remove it, "
                "or hide the GPU with CUDA_VISIBLE_DEVICES="
            )
        elif config.cluster.colocate:
            yield "--sglang-device cpu with --colocate, which shares GPUs; remove --colocate"
        elif problem := transport_spec(transport).cpu_problem:
            yield f"--sglang-device cpu with --update-weight-transport {transport}: {problem}"
        if importlib.util.find_spec("sglang") is None:
            yield "--engine sglang, but SGLang is not installed; pip install 'furlong-rl[sglang]'"
    if strategy != "direct" and importlib.util.find_spec("sglang_router") is None:
        yield (
            f"--sglang-router-strategy {strategy}, but sglang-router is not installed; pip install sglang-router, or "
            "--sglang-router-strategy direct"
        )
