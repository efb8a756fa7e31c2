"""Settings that only --train-backend megatron has, beside those of `TrainFlags`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class MegatronFlags:
    """What only --train-backend megatron has: how pipelines and experts are cut, what is recomputed and reduced."""

    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "Interleave the pipeline: each of its ranks has several parts of the model, of this many layers each.",
        within="[1, inf)",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "The same by the number of parts that a rank has; also where stages are uneven.", within="[1, inf)"
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "Layers of the first pipeline stage, where they are not as many as the others'.", within="[1, inf)"
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "Layers of the last pipeline stage, where they are not as many as the others'.", within="[1, inf)"
    )
    expert_tensor_parallel_size: int | None = flag(
        None, "Training processes that share each expert. Without it: --tensor-model-parallel-size.", within="[1, inf)"
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None,
        "What is computed again in the backward pass: `full` whole layers, `selective` the --recompute-modules of all "
        "layers. --recompute-activations is `full` with `uniform` and 1.",
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None,
        "Which layers: `uniform` all, keeping what goes into the first of each --recompute-num-layers; `block` the "
        "first --recompute-num-layers of a stage.",
        needs="recompute_granularity",
    )
    recompute_num_layers: int | None = flag(
        None, "See --recompute-method.", within="[1, inf)", needs="recompute_method"
    )
    recompute_modules: tuple[str, ...] | None = flag(
        None,
        "Parts of a layer: `mlp` (dense), `moe` (experts with their router), `shared_experts`.",
        needs="recompute_granularity",
    )
    attention_backend: Literal["auto", "flash", "unfused"] = flag(
        "auto",
        "`flash` is the kernel for packed sequences, which wants bfloat16 on CUDA; `unfused` products and a softmax, "
        "slow and for comparison; `auto` is flash where it runs, else PyTorch's choice for each sequence.",
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "Sum gradients up in float32; so it is without --grad-reduce-in-bf16."
    )
    grad_reduce_in_bf16: bool = flag(
        False, "Sum gradients of a bfloat16 model up in bfloat16: 2 bytes a parameter less, and fewer bits."
    )
    overlap_grad_reduce: bool = flag(
        False, "Reduce gradients over data-parallel ranks while the last backward pass runs."
    )
