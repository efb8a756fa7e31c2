"""Layer specs of Megatron-core's GPTModel in plain PyTorch.

RMSNorm, packed attention, router and experts take the places of TransformerEngine's modules in Megatron-core's specs,
so TP, SP, PP and EP work unchanged. Parameter names in checkpoints are those of Megatron-LM with TransformerEngine.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportOptionalOperand=false, reportArgumentType=false, reportIncompatibleMethodOverride=false
import functools
import inspect
import math
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from furlong.training.megatron.attention import PackedAttention
from furlong.training.megatron.family import Architecture, architecture_of, family_of
from furlong.training.megatron.mla import MultiLatentAttention
from furlong.training.megatron.moe_layers import Experts, MoeRouter
from furlong.training.megatron.packed_layer import PackedLayer


class RmsNorm(torch.nn.RMSNorm):
    """RMSNorm with the constructor that Megatron-core calls."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        # with sequence parallelism a rank has a partial gradient of this weight
        self.weight.sequence_parallel = config.sequence_parallel


class _SpecProvider(LocalSpecProvider):
    """Names the classes that Megatron-core builds."""

    def layer_norm(self, *_: Any, **__: Any) -> type[RmsNorm]:
        return RmsNorm

    def core_attention(self) -> type[PackedAttention]:
        return PackedAttention

    def grouped_mlp_modules(self, *_: Any, **__: Any) -> Any:
        parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        is_old = len(inspect.signature(LocalSpecProvider.grouped_mlp_modules).parameters) == 3  # up to 0.16
        return (Experts, parts) if is_old else functools.partial(Experts, submodules=parts)


class BiasedRowParallelLinear(RowParallelLinear):
    """A row-parallel linear layer with a bias, in a model whose other linear layers have none."""

    def __init__(self, *args: Any, bias: bool, **options: Any) -> None:
        del bias
        super().__init__(*args, bias=True, **options)


def block_spec(config: TransformerConfig, hf: Any, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layer specs of one pipeline stage."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    architecture = architecture_of(hf)
    layers = [_layer(config, hf, architecture, first + number) for number in range(count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RmsNorm)


def _layer(config: TransformerConfig, hf: Any, architecture: Architecture, layer: int) -> ModuleSpec:
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if architecture.has_experts[layer]:
        mlp = _experts(config, hf)
    else:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        mlp = ModuleSpec(
            module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        )
    return ModuleSpec(
        module=TransformerLayer if architecture.is_mla else PackedLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=_attention(config, hf, architecture),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RmsNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=names,
        ),
    )


def _attention(config: TransformerConfig, hf: Any, architecture: Architecture) -> ModuleSpec:
    if architecture.is_mla:
        _, factor = rotary_frequencies(hf)
        return ModuleSpec(module=MultiLatentAttention, params={"hf": hf, "factor": factor, "norm": RmsNorm})
    head_norm = RmsNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=BiasedRowParallelLinear if architecture.projection_bias else RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _experts(config: TransformerConfig, hf: Any) -> Any:
    """Return the spec of an MoE layer's MLP."""
    spec: Any = get_moe_module_spec_for_backend(
        backend=_SpecProvider(), num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    parts = (
        spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules
    )  # Megatron-core 0.18 and later; before
    parts.router = functools.partial(MoeRouter, rule=family_of(hf.model_type).routing(hf))
    return spec


def rotary_frequencies(hf: Any) -> tuple[Tensor, float]:
    """Return inverse frequencies in float32, and YaRN's factor of cosines and sines (arXiv:2309.00071)."""
    rope: dict[str, Any] = hf.rope_parameters
    if rope["rope_type"] != "default":
        with torch.device("cpu"):  # also while the default device is "meta"
            inverse, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf, torch.device("cpu"))
        return inverse.float(), float(factor)
    width = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    rotated = int(width * rope.get("partial_rotary_factor", 1.0))
    return 1.0 / rope["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated), 1.0


def mla_softmax_scale(hf: Any) -> float:
    """Return the softmax scale of multi-head latent attention, with YaRN's correction."""
    rope: dict[str, Any] = hf.rope_parameters
    scale = (hf.qk_nope_head_dim + hf.qk_rope_head_dim) ** -0.5
    all_dims = rope.get("mscale_all_dim", 0)
    if rope["rope_type"] == "default" or not all_dims or rope["factor"] <= 1:
        return scale
    return scale * (0.1 * all_dims * math.log(rope["factor"]) + 1.0) ** 2
