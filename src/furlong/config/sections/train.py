"""Flags of training: backend, batch sizes, parallelism and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class TrainFlags:
    """Training backend, batch sizes, parallelism and precision."""

    train_backend: Literal["fsdp", "megatron"] = flag(
        "fsdp",
        "Training backend: `fsdp` trains Hugging Face models with PyTorch FSDP; `megatron` trains the model families "
        "of docs/scale-out/megatron.md with Megatron-core.",
    )
    bf16: bool = flag(
        False,
        "Compute in bfloat16. Default without --bf16 and --fp32: bfloat16 on CUDA, float32 on CPU.",
        excludes="fp32",
    )
    fp32: bool = flag(False, "Compute in float32.")
    int4_qat: bool = flag(
        False,
        "Quantization-aware training: compute with weights rounded to the INT4 values of --hf-checkpoint, which the "
        "engines use, and pass gradients on unchanged. The environment variable OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1 "
        "sets it.",
    )
    seed: int = flag(1234, "Seed of all randomness in training.", within="[0, 1e18]")
    deterministic_mode: bool = flag(
        False,
        "Use deterministic algorithms (PyTorch, cuBLAS, NCCL), one CPU thread unless --num-threads is given, and "
        "deterministic inference in SGLang servers that furlong starts; slower. Servers started by you need "
        "--enable-deterministic-inference.",
    )
    global_batch_size: int | None = flag(
        None, "Samples per optimizer step. Default: samples of a rollout / --num-steps-per-rollout.", within="[1, inf)"
    )
    num_steps_per_rollout: int | None = flag(
        None, "Optimizer steps per rollout. Default: samples of a rollout / --global-batch-size.", within="[1, inf)"
    )
    micro_batch_size: int = flag(
        1, "Samples per forward and backward pass, without --use-dynamic-batch-size.", within="[1, inf)"
    )
    use_dynamic_batch_size: bool = flag(
        False,
        "Fill micro-batches by tokens, up to --max-tokens-per-gpu, instead of by samples.",
        excludes="micro_batch_size",
    )
    max_tokens_per_gpu: int | None = flag(
        None,
        "Maximum number of tokens per micro-batch and GPU; a longer sample forms one micro-batch. Default without "
        "--micro-batch-size: 4,096, on GPUs up to 32,768 as far as the memory plan expects them to fit.",
        within="[1, inf)",
        needs="use_dynamic_batch_size",
    )
    balance_data: bool = flag(False, "Distribute the work evenly over data-parallel ranks.")
    balance_by_flops: bool = flag(
        False, "Balance by FLOPs instead of tokens. Sets --balance-data.", needs="use_dynamic_batch_size"
    )
    seq_length: int | None = flag(None, "Default of --rollout-max-context-len, in tokens.", within="[2, inf)")
    log_probs_chunk_size: int = flag(
        -1,
        "Number of tokens whose logits are in memory at the same time; -1 chooses by available memory.",
        within="[-1, inf)",
    )
    recompute_activations: bool = flag(False, "Recompute activations in the backward pass: less memory, more time.")
    context_parallel_size: int = flag(
        1,
        "Context-parallel size: ranks that share each sequence, split by tokens; in attention, by heads (`fsdp`) or "
        "by queries (`megatron`). --max-tokens-per-gpu counts the tokens of one rank.",
        within="[1, inf)",
    )
    dp_replicate_size: int = flag(
        1,
        "Number of replicas of the sharded model (HSDP): gradients are reduced within a replica, then between "
        "replicas.",
        within="[1, inf)",
        needs="train_backend=fsdp",
    )
    tensor_model_parallel_size: int = flag(
        1, "Tensor-parallel size.", within="[1, inf)", needs="train_backend=megatron"
    )
    pipeline_model_parallel_size: int = flag(
        1, "Pipeline-parallel size.", within="[1, inf)", needs="train_backend=megatron"
    )
    expert_model_parallel_size: int = flag(
        1, "Expert-parallel size.", within="[1, inf)", needs="train_backend=megatron"
    )
    sequence_parallel: bool = flag(
        False, "Split norms and residuals by tokens over tensor-parallel ranks.", needs="train_backend=megatron"
    )
    compile_layers: Literal["auto", "on", "off"] = flag(
        "auto",
        "Compile the decoder layers with torch.compile, which takes about a minute; `auto` compiles large models in "
        "bfloat16 on a GPU.",
        needs="train_backend=fsdp",
    )
    only_train_params_name_list: tuple[str, ...] | None = flag(
        None,
        "Regular expressions; only parameters whose name matches one of them are trained.",
        excludes="freeze_params_name_list",
    )
    freeze_params_name_list: tuple[str, ...] | None = flag(
        None, "Regular expressions; parameters whose name matches one of them are not trained."
    )


@dataclass(frozen=True)
class OptimFlags:
    """Optimizer and learning-rate schedule. The schedule counts optimizer steps."""

    optimizer: Literal["adam", "sgd"] = flag("adam", "Optimizer; `adam` is AdamW (decoupled weight decay).")
    lr: float = flag(1e-6, "Learning rate.", within="[0, 10]")
    min_lr: float = flag(0.0, "Learning rate at the end of the decay.", within="[0, inf)", bound="<= lr")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "constant",
        "Shape of the learning-rate decay after the warm-up. Default: constant; linear in train.py and "
        "train_async.py, as in slime.",
    )
    lr_decay_iters: int | None = flag(
        None, "Optimizer steps until --min-lr is reached. Default: all steps of the run.", within="[1, inf)"
    )
    lr_wsd_decay_iters: int | None = flag(
        None,
        "Length of the decay at the end, in optimizer steps, with --lr-decay-style WSD.",
        within="[1, inf)",
        bound="<= lr_decay_iters",
        needs="lr_decay_style=WSD",
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "Shape of the decay at the end, with --lr-decay-style WSD.", needs="lr_decay_style=WSD"
    )
    lr_warmup_iters: int = flag(
        0, "Optimizer steps over which the learning rate rises to --lr.", within="[0, inf)", bound="<= lr_decay_iters"
    )
    lr_warmup_fraction: float | None = flag(
        None, "Length of the warm-up as a fraction of --lr-decay-iters.", within="[0, 1]", excludes="lr_warmup_iters"
    )
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.", within="[0, inf)", bound="<= lr")
    weight_decay: float = flag(0.01, "Decoupled weight decay.", within="[0, inf)")
    adam_beta1: float = flag(0.9, "Decay rate of Adam's first moment.", within="[0, 1)")
    adam_beta2: float = flag(0.999, "Decay rate of Adam's second moment.", within="[0, 1)")
    adam_eps: float = flag(1e-8, "Epsilon in the denominator of Adam's update.", within="(0, inf)")
    clip_grad: float = flag(1.0, "Maximum global gradient norm; 0 disables clipping.", within="[0, inf)")
    reset_optimizer_states: bool = flag(False, "Reset the optimizer states at every rollout.")
    offload_optimizer_states: bool = flag(
        False, "Keep Adam's moments in host memory between steps: saves 8 bytes of GPU memory per parameter."
    )
    optimizer_cpu_offload: bool = flag(
        False,
        "Keep moments and float32 master weights in host memory between steps: saves 12 bytes of GPU memory per "
        "parameter. Steps are computed on the GPU.",
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False, "Accepted for slime compatibility; no effect (copies always overlap).", needs="optimizer_cpu_offload"
    )
    use_distributed_optimizer: bool = flag(
        False,
        "Accepted for slime compatibility; no effect (optimizer states are always sharded over the trainer processes).",
    )
    use_precision_aware_optimizer: bool = flag(
        False, "Accepted for slime compatibility; no effect (optimizer states are always float32)."
    )
    use_stateless_adam: bool = flag(
        False, "Keep no moments between steps. Requires --optimizer adam.", needs="no_save_optim; optimizer=adam"
    )
