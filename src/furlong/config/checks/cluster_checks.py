"""Rules of process counts, parallel sizes and placement, without access to a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from furlong.catalogue import Problem
from furlong.config.checks.engine_checks import is_served, is_started, without_engines
from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.config.topology import Topology, uses_ray
from furlong.core.text import shortened

SIZES = (
    "context_parallel_size",
    "dp_replicate_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
RECOMPUTED = ("mlp", "moe", "shared_experts")
ONLY_RAY = (
    "num_gpus_per_node",
    "placement_timeout",
    "distributed_backend",
    "distributed_timeout_minutes",
    "train_env_vars",
)


def cluster_problems(config: Config) -> Iterator[str]:
    """Yield one message per problem. `config` includes derived values."""
    cluster, specs = config.cluster, flag_specs(Config)
    yield from _size_problems(config)
    yield from _recompute_problems(config)
    if cluster.colocate:
        yield from _sharing(config)
    if not uses_ray(config):
        for name in ONLY_RAY:
            if getattr(cluster, name) != specs[name].default:
                yield (
                    f"{specs[name].flag} has no effect: the run does not use Ray; add --actor-num-gpus-per-node or "
                    "--ray-address, or remove it"
                )
        return
    yield from _engines(config)
    for name, value in cluster.train_env_vars.items():
        if not isinstance(value, str):
            yield f"--train-env-vars: {name} is {shortened(value)}, expected a string; put it in quotes"
        elif not name or "=" in name or not _is_text(name) or not _is_text(value):
            yield (
                f"--train-env-vars: {shortened(name)} with the value {shortened(value)} cannot be an environment "
                "variable; use a name without = and text without NUL characters and halves of surrogate pairs"
            )


def _is_text(text: str) -> bool:
    """Return whether an environment variable can contain this."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _engines(config: Config) -> Iterator[str]:
    """Problems of the engines of a run on Ray."""
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


def _sharing(config: Config) -> Iterator[str]:
    """Problems of --colocate, with or without Ray."""
    if without := without_engines(config):
        yield f"{without} needs no engines; remove --colocate"
    if config.rollout.async_buffer_size:
        yield Problem(
            f"--colocate with --async-buffer-size {config.rollout.async_buffer_size}: engines cannot generate while "
            "the trainer uses their GPUs; use --rollout-num-gpus N instead of --colocate, or --async-buffer-size 0",
            "CFG03",
        )


def _size_problems(config: Config) -> Iterator[str]:
    """Parallel sizes that do not divide the number of training processes."""
    train, specs = config.train, flag_specs(Config)
    num_ranks = Topology.of(config).num_ranks
    is_megatron = train.train_backend == "megatron"
    sizes = SIZES if is_megatron else SIZES[:2]  # the others are refused with FSDP
    if any(getattr(train, name) < 1 for name in sizes):
        return  # reported as outside of the range
    odd = [name for name in sizes if num_ranks % (size := getattr(train, name)) or (size > 1 and not num_ranks)]
    for name in odd:
        yield (
            f"{specs[name].flag} {getattr(train, name)} does not divide the {num_ranks} training processes "
            "(--actor-num-nodes x --actor-num-gpus-per-node); use a divisor"
        )
    if odd or not is_megatron:
        return
    tensor, pipeline = train.tensor_model_parallel_size, train.pipeline_model_parallel_size
    context = train.context_parallel_size
    if num_ranks % (copy := tensor * pipeline * context):
        yield (
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} x "
            f"--context-parallel-size {context} = {copy} does not divide the {num_ranks} training processes; give "
            "smaller sizes, or more of them"
        )
    else:
        yield from _expert_problems(config, num_ranks // pipeline)


def _expert_problems(config: Config, stage_ranks: int) -> Iterator[str]:
    """Expert-parallel sizes that do not divide the ranks of a pipeline stage."""
    expert = config.train.expert_model_parallel_size
    expert_tensor = config.megatron.expert_tensor_parallel_size
    tensor = expert_tensor or (config.train.tensor_model_parallel_size if expert > 1 else 1)
    if stage_ranks % (expert * tensor):
        source = "" if expert_tensor else ", which follows --tensor-model-parallel-size"
        yield (
            f"--expert-model-parallel-size {expert} x --expert-tensor-parallel-size {tensor}{source} = "
            f"{expert * tensor} does not divide the {stage_ranks} training processes of a pipeline stage; give smaller "
            "sizes" + ("" if expert_tensor or tensor == 1 else ", such as --expert-tensor-parallel-size 1")
        )


def _recompute_problems(config: Config) -> Iterator[str]:
    """Megatron's rules of recomputation, and the supported modules."""
    megatron = config.megatron
    if config.train.train_backend != "megatron" or config.train.recompute_activations:
        return
    modules = megatron.recompute_modules or ()
    is_incomplete = None in (megatron.recompute_method, megatron.recompute_num_layers)
    if megatron.recompute_granularity == "full" and is_incomplete:
        yield (
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers; add them, or use "
            "--recompute-activations, which is full, uniform and 1"
        )
    elif megatron.recompute_granularity == "selective":
        odd = set(modules) - set(RECOMPUTED)
        if odd or not modules:
            state = f"has {', '.join(sorted(odd))}" if modules else "is not given"
            known = ", ".join(RECOMPUTED)
            yield f"--recompute-granularity selective: --recompute-modules {state}; choose from {known}"
