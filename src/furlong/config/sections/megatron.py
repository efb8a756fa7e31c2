"""Flags of the Megatron backend, experts and the model's architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from furlong.config.flag_spec import flag

_MEGATRON = "train_backend=megatron"


def _accepted(default: bool | None, instead: str) -> Any:
    """Declare a flag of slime's scripts that has no effect; a notice says what happens instead."""
    return flag(default, f"Accepted for slime compatibility; no effect: {instead}.", instead=instead)


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
        needs=_MEGATRON,
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None,
        "Activation recomputation: `full` recomputes whole layers, `selective` the --recompute-modules of every "
        "layer. --recompute-activations is `full` with `uniform` and 1.",
        needs=_MEGATRON,
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
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = flag(
        "auto",
        "Attention kernel: `flash` for packed sequences (bfloat16 on CUDA); `unfused` plain matmuls and softmax, "
        "slow, for comparison; `auto` is `flash` where available, else PyTorch's choice; `fused`, which names kernels "
        "of TransformerEngine, is `auto`.",
        needs=_MEGATRON,
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "Reduce gradients in float32; the default without --grad-reduce-in-bf16.", needs=_MEGATRON
    )
    grad_reduce_in_bf16: bool = flag(
        False,
        "Accumulate and reduce gradients of a bfloat16 model in bfloat16: saves 2 bytes per parameter, at lower "
        "precision.",
        needs=_MEGATRON,
        excludes="accumulate_allreduce_grads_in_fp32 fp32",
    )
    overlap_grad_reduce: bool = flag(
        False, "Overlap the data-parallel gradient reduction with the last backward pass.", needs=_MEGATRON
    )
    custom_megatron_init_path: str | None = flag(
        None, "User function called on every rank once Megatron-core is initialized.", needs=_MEGATRON
    )
    custom_model_provider_path: str | None = flag(
        None,
        "User function that builds a rank's model, or changes the one of "
        "`furlong.training.megatron.model_build.default_model`.",
        needs=_MEGATRON,
    )
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None, "User function called before each log-prob pass of a model.", needs=_MEGATRON
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None, "User function called before the forward passes of each optimizer step.", needs=_MEGATRON
    )
    no_gradient_accumulation_fusion: bool = _accepted(
        False, "PyTorch accumulates gradients, and Apex's fused kernel is never used"
    )
    enable_experimental: bool = _accepted(False, "no experimental part of Megatron-core is used")
    data_pad_size_multiplier: int | None = _accepted(
        None, "micro-batches are packed, and padded only to a multiple of --tensor-model-parallel-size"
    )
    transformer_impl: Literal["local", "transformer_engine"] | None = _accepted(
        None, "layers are Megatron-core's with furlong's attention, in PyTorch"
    )
    allgather_cp: bool = _accepted(
        False, "context parallelism always gathers keys and values, and each rank has two chunks of every sequence"
    )
    model_name: str | None = _accepted(None, "the model class follows from config.json")
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"] | None = _accepted(
        None, "the loss mask of demonstrations follows from the chat template"
    )
    enable_mtp_training: bool = _accepted(
        False, "layers for multi-token prediction (MTP) keep their weights and are not trained"
    )
    mtp_loss_scaling_factor: float | None = _accepted(
        None, "layers for multi-token prediction (MTP) keep their weights and are not trained"
    )


@dataclass(frozen=True)
class MoeFlags:
    """Mixture-of-experts routing and load balancing in training."""

    use_routing_replay: bool = flag(
        False,
        "Reuse the expert choices of the log-prob pass in all optimizer steps of a rollout; the pass then always "
        "runs. Gating weights are recomputed.",
        needs="compute_advantages_and_returns; loss_type!=sft_loss",
        excludes="debug_rollout_only",
    )
    use_rollout_routing_replay: bool = flag(
        False,
        "Reuse the engine's expert choices for training and log-probs. Takes precedence over --use-routing-replay.",
        needs="loss_type!=sft_loss",
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = flag(
        "aux_loss",
        "Scope of the load-balancing loss (--moe-aux-loss-coeff): `aux_loss` counts tokens per micro-batch, which "
        "depends on packing; `seq_aux_loss` counts them per sample.",
        needs=_MEGATRON,
    )
    moe_aux_loss_coeff: float = flag(
        0.0,
        "Weight of the load-balancing loss.",
        within="[0, inf)",
        needs="train_backend=megatron; moe_router_load_balancing_type!=none",
    )
    moe_z_loss_coeff: float | None = flag(
        None, "Weight of the loss that keeps router logits small.", within="[0, inf)", needs=_MEGATRON
    )
    moe_router_enable_expert_bias: bool = flag(
        False,
        "Update the selection bias of each expert after every step: up for experts chosen less than average, else "
        "down. For models that have such a bias; without this flag it stays fixed.",
        needs=_MEGATRON,
    )
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = flag(
        "alltoall",
        "How tokens are sent to the ranks of their experts, with --train-backend megatron. `flex` is accepted for "
        "slime compatibility and equals `alltoall`.",
    )
    moe_enable_deepep: bool = _accepted(False, "tokens are sent with NCCL's all-to-all, not with DeepEP")
    moe_router_dtype: Literal["fp32"] = flag("fp32", "Precision of router logits and weights.")
    moe_grouped_gemm: bool | None = flag(
        None,
        "Compute all experts of a rank in one grouped GEMM. Default: on in bfloat16, the only supported precision.",
        needs=_MEGATRON,
        excludes="fp32",
    )
    moe_permute_fusion: bool = flag(
        False,
        "Accepted for slime compatibility; no effect on results or speed (TransformerEngine's kernel is not used).",
        needs=_MEGATRON,
    )
    moe_router_bias_update_rate: float = flag(
        1e-3,
        "Step size of the bias update; 0 leaves it unchanged.",
        within="[0, inf)",
        needs="moe_router_enable_expert_bias",
    )
    log_routing_agreement: bool | None = flag(
        None,
        "Log the fraction of the engine's expert choices that the trainer shares (`train/routing_agreement`). "
        "Default: on with --use-rollout-routing-replay and with an embedded engine in this process.",
        needs="loss_type!=sft_loss; use_rollout_routing_replay!=True",
    )


def _of_model(default: bool | None = None) -> Any:
    """Declare a flag of Megatron that describes the model, as slime's scripts/models/*.sh do."""
    return flag(default, "Megatron-LM's flag of this name. Accepted: the model is always built from config.json.")


def _compared() -> Any:
    return flag(None, "Compared with config.json of --hf-checkpoint, from which the model is always built.")


@dataclass(frozen=True)
class ArchitectureFlags:
    """Model architecture in Megatron-LM's flags. The model is always built from config.json of --hf-checkpoint."""

    num_layers: int | None = _compared()
    hidden_size: int | None = _compared()
    ffn_hidden_size: int | None = _of_model()
    num_attention_heads: int | None = _compared()
    group_query_attention: bool = _of_model(False)
    num_query_groups: int | None = _compared()
    kv_channels: int | None = _of_model()
    qk_layernorm: bool = _of_model(False)
    add_qkv_bias: bool = _of_model(False)
    spec: tuple[str, ...] | None = _of_model()
    use_gated_attention: bool = _of_model(False)
    attention_output_gate: bool = _of_model(False)
    apply_layernorm_1p: bool = _of_model(False)
    post_self_attn_layernorm: bool = _of_model(False)
    post_mlp_layernorm: bool = _of_model(False)
    rotary_interleaved: bool = _of_model(False)
    moe_shared_expert_gate: bool = _of_model(False)
    mtp_num_layers: int | None = _of_model()
    disable_bias_linear: bool = _of_model(False)
    swiglu: bool = _of_model(False)
    quick_geglu: bool = _of_model(False)
    glu_linear_offset: float | None = _of_model()
    activation_func_clamp_value: float | None = _of_model()
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] | None = _of_model()
    window_size: str | None = _of_model()
    window_attn_skip_freq: int | None = _of_model()
    enable_gpt_oss: bool = _of_model(False)
    normalization: Literal["LayerNorm", "RMSNorm"] | None = _of_model()
    norm_epsilon: float | None = _of_model()
    attention_dropout: float | None = _of_model()
    hidden_dropout: float | None = _of_model()
    vocab_size: int | None = _compared()
    padded_vocab_size: int | None = _of_model()
    make_vocab_size_divisible_by: int | None = _of_model()
    untie_embeddings_and_output_weights: bool = _of_model(False)
    max_position_embeddings: int | None = _of_model()
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "mrope", "relative", "none"] | None = (
        _of_model()
    )
    use_rotary_position_embeddings: bool = _of_model(False)
    rotary_base: float | None = _compared()
    rotary_percent: float | None = _of_model()
    rotary_scaling_factor: float | None = _of_model()
    original_max_position_embeddings: int | None = _of_model()
    rope_type: Literal["rope", "yarn"] | None = _of_model()
    beta_fast: float | None = _of_model()
    beta_slow: float | None = _of_model()
    mscale: float | None = _of_model()
    mscale_all_dim: float | None = _of_model()
    use_rope_scaling: bool = _of_model(False)
    rope_scaling_factor: float | None = _of_model()
    multi_latent_attention: bool = _of_model(False)
    q_lora_rank: int | None = _of_model()
    kv_lora_rank: int | None = _of_model()
    qk_head_dim: int | None = _of_model()
    qk_pos_emb_head_dim: int | None = _of_model()
    v_head_dim: int | None = _of_model()
    num_experts: int | None = _of_model()
    moe_layer_freq: str | None = _of_model()
    moe_ffn_hidden_size: int | None = _of_model()
    moe_shared_expert_intermediate_size: int | None = _of_model()
    moe_router_topk: int | None = _of_model()
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = _of_model()
    moe_router_pre_softmax: bool = _of_model(False)
    moe_router_topk_scaling_factor: float | None = _of_model()
    moe_router_num_groups: int | None = _of_model()
    moe_router_group_topk: int | None = _of_model()
    moe_token_drop_policy: Literal["probs", "position"] | None = _of_model()
    no_masked_softmax_fusion: bool = _of_model(False)
    no_rope_fusion: bool = _of_model(False)
    no_bias_swiglu_fusion: bool = _of_model(False)
    no_bias_gelu_fusion: bool = _of_model(False)
    no_bias_dropout_fusion: bool = _of_model(False)
    no_position_embedding: bool = _of_model(False)
    attention_softmax_in_fp32: bool = _of_model(False)
