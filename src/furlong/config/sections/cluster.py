"""Processes: what generates, what trains, where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class ClusterFlags:
    """Processes, threads and the engine."""

    engine: Literal["auto", "embedded", "sglang", "external"] = flag(
        "auto",
        "What generates: `embedded` is furlong's own engine, in this process or with --rollout-num-gpus in servers of "
        "its own; `sglang` are SGLang servers that furlong starts; `external` are servers that you started. `auto` is "
        "external where addresses are given, else embedded.",
    )
    rollout_external_engine_addrs: tuple[str, ...] | None = flag(
        None, "Addresses HOST:PORT of running servers: SGLang or `furlong serve`."
    )
    sglang_router_ip: str | None = flag(
        None, "Host of a running sglang-router that requests go through.", needs="sglang_router_port"
    )
    sglang_router_port: int | None = flag(None, "Its port.", within="[1, 65535]", needs="sglang_router_ip")
    sglang_router_request_timeout_secs: int = flag(
        14400, "Seconds that one request to a server may take.", within="[1, inf)"
    )
    sglang_server_concurrency: int = flag(512, "Requests that one server has at the same time.", within="[1, inf)")
    sglang_api_key: str | None = flag(
        None,
        "Key that the servers want; those that furlong starts are given it. Better: the variable FURLONG_API_KEY, "
        "which `ps` does not show.",
        secret=True,
    )
    actor_num_nodes: int = flag(1, "Machines that train.", within="[1, inf)")
    actor_num_gpus_per_node: int = flag(
        1,
        "GPUs that train on each of them, one process a GPU. More than one process in all runs on Ray; without GPUs in "
        "the cluster a GPU is a CPU slot.",
        within="[1, inf)",
    )
    num_gpus_per_node: int = flag(
        8, "GPUs of one machine that generates: an engine with more of them spans machines.", within="[1, inf)"
    )
    colocate: bool = flag(
        False,
        "Generate on the GPUs that train, in turn with it. Each leaves its memory to the other, unless "
        "--no-offload-train or --no-offload-rollout is given.",
    )
    ray_address: str | None = flag(
        None,
        "Address HOST:PORT of a Ray cluster, or `auto`; with it even one trainer process runs on Ray. Without it: "
        "RAY_ADDRESS, or else a cluster of this machine that ends with the run.",
    )
    placement_timeout: float = flag(
        600.0,
        "Seconds to wait for GPUs that others hold; more than the cluster has are refused at once.",
        within="(0, inf)",
    )
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        None, "How trainer processes talk to each other. Without it: nccl on GPUs, gloo on CPUs."
    )
    distributed_timeout_minutes: int = flag(
        10, "Minutes that a trainer process waits for the others in one operation.", within="[1, inf)"
    )
    train_env_vars: dict[str, Any] = flag(  # noqa: RUF009  flag() declares a field
        {}, "Environment variables of the trainer processes, as a JSON object."
    )
    offload: bool = flag(False, "The same as --offload-train and --offload-rollout.")
    offload_train: bool | None = flag(
        None, "The trainer goes to host memory while engines generate. Without it: as --colocate is."
    )
    offload_rollout: bool | None = flag(
        None, "Engines release their memory while the trainer trains. Without it: as --colocate is."
    )
    num_threads: int | None = flag(
        None, "CPU threads of PyTorch. Without it: the cores that this process may use.", within="[1, 1024]"
    )
    embedded_num_slots: int = flag(
        128, "Sequences that the embedded engine generates at the same time.", within="[1, inf)"
    )
    embedded_dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "Precision of the embedded engine's weights; `auto` is the trainer's."
    )
