"""Flags of machines, inference servers and weight updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from furlong.config.flag_spec import flag
from furlong.core.transports import TransportName

_SERVERS = "rollout_num_gpus or engine!=embedded"
_ON_RAY = "ray_address or actor_num_gpus_per_node>1 or actor_num_nodes>1"


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
    sglang_router_port: int | None = flag(
        None,
        "Port of that router; without --sglang-router-ip, of the router or the /generate endpoint that the run opens. "
        "Default: a free one.",
        within="[1, 65535]",
    )
    sglang_router_request_timeout_secs: int = flag(
        14400, "Timeout of a request to a server, in seconds.", within="[1, inf)", needs=_SERVERS
    )
    sglang_server_concurrency: int = flag(
        512, "Maximum number of concurrent requests per server.", within="[1, inf)", needs=_SERVERS
    )
    sglang_api_key: str | None = flag(
        None,
        "API key of the servers, teachers included; servers that furlong starts are started with it. Prefer the "
        "environment variable FURLONG_API_KEY, which `ps` does not show.",
        needs=_SERVERS + " or opd_type=sglang",
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
        8, "GPUs per machine for inference; an engine with more GPUs spans machines.", within="[1, inf)", needs=_ON_RAY
    )
    colocate: bool = flag(
        False,
        "Run training and inference in turn on the same GPUs. Each releases its memory to the other, unless both fit "
        "by the memory plan, or --no-offload-train or --no-offload-rollout is given.",
        needs="engine!=external",
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
        needs=_ON_RAY,
    )
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        None, "Communication backend of the trainer processes. Default: nccl on GPUs, gloo on CPUs.", needs=_ON_RAY
    )
    distributed_timeout_minutes: int = flag(
        10, "Timeout of a collective operation between trainer processes, in minutes.", within="[1, inf)", needs=_ON_RAY
    )
    train_env_vars: dict[str, Any] = flag(
        {}, "Environment variables of the trainer processes, as a JSON object.", needs=_ON_RAY
    )
    offload: bool = flag(
        False,
        "Same as --offload-train together with --offload-rollout.",
        needs="colocate",
        excludes="debug_rollout_only",
    )
    offload_train: bool | None = flag(
        None,
        "Move the trainer's state to host memory while the engines generate, and of policy and critic the one that is "
        "not in use. Default: on with a critic, and with --colocate unless trainer and engines fit together.",
        needs="colocate or advantage_estimator.has_critic",
        excludes="debug_rollout_only",
    )
    offload_rollout: bool | None = flag(
        None,
        "Release the engines' GPU memory during training. Default: on with --colocate unless trainer and engines fit "
        "together.",
        needs="colocate",
        excludes="debug_rollout_only",
    )
    num_threads: int | None = flag(
        None, "Number of CPU threads for PyTorch. Default: the cores available to this process.", within="[1, 1024]"
    )
    compile_cache_dir: str | None = flag(
        None,
        "Folder for kernels that torch, Triton and SGLang compile, so that the next run, also in another container, "
        "starts with them. Default: their own folders in /tmp and the home directory.",
    )
    embedded_num_slots: int = flag(
        128,
        "Number of sequences that the embedded engine decodes at the same time. On a GPU the default grows to the "
        "requests of an engine, at most 1,024, as far as their keys and values fit.",
        within="[1, inf)",
        needs="engine=embedded or engine=auto",
    )
    embedded_dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto",
        "Precision of the embedded engine's weights; `auto` is the trainer's.",
        needs="engine=embedded or engine=auto",
    )


@dataclass(frozen=True)
class EnginesFlags:
    """Inference servers that furlong starts: number, GPUs, logs and options."""

    rollout_num_gpus: int | None = flag(
        None,
        "Total number of GPUs for inference servers, one server per --rollout-num-gpus-per-engine GPUs. With "
        "--engine embedded this is the number of servers, also on CPUs; without this flag that engine runs in this "
        "process.",
        within="[1, inf)",
        needs="engine!=external",
    )
    rollout_num_gpus_per_engine: int = flag(1, "GPUs per engine.", within="[1, inf)", needs="rollout_num_gpus")
    prefill_num_servers: int | None = flag(
        None,
        "Number of engines that only prefill; the others only decode, behind a router (--sglang-router-strategy). "
        "Requires --engine sglang.",
        within="[1, inf)",
        needs="rollout_num_gpus; engine!=external",
        excludes="sglang_config",
    )
    sglang_config: str | None = flag(
        None,
        "YAML file of models and their engine groups: GPUs, role (regular, prefill, decode, placeholder) and "
        "options. Sets --rollout-num-gpus to their total. Exactly one model is trained.",
        needs="engine!=external",
    )
    sglang_log_dir: str | None = flag(
        None, "Directory of the engine logs. Default: logs/ in the run directory.", needs="rollout_num_gpus"
    )
    sglang_server_start_timeout: float = flag(
        1800.0, "Timeout of an engine's start, in seconds.", within="(0, inf)", needs="rollout_num_gpus"
    )
    sglang_options: dict[str, Any] = flag(
        {},
        "SGLang options as a JSON object; each is also available as a flag --sglang-NAME, such as "
        "--sglang-attention-backend fa3 or --sglang-disable-cuda-graph.",
    )
    sglang_router_strategy: Literal["direct", "cache_aware", "round_robin", "random", "power_of_two", "manual"] = flag(
        "direct",
        "Routing of requests: `direct` sends them from this process, keeping the samples of a prompt together and "
        "the load even; the others start an sglang-router with this policy. `manual` keeps sessions on one engine.",
        needs="rollout_num_gpus",
    )
    router_options: dict[str, Any] = flag(
        {}, "sglang-router options as a JSON object; each is also available as a flag --router-NAME."
    )


@dataclass(frozen=True)
class SyncFlags:
    """Weight updates from the trainer to the engines. Every update is verified by checksum."""

    update_weights_interval: int = flag(
        1,
        "Rollouts between weight updates. Weights are also updated before a save and an evaluation.",
        within="[1, inf)",
    )
    update_weight_mode: Literal["full", "delta"] = flag(
        "full",
        "What to send: `full` sends every tensor, `delta` only what changed since the last update (`disk` only).",
    )
    update_weight_transport: TransportName | None = flag(
        None,
        "How to send weights: `memory` copies to the engine in this process; to servers, `nccl` broadcasts (gloo on "
        "CPUs), `disk` writes a directory, `ipc` shares GPU memory on one machine. Default: memory for the engine in "
        "this process, ipc with --colocate, else nccl.",
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = flag(
        "xor",
        "Encoding of a delta: `xor` of the bits, or positions and values to `overwrite`.",
        needs="update_weight_mode=delta",
    )
    update_weight_delta_checksum: Literal["xxh3-128", "adler32"] = flag(
        "xxh3-128", "Checksum of each tensor after a delta is applied.", needs="update_weight_mode=delta"
    )
    update_weight_timeout: float = flag(
        300.0,
        "Timeout of an engine for one bucket, or one directory, of a weight update, and for its checksums, in seconds.",
        within="(0, inf)",
        needs="update_weight_transport!=memory",
    )
    verify_weights: Literal["before", "during"] = flag(
        "before",
        "When the weights in the engines are verified: `before` they generate, or `during` generation, but before "
        "their samples are trained on.",
        needs="update_weight_transport!=memory",
    )
    update_weight_disk_dir: str | None = flag(
        None,
        "Directory of the `disk` transport, under the same path on all servers. Default: weights/ in the run "
        "directory.",
        needs="update_weight_transport=disk",
    )
    rollout_data_transport: Literal["object-store", "nixl"] = flag(
        "object-store",
        "Accepted for slime compatibility; no effect: batches are sent through Ray's object store.",
        instead="batches are sent through Ray's object store",
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        "Accepted for slime compatibility; no effect: engines load weight updates from --update-weight-disk-dir.",
        instead="engines load weight updates from --update-weight-disk-dir",
    )
    custom_update_weight_post_write_path: str | None = flag(
        None,
        "User function called once the files of a weight update are written, before engines read them.",
        needs="update_weight_transport=disk",
    )
    update_weight_disk_keep_files: bool = flag(
        False, "Keep the directories of older versions.", needs="update_weight_transport=disk"
    )
    update_weight_buffer_size: int = flag(512 * 1024**2, "Bytes of weights to send at a time.", within="[1, inf)")
    pause_mode: Literal["finish", "hold", "abort"] = flag(
        "finish",
        "Requests in flight during a weight update: `finish` completes them first, `hold` pauses them and continues "
        "with the new weights, `abort` ends them unfinished.",
    )
