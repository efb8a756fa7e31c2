"""Where things run: the engine, the trainer, weight publication, and what happens when a part fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from furlong.config.flag import flag


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
        None, "Key that the servers want; those that furlong starts are given it.", secret=True
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


@dataclass(frozen=True)
class TrainFlags:
    """The training backend, its precision, and how samples become micro-batches."""

    train_backend: Literal["fsdp", "megatron"] = flag(
        "fsdp",
        "What trains: `fsdp` runs Hugging Face models on PyTorch; `megatron` runs the families of "
        "docs/megatron.md on Megatron-core.",
    )
    bf16: bool = flag(False, "Compute in bfloat16. Without a precision flag: bfloat16 on CUDA, float32 on CPU.")
    fp32: bool = flag(False, "Compute in float32.")
    seed: int = flag(1234, "Seed of everything that training draws at random.", within="[0, 1e18]")
    deterministic_mode: bool = flag(
        False,
        "Use deterministic algorithms only (PyTorch, cuBLAS, NCCL) and a fixed number of threads, 1 without "
        "--num-threads, and deterministic inference in SGLang servers that furlong starts; slower. Servers that you "
        "start need --enable-deterministic-inference.",
    )
    global_batch_size: int | None = flag(
        None,
        "Samples of one optimizer step. Without it: one rollout's samples / --num-steps-per-rollout.",
        within="[1, inf)",
    )
    num_steps_per_rollout: int | None = flag(
        None, "Optimizer steps made of one rollout. Without it: follows from --global-batch-size.", within="[1, inf)"
    )
    micro_batch_size: int = flag(
        1, "Samples of one forward and backward pass, unless --use-dynamic-batch-size is on.", within="[1, inf)"
    )
    use_dynamic_batch_size: bool = flag(
        False, "Fill micro-batches by tokens, up to --max-tokens-per-gpu, and not by samples."
    )
    max_tokens_per_gpu: int | None = flag(
        None,
        "Tokens of one micro-batch; a longer sample goes alone.",
        within="[1, inf)",
        needs="use_dynamic_batch_size",
    )
    balance_data: bool = flag(False, "Give every data-parallel rank about the same work.")
    balance_by_flops: bool = flag(
        False, "Measure that work in FLOPs, not in tokens; sets --balance-data.", needs="use_dynamic_batch_size"
    )
    seq_length: int | None = flag(
        None, "Longest prompt + response, in tokens; the default of --rollout-max-context-len.", within="[2, inf)"
    )
    log_probs_chunk_size: int = flag(
        -1, "Tokens whose vocabulary logits exist at the same time; -1 chooses by memory.", within="[-1, inf)"
    )
    recompute_activations: bool = flag(False, "Recompute activations in the backward pass: less memory, more time.")
    context_parallel_size: int = flag(
        1,
        "Training processes that share each sequence: each runs its part of the tokens and, in attention, of the heads "
        "(`fsdp`) or of the queries (`megatron`). --max-tokens-per-gpu then counts each one's tokens.",
        within="[1, inf)",
    )
    dp_replicate_size: int = flag(
        1,
        "Copies of the sharded model, each over an equal share of the training processes (HSDP): gradients are reduced "
        "inside a copy, then between copies.",
        within="[1, inf)",
    )
    tensor_model_parallel_size: int = flag(
        1, "Training processes that share each layer; with --train-backend megatron.", within="[1, inf)"
    )
    pipeline_model_parallel_size: int = flag(
        1,
        "Training processes in a row, each with its part of the layers; with --train-backend megatron.",
        within="[1, inf)",
    )
    expert_model_parallel_size: int = flag(
        1, "Training processes that share the experts of a layer; with --train-backend megatron.", within="[1, inf)"
    )
    sequence_parallel: bool = flag(
        False, "Split by tokens what --tensor-model-parallel-size leaves whole: norms and residuals."
    )
    compile_layers: Literal["auto", "on", "off"] = flag(
        "auto", "Compile the decoder layers; `auto` does for large models in bfloat16 on a GPU. It takes a minute."
    )
    only_train_params_name_list: tuple[str, ...] | None = flag(
        None, "Regular expressions; only parameters whose name matches one of them are trained."
    )
    freeze_params_name_list: tuple[str, ...] | None = flag(
        None, "Regular expressions; parameters whose name matches one of them are not trained."
    )


@dataclass(frozen=True)
class OptimFlags:
    """The optimizer and its schedule. The schedule counts optimizer steps."""

    optimizer: Literal["adam", "sgd"] = flag("adam", "`adam` is AdamW (decoupled weight decay).")
    lr: float = flag(1e-6, "Learning rate.", within="[0, inf)")
    min_lr: float = flag(0.0, "Learning rate at the end of the decay.", within="[0, inf)")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = flag(
        "constant", "How the learning rate falls after the warm-up."
    )
    lr_decay_iters: int | None = flag(
        None, "Optimizer steps until --min-lr. Without it: all steps of the run.", within="[1, inf)"
    )
    lr_warmup_iters: int = flag(0, "Optimizer steps over which the learning rate rises to --lr.", within="[0, inf)")
    lr_warmup_fraction: float | None = flag(
        None, "The same as a fraction of --lr-decay-iters; excludes --lr-warmup-iters.", within="[0, 1]"
    )
    lr_warmup_init: float = flag(0.0, "Learning rate before the first step of the warm-up.", within="[0, inf)")
    weight_decay: float = flag(0.01, "Decoupled weight decay.", within="[0, inf)")
    adam_beta1: float = flag(0.9, "Decay of Adam's first moment.", within="[0, 1)")
    adam_beta2: float = flag(0.999, "Decay of Adam's second moment.", within="[0, 1)")
    adam_eps: float = flag(1e-8, "Added to the root of Adam's second moment.", within="(0, inf)")
    clip_grad: float = flag(1.0, "Largest global gradient norm; 0 does not clip.", within="[0, inf)")
    reset_optimizer_states: bool = flag(False, "Start every rollout with a fresh optimizer.")
    offload_optimizer_states: bool = flag(
        False, "Keep the optimizer's moments in host memory between steps: 8 bytes a parameter less on the GPU."
    )
    optimizer_cpu_offload: bool = flag(
        False,
        "Keep in host memory between steps all that only a step needs, the moments and, where they are not the weights "
        "themselves, float32 masters: 12 bytes a parameter less beside activations. Steps are taken on the GPU.",
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False,
        "Taken since it changes nothing: what comes to the GPU for a step comes without being waited for one by one.",
        needs="optimizer_cpu_offload",
    )
    use_distributed_optimizer: bool = flag(
        False, "Taken since it changes nothing: training processes share the optimizer's states without it."
    )
    use_precision_aware_optimizer: bool = flag(
        False, "Taken since it changes nothing: its precisions are float32, and flags for others are not taken."
    )
    use_stateless_adam: bool = flag(
        False, "Keep no moments between steps; wants --optimizer adam and --no-save-optim.", needs="no_save_optim"
    )


@dataclass(frozen=True)
class SyncFlags:
    """How trained weights reach the engine. Every publication is verified by checksum."""

    update_weights_interval: int = flag(1, "Rollouts between two publications of the weights.", within="[1, inf)")
    update_weight_mode: Literal["full", "delta"] = flag(
        "full", "What is sent: `full` is every tensor, `delta` what changed since the publication before."
    )
    update_weight_transport: Literal["memory", "ipc", "nccl", "disk"] | None = flag(
        None,
        "How it is sent: `memory` copies to the engine in this process; to servers `nccl` broadcasts (gloo on a CPU), "
        "`disk` writes a folder, `ipc` shares memory on one machine. Without it: memory; nccl to servers, ipc if "
        "they share the trainer's GPUs.",
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = flag(
        "xor", "How a delta says what changed: `xor` of the bits, or positions and values to `overwrite`."
    )
    update_weight_delta_checksum: Literal["xxh3-128", "adler32"] = flag(
        "xxh3-128", "Checksum of each tensor that results from a delta."
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        "Folder beside SGLang servers of the trainer's machine, brought up to date by each delta and loaded by them. "
        "Without it: they get a whole folder.",
    )
    update_weight_timeout: float = flag(
        300.0, "Seconds that an engine may take for one bucket, or one folder, of a publication.", within="(0, inf)"
    )
    update_weight_proof: Literal["before", "beside"] = flag(
        "before",
        "When it is verified that engines have the weights they were sent: before they serve, or while they generate, "
        "but before anything is trained on.",
    )
    update_weight_disk_dir: str | None = flag(
        None, "Folder of `disk`, which the servers see under this path. Without it: weights/ in the run's folder."
    )
    update_weight_disk_keep_files: bool = flag(False, "Keep the folders of older versions.")
    update_weight_buffer_size: int = flag(512 * 1024**2, "Bytes of weights sent at a time.", within="[1, inf)")
    pause_mode: Literal["finish", "hold", "abort"] = flag(
        "finish",
        "What running requests do during a publication: end first, wait and go on with new weights, or end unfinished.",
    )


@dataclass(frozen=True)
class FaultFlags:
    """What happens when data, a reward, an engine or a step fails."""

    use_fault_tolerance: bool = flag(
        False,
        "Start an engine that died or hangs again, give it the current weights, and send its requests to the others "
        "meanwhile; without it such an engine ends the run.",
        needs="rollout_num_gpus",
    )
    rollout_health_check_interval: float = flag(
        30.0, "Seconds between two health checks of an engine.", within="(0, inf)", needs="use_fault_tolerance"
    )
    rollout_health_check_timeout: float = flag(
        30.0, "Seconds within which an engine must answer one.", within="(0, inf)", needs="use_fault_tolerance"
    )
    rollout_health_check_first_wait: float = flag(
        0.0, "Seconds before the first one, once an engine is up.", within="[0, inf)", needs="use_fault_tolerance"
    )
    rollout_max_engine_restarts: int = flag(
        10, "Engines that a run starts again before it gives up.", within="[0, inf)", needs="use_fault_tolerance"
    )
    skip_bad_rows: bool = flag(False, "Count and skip unusable rows of the data; without it they are an error.")
    reward_timeout: float = flag(
        30.0, "Seconds that one reward call may take; then it counts as timed out.", within="(0, inf)"
    )
    generate_timeout: float | None = flag(
        None, "Seconds that one sample's generation may take. Without it: no limit.", within="(0, inf)"
    )
    check_for_nan_in_loss_and_grad: bool = flag(
        True,
        "Skip and count optimizer steps whose gradient is not finite; without the flag such a step is an error.",
        name="--no-check-for-nan-in-loss-and-grad",
    )
    skip_self_test: bool = flag(
        False, "Do not compare log-probs of engine and trainer on the first batches before training on them."
    )
    hang_timeout: float = flag(
        3600.0,
        "Seconds without any progress (a step, group, micro-batch or published tensor) after which the stacks of all "
        "processes are written into the run's folder; 0 never. Longer than the longest step on other machines.",
        within="[0, inf)",
    )
    on_hang: Literal["warn", "stop"] = flag(
        "warn",
        "What happens then: `warn` tells it; `stop` also ends the run, with a checkpoint of the last step where --save "
        "is given and no rollout runs ahead.",
        needs="hang_timeout",
    )
    on_diagnosis: Literal["warn", "stop", "strict"] = flag(
        "warn",
        "What a diagnosis of the running doctor does: `warn` tells it; `stop` ends the run in good order after the "
        "step if it is an error, `strict` if it is a warning too.",
    )
