"""What slime's scripts/models/*.sh say of a model: flags that are compared with config.json, and set nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class ArchitectureFlags:
    """What the model is: compared with config.json of --hf-checkpoint, which the model is built from."""

    num_layers: int | None = flag(None, "Layers of the model.")
    hidden_size: int | None = flag(None, "Channels between layers.")
    ffn_hidden_size: int | None = flag(None, "Channels inside a dense feed-forward layer.")
    num_attention_heads: int | None = flag(None, "Heads of queries.")
    group_query_attention: bool = flag(False, "Several heads share keys and values.")
    num_query_groups: int | None = flag(None, "Heads of keys and values.")
    kv_channels: int | None = flag(None, "Channels of a head; with latent attention, of its values.")
    qk_layernorm: bool = flag(
        False, "Queries and keys are normalized in each head; with latent attention, the compressed ones."
    )
    add_qkv_bias: bool = flag(False, "The layers before attention have biases.")
    disable_bias_linear: bool = flag(False, "Linear layers have no biases, apart from those of --add-qkv-bias.")
    swiglu: bool = flag(False, "Feed-forward layers are SwiGLU.")
    quick_geglu: bool = flag(False, "Feed-forward layers have the gate x * sigmoid(1.702 x), as gpt-oss's.")
    glu_linear_offset: float | None = flag(None, "What is added to the part that a gate multiplies.")
    activation_func_clamp_value: float | None = flag(None, "Where what goes into a gate and its product is clamped.")
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] | None = flag(
        None, "`learnable`: each head has a logit that takes probability away, as gpt-oss's sinks do."
    )
    window_size: str | None = flag(None, "Tokens before and after its own that a query sees in some layers, `128,0`.")
    window_attn_skip_freq: int | None = flag(
        None, "Every Nth layer sees all tokens, the others those of --window-size.", within="[1, inf)"
    )
    enable_gpt_oss: bool = flag(False, "The model is gpt-oss.")
    normalization: Literal["LayerNorm", "RMSNorm"] | None = flag(None, "How layers normalize.")
    norm_epsilon: float | None = flag(None, "What is added to the variance.")
    attention_dropout: float | None = flag(None, "Share of attention weights that are dropped.")
    hidden_dropout: float | None = flag(None, "Share of channels that are dropped.")
    vocab_size: int | None = flag(None, "Rows of the embedding.")
    padded_vocab_size: int | None = flag(None, "The same: the vocabulary is never padded.")
    make_vocab_size_divisible_by: int | None = flag(
        None, "A divisor of the vocabulary, which is never padded, so that another one is refused.", within="[1, inf)"
    )
    untie_embeddings_and_output_weights: bool = flag(False, "Embedding and output layer are two tensors.")
    max_position_embeddings: int | None = flag(None, "Tokens of the longest sequence that the model is made for.")
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "mrope", "relative", "none"] | None = flag(
        None, "How positions are told: `rope`, or `yarn` for rotary embeddings stretched that way."
    )
    use_rotary_position_embeddings: bool = flag(False, "Positions are told by rotary embeddings.")
    rotary_base: float | None = flag(None, "Base of the rotary frequencies.")
    rotary_percent: float | None = flag(None, "Share of a head that is rotated.")
    rotary_scaling_factor: float | None = flag(None, "How far YaRN stretches positions.")
    mscale: float | None = flag(None, "YaRN's scale of rotary embeddings; it means nothing without stretching.")
    mscale_all_dim: float | None = flag(None, "YaRN's scale of attention; it means nothing without stretching.")
    use_rope_scaling: bool = flag(False, "Rotary frequencies are stretched as Llama 3's.")
    rope_scaling_factor: float | None = flag(None, "How far.")
    multi_latent_attention: bool = flag(False, "Keys and values come from a compressed vector.")
    q_lora_rank: int | None = flag(None, "Channels of the compressed queries.")
    kv_lora_rank: int | None = flag(None, "Channels of the compressed keys and values.")
    qk_head_dim: int | None = flag(None, "Channels of a head's queries and keys that are not rotated.")
    qk_pos_emb_head_dim: int | None = flag(None, "Those that are rotated.")
    v_head_dim: int | None = flag(None, "Channels of a head's values.")
    num_experts: int | None = flag(None, "Experts of a layer, without shared ones.")
    moe_layer_freq: str | None = flag(
        None, "Layers with experts: N for every Nth from the first, or `[0]*3+[1]*58`, one number a layer."
    )
    moe_ffn_hidden_size: int | None = flag(None, "Channels inside an expert.")
    moe_shared_expert_intermediate_size: int | None = flag(None, "Channels inside all shared experts together.")
    moe_router_topk: int | None = flag(None, "Experts of a token.")
    moe_router_score_function: Literal["softmax", "sigmoid"] | None = flag(None, "How a router scores experts.")
    moe_router_pre_softmax: bool = flag(
        False, "Weights are probabilities among all experts, not among the chosen; it means nothing with sigmoid."
    )
    moe_router_topk_scaling_factor: float | None = flag(None, "What the weights of experts are multiplied by.")
    moe_router_num_groups: int | None = flag(None, "Groups that experts are chosen from.")
    moe_router_group_topk: int | None = flag(None, "Groups that a token's experts are in.")
    moe_token_drop_policy: Literal["probs", "position"] | None = flag(
        None, "Taken since it changes nothing: experts have no capacity, and no token is dropped."
    )
    no_masked_softmax_fusion: bool = flag(False, "Taken since it changes nothing: no such kernel is used.")
    no_rope_fusion: bool = flag(False, "Taken since it changes nothing: no such kernel is used.")
    no_bias_swiglu_fusion: bool = flag(False, "Taken since it changes nothing: no such kernel is used.")
    no_bias_gelu_fusion: bool = flag(False, "Taken since it changes nothing: no such kernel is used.")
    no_bias_dropout_fusion: bool = flag(False, "Taken since it changes nothing: no such kernel is used.")
    no_position_embedding: bool = flag(False, "No table of positions is added to the embedding.")
    attention_softmax_in_fp32: bool = flag(False, "Taken since it changes nothing: all kernels do so.")
