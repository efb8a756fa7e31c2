"""Flags of the section `megatron`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class MegatronFlags:
    """Settings of --train-backend megatron: pipeline stages, experts, recomputation and gradient reduction."""

    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "Number of layers per virtual stage of an interleaved pipeline.",
        within="[1, inf)",
        needs="train_backend=megatron; pipeline_model_parallel_size>1",
        excludes="num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers "
        "decoder_last_pipeline_num_layers",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None,
        "Number of virtual stages per pipeline rank; also supports uneven stages.",
        within="[1, inf)",
        needs="train_backend=megatron; pipeline_model_parallel_size>1",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None,
        "Number of layers in the first pipeline stage. Default: the same as in the others.",
        within="[1, inf)",
        needs="train_backend=megatron; pipeline_model_parallel_size>1",
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None,
        "Number of layers in the last pipeline stage. Default: the same as in the others.",
        within="[1, inf)",
        needs="train_backend=megatron; pipeline_model_parallel_size>1",
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        "Tensor-parallel size of the experts. Default: --tensor-model-parallel-size.",
        within="[1, inf)",
        needs="train_backend=megatron",
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None,
        "Activation recomputation: `full` recomputes whole layers, `selective` the --recompute-modules of every "
        "layer. --recompute-activations is `full` with `uniform` and 1.",
        needs="train_backend=megatron",
        excludes="recompute_activations",
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None,
        "Layers to recompute: `uniform` is all of them, keeping the input of each group of --recompute-num-layers; "
        "`block` is the first --recompute-num-layers of a stage.",
        needs="train_backend=megatron; recompute_granularity=full",
    )
    recompute_num_layers: int | None = flag(
        None,
        "Number of layers; see --recompute-method.",
        within="[1, inf)",
        needs="train_backend=megatron; recompute_method",
    )
    recompute_modules: tuple[str, ...] | None = flag(
        None,
        "Modules to recompute: `mlp` (dense), `moe` (experts and router), `shared_experts`.",
        needs="train_backend=megatron; recompute_granularity=selective",
    )
    attention_backend: Literal["auto", "flash", "unfused"] = flag(
        "auto",
        "Attention kernel: `flash` for packed sequences (bfloat16 on CUDA); `unfused` plain matmuls and softmax, "
        "slow, for comparison; `auto` is `flash` where available, else PyTorch's choice.",
        needs="train_backend=megatron",
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "Reduce gradients in float32; the default without --grad-reduce-in-bf16.", needs="train_backend=megatron"
    )
    grad_reduce_in_bf16: bool = flag(
        False,
        "Accumulate and reduce gradients of a bfloat16 model in bfloat16: saves 2 bytes per parameter, at lower "
        "precision.",
        needs="train_backend=megatron",
        excludes="accumulate_allreduce_grads_in_fp32 fp32",
    )
    overlap_grad_reduce: bool = flag(
        False,
        "Overlap the data-parallel gradient reduction with the last backward pass.",
        needs="train_backend=megatron",
    )
