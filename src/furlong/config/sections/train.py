"""The trainer: batches, parallelism, precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class TrainFlags:
    """The training backend, its precision, and how samples become micro-batches."""

    train_backend: Literal["fsdp", "megatron"] = flag(
        "fsdp",
        "What trains: `fsdp` runs Hugging Face models on PyTorch; `megatron` runs the families of "
        "docs/scale-out/megatron.md on Megatron-core.",
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
