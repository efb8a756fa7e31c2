"""Build Megatron-core's GPTModel from a Hugging Face config, for one rank of a layout.

Its layers are plain PyTorch: RMSNorm, packed attention, router and experts take the places of TransformerEngine's
modules in Megatron-core's specs, so TP, SP, PP and EP work unchanged. Parameter names in checkpoints are those of
Megatron-LM with TransformerEngine.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportOptionalOperand=false, reportArgumentType=false, reportIncompatibleMethodOverride=false, reportPrivateImportUsage=false
import functools
import inspect
import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
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

from furlong.config.sections import MegatronFlags, TrainFlags
from furlong.errors import ConfigError, TrainerError
from furlong.models.model_facts import head_width, layer_windows
from furlong.training.megatron.attention import JointNorm, MultiLatentAttention, PackedAttention
from furlong.training.megatron.delta_net import AddOneRmsNorm, GatedDeltaNet
from furlong.training.megatron.family import Architecture, Family, architecture_of, family_of
from furlong.training.megatron.moe_layers import Experts, MoeRouter
from furlong.training.megatron.packed_layer import PackedLayer
from furlong.training.megatron.parallel_layout import Layout, model_problems


def initialize(layout: Layout, seed: int) -> None:
    """Create Megatron-core's process groups, and a default group of one process if there is none."""
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=torch.cuda.is_available(),
        )
    elif dist.get_world_size() > 1:  # with one process, every layout is the same
        raise TrainerError("Megatron-core's process groups already exist in this process; start another process")
    model_parallel_cuda_manual_seed(seed)


def transformer_config(
    hf: Any, layout: Layout, dtype: torch.dtype, train: TrainFlags | None = None, megatron: MegatronFlags | None = None
) -> TransformerConfig:
    """Return Megatron-core's config of a Hugging Face model. Raises ConfigError for an unsupported model or layout.

    The flags choose activation recomputation and the attention kernel.
    """
    train, megatron = train or TrainFlags(), megatron or MegatronFlags()
    if problems := list(model_problems(hf.to_dict(), layout)):
        raise ConfigError("\n".join(problems))
    on_cpu = not torch.cuda.is_available()
    family = family_of(hf.model_type)
    architecture = family.architecture(hf)
    values: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": on_cpu,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "num_layers_in_first_pipeline_stage": layout.first_layers,
        "num_layers_in_last_pipeline_stage": layout.last_layers,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        "variable_seq_lengths": layout.pipeline > 1,
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,  # sum gradients: token weights include the denominator
        "deallocate_pipeline_outputs": not on_cpu,  # gloo still reads a buffer after reporting it as sent
        "batch_p2p_comm": layout.virtual == 1,  # with both batching and interleaving, two stages confuse their messages
        "overlap_p2p_comm": layout.virtual > 1,
        "batch_p2p_sync": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
    }
    if train.recompute_activations:
        megatron = replace(megatron, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    values |= {
        "recompute_granularity": megatron.recompute_granularity,
        "recompute_method": megatron.recompute_method,
        "recompute_num_layers": megatron.recompute_num_layers,
        "recompute_modules": list(megatron.recompute_modules or ()),
    }
    values |= _attention_values(hf, architecture) | _mlp_values(hf, family, dtype)
    config: Any = TransformerConfig(**values)
    # Megatron-core's own setting changes environment variables for TransformerEngine
    config.has_unfused_attention = megatron.attention_backend == "unfused"
    return config


def _attention_values(hf: Any, architecture: Architecture) -> dict[str, Any]:
    width = head_width(hf)
    _, factor = rotary_frequencies(hf)
    scale = factor * factor / width**0.5  # YaRN scales the cosines and sines of queries and of keys
    if architecture.is_mla:  # rotates a part of each head and applies the factor there
        scale = mla_softmax_scale(hf)
    layers = layer_windows(hf)
    windows = {window for window in layers if window is not None}
    return {
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": width,
        "softmax_scale": scale,
        "qk_layernorm": architecture.qk_norm,  # sums gradients over tensor-parallel ranks, not for joint norms
        "rotary_interleaved": architecture.pairs_neighbors,
        "add_qkv_bias": architecture.qkv_bias,
        "attention_output_gate": architecture.output_gate,
        "hetereogenous_dist_checkpoint": any(architecture.is_delta),  # Megatron-core's spelling
        "softmax_type": "learnable" if architecture.sinks else "vanilla",
        "window_size": (windows.pop() - 1, 0) if windows else None,
        "window_attn_skip_freq": [int(window is not None) for window in layers],
    }


def _mlp_values(hf: Any, family: Family, dtype: torch.dtype) -> dict[str, Any]:
    architecture = family.architecture(hf)
    values: dict[str, Any] = {
        "ffn_hidden_size": getattr(hf, "intermediate_size", None) or architecture.expert_width,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": architecture.moe_bias,
        **family.mlp_values(hf),
    }
    if architecture.num_experts:
        rule = family.routing(hf)
        values |= {
            "num_moe_experts": architecture.num_experts,
            "moe_layer_freq": [int(has) for has in architecture.has_experts],
            "moe_ffn_hidden_size": architecture.expert_width,
            "moe_shared_expert_intermediate_size": architecture.shared_width or None,
            "moe_shared_expert_gate": architecture.shared_gate,
            "moe_router_topk": rule.top_k,
            "moe_router_load_balancing_type": "none",
            "moe_router_score_function": rule.scores,
            "moe_router_pre_softmax": True,  # Megatron-core's own routing is replaced by `moe_layers.MoeRouter`
            "moe_router_enable_expert_bias": architecture.expert_bias,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": dtype == torch.bfloat16,
        }
    return values


ModelProvider = Callable[..., Any]
_building: ContextVar[tuple[TransformerConfig, Any]] = ContextVar("furlong_model_being_built")


def build_chunks(config: TransformerConfig, hf: Any, provider: ModelProvider | None = None) -> list[GPTModel]:
    """Build this rank's model chunks with uninitialized weights, on its device, or on "meta" if that is the default.

    One chunk, or several with the interleaved pipeline schedule. `provider` is the user's, called with `pre_process`,
    `post_process` and `vp_stage`. Raises ConfigError if it does not return a GPTModel.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    token = _building.set((config, hf))
    try:
        stages = [None if virtual is None else chunk for chunk in range(virtual or 1)]
        return [_build_chunk(hf, stage, provider or default_model) for stage in stages]
    finally:
        _building.reset(token)


def default_model(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> GPTModel:
    """Build a chunk as furlong does, for a function of --custom-model-provider-path to change.

    pre_process, post_process: whether it has the embedding, and the output layer. Raises ConfigError outside of such a
    function.
    """
    if (building := _building.get(None)) is None:
        raise ConfigError("default_model builds the model of a run; call it in --custom-model-provider-path only")
    config, hf = building
    return GPTModel(
        config,
        block_spec(config, hf, vp_stage),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        vp_stage=vp_stage,
    )


def _build_chunk(hf: Any, vp_stage: int | None, provider: ModelProvider) -> GPTModel:
    model = provider(
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    if not isinstance(model, GPTModel):
        raise ConfigError(
            f"--custom-model-provider-path returned {type(model).__name__}, not a Megatron-core GPTModel; return what "
            "furlong.training.megatron.model_build.default_model(pre_process, post_process, vp_stage) builds, changed "
            "as you need"
        )
    model.rotary_pos_emb.inv_freq, _ = rotary_frequencies(hf)
    pad: int | None = getattr(hf, "pad_token_id", None)
    if model.pre_process and pad is not None:
        _freeze_pad_embedding(model.embedding.word_embeddings, pad % hf.vocab_size)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # Sum gradients over all ranks that have the expert. Megatron-core marks experts so only with expert
            # parallelism; otherwise it assumes that tensor-parallel ranks have seen the same tokens, which is wrong
            # with sequence parallelism. It would also sum expert biases over these ranks once more, and count them in
            # the gradient norm of only one of them.
            vars(parameter).update(allreduce=False, sequence_parallel=False, tensor_model_parallel=True)
    if torch.get_default_device().type == "meta":  # shapes only
        return model
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return model.to(device)


def _freeze_pad_embedding(embedding: Any, token: int) -> None:
    """Stop the gradient of the pad token's lookup, as `padding_idx` of torch.nn.Embedding does.

    With tied embeddings the row keeps the output layer's gradient. `embedding`: Megatron-core's VocabParallelEmbedding.
    """

    def without_gradient(_: Any, args: tuple[Tensor], looked_up: Tensor) -> Tensor | None:
        if not looked_up.requires_grad:
            return None
        is_token = args[0] == token  # [samples, tokens], like the output
        if embedding.reduce_scatter_embeddings:  # with sequence parallelism: [tokens of this rank, samples]
            group = embedding.tp_group
            is_token = is_token.t().chunk(group.size())[group.rank()]
        return torch.where(is_token[..., None], looked_up.detach(), looked_up)

    embedding.register_forward_hook(without_gradient)


class RmsNorm(torch.nn.RMSNorm):
    """RMSNorm with the constructor that Megatron-core calls."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        # with sequence parallelism a rank has a partial gradient of this weight
        self.weight.sequence_parallel = config.sequence_parallel


def norm_of(architecture: Architecture) -> type[torch.nn.Module]:
    """Return the class of a model's norms."""
    return AddOneRmsNorm if architecture.norms_add_one else RmsNorm


class _SpecProvider(LocalSpecProvider):
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
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm_of(architecture))


def _layer(config: TransformerConfig, hf: Any, architecture: Architecture, layer: int) -> ModuleSpec:
    norm = norm_of(architecture)
    is_delta = bool(architecture.is_delta) and architecture.is_delta[layer]
    attention = ModuleSpec(GatedDeltaNet, {"hf": hf}) if is_delta else _attention(config, hf, architecture)
    names = {} if is_delta else {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    is_plain = architecture.is_mla or architecture.output_gate  # with Megatron-core's own forward pass
    if architecture.has_experts[layer]:
        mlp = _experts(config, hf)
    else:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        mlp = ModuleSpec(
            module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        )
    return ModuleSpec(
        module=TransformerLayer if is_plain else PackedLayer,
        params={"post_norm": RmsNorm} if architecture.post_norms else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=names,
        ),
    )


def _attention(config: TransformerConfig, hf: Any, architecture: Architecture) -> ModuleSpec:
    if architecture.is_mla:
        _, factor = rotary_frequencies(hf)
        return ModuleSpec(module=MultiLatentAttention, params={"hf": hf, "factor": factor, "norm": RmsNorm})
    head_norms: list[Any] = [norm_of(architecture) if architecture.qk_norm else IdentityOp] * 2
    if architecture.qk_norm_joint:
        counts = config.num_attention_heads, config.num_query_groups
        head_norms = [ModuleSpec(module=JointNorm, params={"num_heads": count}) for count in counts]
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=BiasedRowParallelLinear if architecture.projection_bias else RowParallelLinear,
            q_layernorm=head_norms[0],
            k_layernorm=head_norms[1],
        ),
    )


def _experts(config: TransformerConfig, hf: Any) -> Any:
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
    width = head_width(hf)
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
