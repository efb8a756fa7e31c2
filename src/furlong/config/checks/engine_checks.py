"""Rules of inference engines and weight transports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from furlong.config.engine_groups import EngineGroup, is_split, layout_problems, served_models
from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.core.transports import transport_spec
from furlong.errors import ConfigError

SERVERS = ("external", "sglang")  # never in this process; embedded engines are servers if they have GPUs of their own


def is_started(config: Config) -> bool:
    """Whether furlong starts engine servers."""
    return config.cluster.engine in ("sglang", "embedded") and config.engines.rollout_num_gpus is not None


def is_served(config: Config) -> bool:
    """Whether engines are servers, started by furlong or not."""
    return config.cluster.engine == "external" or is_started(config)


def without_engines(config: Config) -> str:
    """Return the flag that makes engines unnecessary; "" if the run generates."""
    if config.debug.debug_train_only:
        return "--debug-train-only"
    return "--loss-type sft_loss" if config.algo.loss_type == "sft_loss" and not config.eval.is_used else ""


def engine_problems(config: Config) -> Iterator[str]:
    """Yield one message per problem. `config` includes derived values."""
    cluster = config.cluster
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
    if config.engines.sglang_options and cluster.engine not in ("sglang", "auto"):
        name = _first(config.engines.sglang_options)
        yield f"--sglang-{name} has no effect with --engine {cluster.engine}; remove it, or use --engine sglang"
    if config.engines.router_options and config.engines.sglang_router_strategy == "direct":
        yield (
            f"--router-{_first(config.engines.router_options)} has no effect without a router; give "
            "--sglang-router-strategy cache_aware, or remove it"
        )
    yield from _group_problems(config)
    yield from _counts(config)
    if config.engines.sglang_config is None:
        alike = EngineGroup("regular", 0, config.engines.rollout_num_gpus_per_engine)
        yield from _layouts(config, "--sglang-", [alike])
    yield from _transport(config)


def _group_problems(config: Config) -> Iterator[str]:
    """Problems of heterogeneous engine groups (`--sglang-config`, `--prefill-num-servers`)."""
    flags = config.engines
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
    if len(models) > 1:
        yield from _problems_of_several(config, len(models))
    if flags.sglang_config is not None:
        for model in models:
            yield from _layouts(config, f"{flag}, model {model.name}: ", model.groups, is_trained=model.is_trained)
    total = sum(group.num_gpus for group in groups)
    if total != flags.rollout_num_gpus:
        yield (
            f"--sglang-config has groups of {total} GPUs in total, but --rollout-num-gpus is {flags.rollout_num_gpus}; "
            "remove that flag, or make them equal"
        )
    if len(models) == 1 and is_split(groups) and flags.sglang_router_strategy == "direct":
        yield f"--sglang-router-strategy direct with {flag}: a router has to connect prefill and decode; remove it"
    if config.cluster.engine == "embedded":
        if is_split(groups):
            yield f"{flag} splits prefill and decode, which the embedded engine does not support; use --engine sglang"
        if any(group.options or (group.gpus_per_engine != 1 and group.num_engines) for group in groups):
            yield (
                f"{flag}: the embedded engine supports no overrides and runs on one device; use "
                "num_gpus_per_engine 1 without overrides, or --engine sglang"
            )


def _problems_of_several(config: Config, num_models: int) -> Iterator[str]:
    """Problems of several models in --sglang-config."""
    if config.engines.sglang_router_strategy == "direct":
        yield (
            f"--sglang-router-strategy direct with {num_models} models in --sglang-config: functions reach a model "
            "through its router; remove it"
        )
    if config.cluster.colocate:
        yield (
            f"--colocate with {num_models} models in --sglang-config: a model that is not trained cannot release its "
            "weights; give trainer and engines separate GPUs (--actor-num-gpus-per-node, without --colocate)"
        )


def _counts(config: Config) -> Iterator[str]:
    """Numbers of engines and GPUs."""
    engine, flags = config.cluster.engine, config.engines
    if flags.sglang_config is not None:
        return
    total, each = flags.rollout_num_gpus, flags.rollout_num_gpus_per_engine
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
        if not problems and publishes and int(options.get("pp_size", 1)) > 1 and spec.pipeline_problem:
            yield (
                f"{prefix}pp-size {options['pp_size']} with --update-weight-transport {transport}: "
                f"{spec.pipeline_problem}"
            )
        if publishes and spec.speculation_problem and (drafts := options.get("speculative_algorithm")):
            yield (
                f"{prefix}speculative-algorithm {drafts} with --update-weight-transport {transport}: "
                f"{spec.speculation_problem}"
            )
        if publishes and (num := int(options.get("tokenizer_worker_num", 1))) > 1:
            yield (
                f"{prefix}tokenizer-worker-num {num}: each SGLang HTTP process has its own weight version, and "
                "only one of them is updated; remove it"
            )


def _transport(config: Config) -> Iterator[str]:
    engine, sync = config.cluster.engine, config.sync
    transport = sync.update_weight_transport
    spec, specs = transport_spec(transport), flag_specs(Config)
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
    if sync.update_weight_mode == "delta" and config.cluster.colocate:
        yield (
            "--update-weight-mode delta saves bytes on the way to other machines, but --colocate hands weights over in "
            "GPU memory, and a delta would add a copy of the model in host memory and files; remove one of them"
        )
    elif sync.update_weight_mode == "delta" and not spec.can_send_deltas:
        yield f"--update-weight-mode delta is not supported by {transport}; add --update-weight-transport disk"
    for name in ("update_weight_timeout", "verify_weights"):
        if not spec.reaches_servers and getattr(sync, name) != specs[name].default:
            yield f"{specs[name].flag} is for servers, but --engine is embedded; remove it"
    yield from _sharing_problems(config)


def _sharing_problems(config: Config) -> Iterator[str]:
    """Problems of trainer and engines on the same GPUs."""
    cluster, sync = config.cluster, config.sync
    if not cluster.colocate:
        for name in ("offload_train", "offload_rollout"):
            if getattr(cluster, name):
                yield f"--{name.replace('_', '-')} has no effect without --colocate; add that or remove it"
        return
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


def _first(options: dict[str, Any]) -> str:
    return next(iter(options)).replace("_", "-")
