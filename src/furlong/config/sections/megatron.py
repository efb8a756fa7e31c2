"""Flags of the Megatron backend, experts and the model's architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from furlong.config.flag_spec import flag


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
    custom_megatron_init_path: str | None = flag(
        None, "User function called on every rank once Megatron-core is initialized.", needs="train_backend=megatron"
    )
    custom_model_provider_path: str | None = flag(
        None,
        "User function that builds a rank's model, or changes the one of "
        "`furlong.training.megatron.model_build.default_model`.",
        needs="train_backend=megatron",
    )
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None, "User function called before each log-prob pass of a model.", needs="train_backend=megatron"
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None, "User function called before the forward passes of each optimizer step.", needs="train_backend=megatron"
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
        needs="train_backend=megatron",
    )
    moe_aux_loss_coeff: float = flag(
        0.0,
        "Weight of the load-balancing loss.",
        within="[0, inf)",
        needs="train_backend=megatron; moe_router_load_balancing_type!=none",
    )
    moe_z_loss_coeff: float | None = flag(
        None, "Weight of the loss that keeps router logits small.", within="[0, inf)", needs="train_backend=megatron"
    )
    moe_router_enable_expert_bias: bool = flag(
        False,
        "Update the selection bias of each expert after every step: up for experts chosen less than average, else "
        "down. For models that have such a bias; without this flag it stays fixed.",
        needs="train_backend=megatron",
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
        needs="train_backend=megatron",
        excludes="fp32",
    )
    moe_permute_fusion: bool = flag(
        False,
        "Accepted for slime compatibility; no effect on results or speed (TransformerEngine's kernel is not used).",
        needs="train_backend=megatron",
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
        needs="loss_type!=sft_loss",
    )


@dataclass(frozen=True)
class ArchitectureFlags:
    """Model architecture, compared with config.json of --hf-checkpoint. The model is always built from config.json."""

    num_layers: int | None = flag(None, "Number of layers.")
    hidden_size: int | None = flag(None, "Hidden size.")
    ffn_hidden_size: int | None = flag(None, "Intermediate size of a dense feed-forward layer.")
    num_attention_heads: int | None = flag(None, "Number of query heads.")
    group_query_attention: bool = flag(False, "Query heads share key and value heads (GQA).")
    num_query_groups: int | None = flag(None, "Number of key and value heads.")
    kv_channels: int | None = flag(None, "Dimension of a head; ignored with latent attention, as in Megatron-LM.")
    qk_layernorm: bool = flag(
        False, "Queries and keys are normalized per head; with latent attention, their compressed vectors are."
    )
    add_qkv_bias: bool = flag(False, "The query, key and value projections have biases.")
    spec: tuple[str, ...] | None = flag(
        None, "Module and function of slime's layers for a family, such as `slime_plugins.models.glm4 get_glm_spec`."
    )
    use_gated_attention: bool = flag(False, "The output of attention is multiplied by a gate, as in Qwen3-Next.")
    attention_output_gate: bool = flag(False, "The same as --use-gated-attention.")
    apply_layernorm_1p: bool = flag(False, "Weights of normalization layers are stored as their difference from 1.")
    post_self_attn_layernorm: bool = flag(False, "The output of attention is normalized, as in GLM-4.")
    post_mlp_layernorm: bool = flag(False, "The output of feed-forward layers is normalized, as in GLM-4.")
    rotary_interleaved: bool = flag(False, "RoPE rotates pairs of neighboring channels, as in GLM-4.")
    moe_shared_expert_gate: bool = flag(False, "The output of the shared expert is multiplied by a gate.")
    mtp_num_layers: int | None = flag(None, "Layers for multi-token prediction (MTP), which are not trained.")
    disable_bias_linear: bool = flag(False, "Linear layers have no biases, except for those of --add-qkv-bias.")
    swiglu: bool = flag(False, "Feed-forward layers use SwiGLU.")
    quick_geglu: bool = flag(False, "Feed-forward layers use the gate x * sigmoid(1.702 x), as in gpt-oss.")
    glu_linear_offset: float | None = flag(None, "Offset added to the linear half of a gated activation.")
    activation_func_clamp_value: float | None = flag(None, "Bound to which inputs of a gated activation are clamped.")
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] | None = flag(
        None, "Attention softmax; `learnable` adds a sink logit per head, as in gpt-oss."
    )
    window_size: str | None = flag(
        None, "Sliding window of local attention layers as `before,after`, for example `128,0`."
    )
    window_attn_skip_freq: int | None = flag(
        None, "Every Nth layer has full attention, the others use --window-size.", within="[1, inf)"
    )
    enable_gpt_oss: bool = flag(False, "The model is gpt-oss.")
    normalization: Literal["LayerNorm", "RMSNorm"] | None = flag(None, "Type of normalization layers.")
    norm_epsilon: float | None = flag(None, "Epsilon added to the variance in normalization layers.")
    attention_dropout: float | None = flag(None, "Dropout of attention weights.")
    hidden_dropout: float | None = flag(None, "Dropout of hidden states.")
    vocab_size: int | None = flag(None, "Number of embedding rows.")
    padded_vocab_size: int | None = flag(None, "Number of embedding rows; the vocabulary is never padded.")
    make_vocab_size_divisible_by: int | None = flag(
        None,
        "Divisor of the vocabulary size. The vocabulary is never padded, so a number that does not divide it is "
        "refused.",
        within="[1, inf)",
    )
    untie_embeddings_and_output_weights: bool = flag(False, "Embedding and output layer are separate tensors.")
    max_position_embeddings: int | None = flag(None, "Longest sequence that the model supports, in tokens.")
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "mrope", "relative", "none"] | None = flag(
        None, "Position encoding: `rope`, or `yarn` for RoPE extended by YaRN."
    )
    use_rotary_position_embeddings: bool = flag(False, "The model uses rotary position embeddings (RoPE).")
    rotary_base: float | None = flag(None, "Base of the RoPE frequencies.")
    rotary_percent: float | None = flag(None, "Fraction of each head to which RoPE applies.")
    rotary_scaling_factor: float | None = flag(None, "Context extension factor of YaRN.")
    mscale: float | None = flag(None, "YaRN's `mscale`; ignored without YaRN.")
    mscale_all_dim: float | None = flag(None, "YaRN's `mscale_all_dim`; ignored without YaRN.")
    use_rope_scaling: bool = flag(False, "RoPE frequencies are scaled as in Llama 3.")
    rope_scaling_factor: float | None = flag(None, "Factor of that scaling.")
    multi_latent_attention: bool = flag(False, "The model uses multi-head latent attention (MLA).")
    q_lora_rank: int | None = flag(None, "Dimension of the compressed queries.")
    kv_lora_rank: int | None = flag(None, "Dimension of the compressed keys and values.")
    qk_head_dim: int | None = flag(None, "Dimension of a head's queries and keys without RoPE.")
    qk_pos_emb_head_dim: int | None = flag(None, "Dimension of a head's queries and keys with RoPE.")
    v_head_dim: int | None = flag(None, "Dimension of a head's values.")
    num_experts: int | None = flag(None, "Number of routed experts per layer.")
    moe_layer_freq: str | None = flag(
        None,
        "Layers with experts: N for every Nth layer, or a pattern with one number per layer such as `[0]*3+[1]*58`.",
    )
    moe_ffn_hidden_size: int | None = flag(None, "Intermediate size of an expert.")
    moe_shared_expert_intermediate_size: int | None = flag(None, "Intermediate size of all shared experts together.")
    moe_router_topk: int | None = flag(None, "Experts per token.")
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = flag(
        None, "Function that turns router logits into scores."
    )
    moe_router_pre_softmax: bool = flag(
        False,
        "Expert weights come from a softmax over all experts instead of the selected ones; ignored with sigmoid "
        "scores.",
    )
    moe_router_topk_scaling_factor: float | None = flag(None, "Factor on the expert weights.")
    moe_router_num_groups: int | None = flag(None, "Number of expert groups.")
    moe_router_group_topk: int | None = flag(None, "Number of expert groups that a token may use.")
    moe_token_drop_policy: Literal["probs", "position"] | None = flag(
        None, "Accepted for slime compatibility; no effect (experts have no capacity limit and no token is dropped)."
    )
    no_masked_softmax_fusion: bool = flag(
        False, "Accepted for slime compatibility; no effect (this kernel is not used)."
    )
    no_rope_fusion: bool = flag(False, "Accepted for slime compatibility; no effect (this kernel is not used).")
    no_bias_swiglu_fusion: bool = flag(False, "Accepted for slime compatibility; no effect (this kernel is not used).")
    no_bias_gelu_fusion: bool = flag(False, "Accepted for slime compatibility; no effect (this kernel is not used).")
    no_bias_dropout_fusion: bool = flag(False, "Accepted for slime compatibility; no effect (this kernel is not used).")
    no_position_embedding: bool = flag(False, "The model has no learned position embeddings.")
    attention_softmax_in_fp32: bool = flag(
        False, "Accepted for slime compatibility; no effect (the attention softmax is always computed in float32)."
    )
