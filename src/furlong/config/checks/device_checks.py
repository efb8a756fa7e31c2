"""Rules that depend on the device of the run: "cuda" with GPUs, "cpu" without."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from furlong.config.checks.engine_checks import is_started
from furlong.config.sections import Config, MegatronFlags, OptimFlags, TrainFlags
from furlong.config.topology import uses_ray
from furlong.core.transports import transport_spec


def device_problems(config: Config, device: str) -> Iterator[str]:
    """Yield one message per problem of a run whose trainer is on `device`."""
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
    if device == "cuda" and cluster.colocate:
        yield from sharing_problems(config)


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


def sharing_problems(config: Config) -> Iterator[str]:
    """Yield why a weight transport does not work on shared GPUs."""
    transport = config.sync.update_weight_transport
    if problem := transport_spec(transport).one_gpu_problem:
        yield f"--update-weight-transport {transport} with --colocate: {problem}; leave it out (ipc), or use disk"


def start_problems(config: Config, device: str) -> Iterator[str]:
    """Yield what is missing to start engine servers: SGLang, sglang-router, or GPUs."""
    if not is_started(config):
        return
    strategy = config.engines.sglang_router_strategy
    if config.cluster.engine == "sglang":
        is_on_cpu = config.engines.sglang_options.get("device") == "cpu"
        if is_on_cpu:
            yield from _problems_on_cpu(config, device)
        elif device != "cuda" and not uses_ray(config):  # a cluster has reserved its GPUs
            yield (
                "--engine sglang needs a CUDA GPU, but none is visible; use --engine embedded on a CPU, or "
                "--sglang-device cpu with a CPU build of SGLang"
            )
        if importlib.util.find_spec("sglang") is None:
            yield "--engine sglang, but SGLang is not installed; pip install 'furlong[sglang]'"
    if strategy != "direct" and importlib.util.find_spec("sglang_router") is None:
        yield (
            f"--sglang-router-strategy {strategy}, but sglang-router is not installed; pip install sglang-router, or "
            "--sglang-router-strategy direct"
        )


def _problems_on_cpu(config: Config, device: str) -> Iterator[str]:
    """Yield settings that SGLang on CPUs does not support."""
    if device == "cuda":
        yield (
            "--sglang-device cpu, but the trainer is on a GPU and cannot send weights to a CPU engine; remove it, or "
            "hide the GPU with CUDA_VISIBLE_DEVICES="
        )
    elif config.cluster.colocate:
        yield "--sglang-device cpu with --colocate, which shares GPUs; remove --colocate"
    else:
        transport = config.sync.update_weight_transport
        if problem := transport_spec(transport).cpu_problem:
            yield f"--sglang-device cpu with --update-weight-transport {transport}: {problem}"
