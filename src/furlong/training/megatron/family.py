"""Model families of --train-backend megatron, and their registry. Imports neither Megatron-core nor torch.

To support another family, add a file to `families/` with `FAMILIES`, a tuple of `Family`. A family's weight rules name
the Hugging Face tensors that form each Megatron-core parameter; `weight_names` applies them in both directions. Here
are the rules that families share. `Join` says how the tensors of a rule form the parameter:

    one             the tensor itself
    qkv             for each key/value head: the queries of its group, its keys, its values
    gate_up         the rows of gate_proj, then those of up_proj; each half is split on its own
    fused_gate_up   one tensor of these rows
    packed          one expert's row of a tensor of all experts; matrices are transposed
    packed_gate_up  the same; gate and up rows alternate in the checkpoint, and are one half each in the parameter
    gated_qkv       as qkv, with gates: in the checkpoint after the queries of a head, in the parameter of a group
    by_key_head     rows of several parts (queries, keys, values ...), joined for each key head of a gated delta net
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any, Literal

from furlong.errors import ConfigError
from furlong.models.model_facts import REMEDY
from furlong.training.megatron import families

Join = Literal["one", "qkv", "gate_up", "fused_gate_up", "packed", "packed_gate_up", "gated_qkv", "by_key_head"]


@dataclass(frozen=True)
class WeightRule:
    """One kind of parameter. `ours` (Megatron-core) and `theirs` (Hugging Face) lack the layer's prefix.

    axis: split by tensor parallelism; None if replicated. of_expert: there is one for each expert, split by expert
    tensor parallelism. N in a name is the expert's number: within the rank in ours, in the whole model in theirs.
    is_trained: False for buffers. parts: of a "by_key_head" rule, the fields of the config whose product is the number
    of rows of each part of each tensor.
    """

    ours: str
    theirs: tuple[str, ...]
    join: Join = "one"
    axis: int | None = None
    of_expert: bool = False
    is_trained: bool = True
    parts: tuple[tuple[tuple[str, ...], ...], ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether one tensor of the checkpoint contains this parameter of all experts."""
        return self.join.startswith("packed")

    @property
    def has_halves(self) -> bool:
        """Whether the parameter is the gate's rows followed by the up projection's."""
        return self.join.endswith("gate_up")


ENDS = (
    WeightRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), axis=0),
    WeightRule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    WeightRule("output_layer.weight", ("lm_head.weight",), axis=0),
)
VALUE_ENDS = (  # of a critic, whose scalar head every tensor-parallel rank has
    *ENDS[:2],
    WeightRule("output_layer.weight", ("lm_head.weight",)),
    WeightRule("output_layer.bias", ("lm_head.bias",)),
)
NORMS = (
    WeightRule("input_layernorm.weight", ("input_layernorm.weight",)),
    WeightRule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
)
POST_NORMS = (
    WeightRule("post_self_attn_layernorm.weight", ("post_self_attn_layernorm.weight",)),
    WeightRule("post_mlp_layernorm.weight", ("post_mlp_layernorm.weight",)),
)
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = (
    WeightRule("self_attention.linear_qkv.weight", tuple(f"{p}.weight" for p in QKV), "qkv", axis=0),
    WeightRule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), axis=1),
)
GATED_ATTENTION = (replace(ATTENTION[0], join="gated_qkv"), ATTENTION[1])
QKV_BIAS = WeightRule("self_attention.linear_qkv.bias", tuple(f"{p}.bias" for p in QKV), "qkv", axis=0)
PROJECTION_BIAS = WeightRule("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",))
JOINT_QK_NORM = (
    WeightRule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), axis=0),
    WeightRule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), axis=0),
)
QK_NORM = (
    WeightRule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    WeightRule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
SINKS = WeightRule("self_attention.core_attention.softmax_offset", ("self_attn.sinks",), axis=0)
DENSE_MLP = (
    WeightRule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up", axis=0),
    WeightRule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), axis=1),
)
FUSED_MLP = (WeightRule("mlp.linear_fc1.weight", ("mlp.gate_up_proj.weight",), "fused_gate_up", axis=0), DENSE_MLP[1])
ROUTER = WeightRule("mlp.router.weight", ("mlp.gate.weight",))
EXPERT_BIAS = WeightRule("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",), is_trained=False)
FC1, FC2 = (f"mlp.experts.local_experts.N.linear_fc{number}" for number in (1, 2))
EXPERTS = (
    WeightRule(
        f"{FC1}.weight",
        ("mlp.experts.N.gate_proj.weight", "mlp.experts.N.up_proj.weight"),
        "gate_up",
        axis=0,
        of_expert=True,
    ),
    WeightRule(f"{FC2}.weight", ("mlp.experts.N.down_proj.weight",), axis=1, of_expert=True),
)
SHARED_EXPERT = (
    WeightRule(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        "gate_up",
        axis=0,
    ),
    WeightRule("mlp.shared_experts.linear_fc2.weight", ("mlp.shared_experts.down_proj.weight",), axis=1),
)


USE_FSDP = "use --train-backend fsdp"
INDEXED = ("deepseek_v32", "glm_moe_dsa")  # families that choose the tokens to attend to themselves


@dataclass(frozen=True)
class Architecture:
    """Facts about one model, read from its config.json.

    qkv_bias, projection_bias: attention has biases in q, k, v, and in its output projection. qk_norm: queries and keys
    are normalized per head; qk_norm_joint: over all heads together (MiniMax-M2). sinks: every head has an attention
    sink (gpt-oss). is_mla: multi-head latent attention (DeepSeek-V3). post_norms: the outputs of attention and MLP are
    normalized before they are added (GLM-4). pairs_neighbors: rotary embeddings rotate channels 2i and 2i + 1 together,
    not i and i + half. has_experts: per layer. expert_width, shared_width: intermediate size of an expert, and of the
    shared expert; 0 without one. moe_bias: linear layers of experts and router have biases. expert_bias: the router
    adds a bias, which is not trained, to the scores that choose experts. is_delta: per layer, whether it has a gated
    delta net instead of attention; empty without any. output_gate: the output of each attention head is multiplied by
    a sigmoid. norms_add_one: the weights of norms are stored minus one. shared_gate: the shared expert's output is
    multiplied by a sigmoid.
    """

    qkv_bias: bool = False
    projection_bias: bool = False
    qk_norm: bool = False
    qk_norm_joint: bool = False
    sinks: bool = False
    is_mla: bool = False
    post_norms: bool = False
    pairs_neighbors: bool = False
    has_experts: tuple[bool, ...] = ()
    num_experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    moe_bias: bool = False
    expert_bias: bool = False
    is_delta: tuple[bool, ...] = ()
    output_gate: bool = False
    norms_add_one: bool = False
    shared_gate: bool = False


@dataclass(frozen=True)
class RoutingRule:
    """The mapping from router logits to experts and their weights.

    top_k: experts per token. scores: the function of the logits that gives weights. normalize: the weights of a token
    sum to one. scale: factor of the weights after that. groups, top_groups: a token is routed to experts of the
    `top_groups` groups whose two best experts have the largest sums (DeepSeek-V3, arXiv:2412.19437 sec. 2.1.2).
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"]
    normalize: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


def attention_rules(_: Any, architecture: Architecture) -> tuple[WeightRule, ...]:
    """Return the rules of multi-head or grouped-query attention."""
    return (
        *(GATED_ATTENTION if architecture.output_gate else ATTENTION),
        *([QKV_BIAS] if architecture.qkv_bias else ()),
        *([PROJECTION_BIAS] if architecture.projection_bias else ()),
        *(QK_NORM if architecture.qk_norm else ()),
        *(JOINT_QK_NORM if architecture.qk_norm_joint else ()),
        *([SINKS] if architecture.sinks else ()),
    )


def moe_rules(architecture: Architecture) -> tuple[WeightRule, ...]:
    """Return the rules of a router and experts that are stored one by one."""
    bias = (EXPERT_BIAS,) if architecture.expert_bias else ()
    return (ROUTER, *bias, *EXPERTS, *(SHARED_EXPERT if architecture.shared_width else ()))


def _no_routing(hf: Any) -> RoutingRule:
    raise ConfigError(f"{hf.model_type} has no experts, so there is no routing rule")


@dataclass(frozen=True)
class Family:
    """One model family; `hf` is a model's transformers config.

    dense_rules: weights of a dense MLP. required: fields of config.json that must have this value where they are
    present. mlp_values: fields of Megatron's TransformerConfig for another activation than SwiGLU. delta_rules: weights
    of a gated delta net. layer_kinds: of `layer_types` in config.json. partial_yarn: YaRN may rotate a part of each
    head. splits_experts: experts can be tensor-parallel.
    """

    model_types: tuple[str, ...]
    architecture: Callable[[Any], Architecture]
    routing: Callable[[Any], RoutingRule] = _no_routing
    attention_rules: Callable[[Any, Architecture], tuple[WeightRule, ...]] = attention_rules
    moe_rules: Callable[[Architecture], tuple[WeightRule, ...]] = moe_rules
    dense_rules: tuple[WeightRule, ...] = DENSE_MLP
    required: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mlp_values: Callable[[Any], dict[str, Any]] = lambda _: {}
    delta_rules: tuple[WeightRule, ...] = ()
    layer_kinds: tuple[str, ...] = ("full_attention", "sliding_attention")
    partial_yarn: bool = False
    splits_experts: bool = True

    def layer_rules(self, hf: Any, layer: int) -> tuple[WeightRule, ...]:
        """Return the weight rules of one layer."""
        architecture = self.architecture(hf)
        mlp = self.moe_rules(architecture) if architecture.has_experts[layer] else self.dense_rules
        norms = (*NORMS, *POST_NORMS) if architecture.post_norms else NORMS
        is_delta = bool(architecture.is_delta) and architecture.is_delta[layer]
        return (*norms, *(self.delta_rules if is_delta else self.attention_rules(hf, architecture)), *mlp)


@cache
def known_families() -> Mapping[str, Family]:
    """Return the families in `families/` by model_type."""
    modules: list[Any] = [
        import_module(f"{families.__name__}.{module.name}") for module in pkgutil.iter_modules(families.__path__)
    ]
    every: list[Family] = [family for module in modules for family in module.FAMILIES]
    return {model_type: family for family in every for model_type in family.model_types}


def family_of(model_type: str | None) -> Family:
    """Return the family of a config.json's `model_type`. Raises ConfigError listing the known ones for another."""
    known = known_families()
    if model_type in INDEXED:
        raise ConfigError(f"{model_type} has sparse-attention indexers, which no training backend supports: {REMEDY}")
    if model_type is None or model_type not in known:
        raise ConfigError(f"--train-backend megatron supports {', '.join(sorted(known))}, not {model_type}; {USE_FSDP}")
    return known[model_type]


def architecture_of(hf: Any) -> Architecture:
    """Return the facts about a model, given its transformers config."""
    return family_of(hf.model_type).architecture(hf)
