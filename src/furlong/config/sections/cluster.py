"""Flags of the section `cluster`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class ClusterFlags:
    """Engine type, machines, GPUs, threads and Ray."""

    engine: Literal["auto", "embedded", "sglang", "external"] = flag(
        "auto",
        "Inference engine: `embedded` is furlong's own, in this process or, with --rollout-num-gpus, in servers; "
        "`sglang` starts SGLang servers; `external` uses servers that are already running; `auto` is `external` if "
        "addresses are given, else `embedded`.",
    )
    rollout_external_engine_addrs: tuple[str, ...] | None = flag(
        None,
        "Addresses HOST:PORT of running SGLang or `furlong serve` servers.",
        needs="engine=external or engine=auto",
    )
    sglang_router_ip: str | None = flag(
        None,
        "Host of a running sglang-router to send requests through.",
        needs="engine=external or engine=auto; sglang_router_port",
    )
    sglang_router_port: int | None = flag(None, "Port of that router.", within="[1, 65535]", needs="sglang_router_ip")
    sglang_router_request_timeout_secs: int = flag(
        14400, "Timeout of a request to a server, in seconds.", within="[1, inf)"
    )
    sglang_server_concurrency: int = flag(512, "Maximum number of concurrent requests per server.", within="[1, inf)")
    sglang_api_key: str | None = flag(
        None,
        "API key of the servers; servers that furlong starts are started with it. Prefer the environment variable "
        "FURLONG_API_KEY, which `ps` does not show.",
        secret=True,
    )
    actor_num_nodes: int = flag(1, "Number of training machines.", within="[1, inf)")
    actor_num_gpus_per_node: int = flag(
        1,
        "Training GPUs per machine, one process per GPU. With more than one process in total the run uses Ray; in a "
        "cluster without GPUs each process gets a CPU slot.",
        within="[1, inf)",
    )
    num_gpus_per_node: int = flag(
        8, "GPUs per machine for inference; an engine with more GPUs spans machines.", within="[1, inf)"
    )
    colocate: bool = flag(
        False,
        "Run training and inference in turn on the same GPUs. Each releases its memory to the other, unless "
        "--no-offload-train or --no-offload-rollout is given.",
    )
    ray_address: str | None = flag(
        None,
        "Address HOST:PORT of a Ray cluster, or `auto`; with it, even a single trainer process runs on Ray. Default: "
        "RAY_ADDRESS, else a local cluster that ends with the run.",
    )
    placement_timeout: float = flag(
        600.0,
        "Seconds to wait for GPUs that are in use by others. A request for more GPUs than the cluster has fails "
        "immediately.",
        within="(0, inf)",
    )
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        None, "Communication backend of the trainer processes. Default: nccl on GPUs, gloo on CPUs."
    )
    distributed_timeout_minutes: int = flag(
        10, "Timeout of a collective operation between trainer processes, in minutes.", within="[1, inf)"
    )
    train_env_vars: dict[str, Any] = flag(  # noqa: RUF009  flag() declares a field
        {}, "Environment variables of the trainer processes, as a JSON object."
    )
    offload: bool = flag(False, "Same as --offload-train together with --offload-rollout.")
    offload_train: bool | None = flag(
        None, "Move the trainer's state to host memory while the engines generate. Default: on with --colocate."
    )
    offload_rollout: bool | None = flag(
        None, "Release the engines' GPU memory during training. Default: on with --colocate."
    )
    num_threads: int | None = flag(
        None, "Number of CPU threads for PyTorch. Default: the cores available to this process.", within="[1, 1024]"
    )
    embedded_num_slots: int = flag(
        128,
        "Number of sequences that the embedded engine decodes at the same time.",
        within="[1, inf)",
        needs="engine=embedded or engine=auto",
    )
    embedded_dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto",
        "Precision of the embedded engine's weights; `auto` is the trainer's.",
        needs="engine=embedded or engine=auto",
    )
