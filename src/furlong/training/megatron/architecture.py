"""What the families differ in, read from a Hugging Face config. It does without Megatron-core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from furlong.models.flops import layer_windows


@dataclass(frozen=True)
class Architecture:
    """A model of one of the families.

    qkv_bias, projection_bias: of attention's linear layers, before and after it. qk_norm: queries and keys are
    normalized in each head. sinks: each head has a logit that takes probability away (gpt-oss). is_latent: keys and
    values come from a compressed vector of the token (DeepSeek-V3). windows: of each layer, how many tokens a query
    sees, itself among them; None is all. has_experts: of each layer. expert_width, shared_width: of an expert, and of
    what all tokens go through beside their experts; 0 is none. expert_bias: linear layers of experts and router have
    biases. choice_bias: the router's choice has one, which is no parameter. mtp_layers: layers for several tokens at
    once in the checkpoint, which are not built.
    """

    qkv_bias: bool = False
    projection_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    is_latent: bool = False
    windows: tuple[int | None, ...] = ()
    has_experts: tuple[bool, ...] = ()
    num_experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    expert_bias: bool = False
    choice_bias: bool = False
    mtp_layers: int = 0

    @staticmethod
    def of(hf: Any) -> Architecture:
        """That of a Hugging Face config."""
        family, bias = hf.model_type, bool(getattr(hf, "attention_bias", False))
        common: dict[str, Any] = {"windows": layer_windows(hf), "has_experts": _layers_with_experts(hf)}
        match family:
            case "qwen2":
                return Architecture(qkv_bias=True, **common)
            case "qwen3":
                return Architecture(qkv_bias=bias, projection_bias=bias, qk_norm=True, **common)
            case "qwen3_moe":
                common |= {"num_experts": hf.num_experts, "expert_width": hf.moe_intermediate_size}
                return Architecture(qkv_bias=bias, projection_bias=bias, qk_norm=True, **common)
            case "glm4_moe" | "deepseek_v3":
                return Architecture(
                    qkv_bias=bias,
                    qk_norm=bool(getattr(hf, "use_qk_norm", False)),
                    is_latent=family == "deepseek_v3",
                    num_experts=hf.n_routed_experts,
                    expert_width=hf.moe_intermediate_size,
                    shared_width=hf.moe_intermediate_size * (hf.n_shared_experts or 0),
                    choice_bias=True,
                    mtp_layers=getattr(hf, "num_nextn_predict_layers", None) or 0,  # transformers 5.12: not GLM's
                    **common,
                )
            case "gpt_oss":
                return Architecture(
                    qkv_bias=bias,
                    projection_bias=bias,
                    sinks=True,
                    num_experts=hf.num_local_experts,
                    expert_width=hf.intermediate_size,
                    expert_bias=True,
                    **common,
                )
            case _:
                return Architecture(qkv_bias=bias, projection_bias=bias, **common)


def _layers_with_experts(hf: Any) -> tuple[bool, ...]:
    layers = range(hf.num_hidden_layers)
    match hf.model_type:
        case "glm4_moe" | "deepseek_v3":
            return tuple(layer >= hf.first_k_dense_replace for layer in layers)
        case "gpt_oss":
            return (True,) * hf.num_hidden_layers
        case "qwen3_moe":
            dense: set[int] = set(hf.mlp_only_layers or ())
            return tuple(layer not in dense and (layer + 1) % hf.decoder_sparse_step == 0 for layer in layers)
        case _:
            return (False,) * hf.num_hidden_layers
