"""Which tensors of a Hugging Face checkpoint each parameter is made of: one table for every family.

A rule says of which tensors of the checkpoint a parameter is made, how, and how it is cut over tensor-parallel ranks.
`names` reads the rules in both directions.

    one             the tensor itself
    qkv             for each key/value head: the queries of its group, its keys, its values
    gate_up         the gate's rows, then the others'; each half is cut for itself
    packed          an expert's row of a tensor that holds all experts, transposed if it is a matrix
    packed_gate_up  the same; gate and others take turns there, and are one after the other here
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from furlong.training.megatron.architecture import Architecture

Join = Literal["one", "qkv", "gate_up", "packed", "packed_gate_up"]


@dataclass(frozen=True)
class Rule:
    """One kind of parameter. `ours` and `theirs` lack the layer's prefix; `axis` is cut over ranks, None is not.

    of_expert: there is one for each expert, cut over the ranks that share an expert. N in a name stands for the
    expert's number: that of the rank's own experts in ours, of all in theirs. is_trained: it can be trained.
    """

    ours: str
    theirs: tuple[str, ...]
    join: Join = "one"
    axis: int | None = None
    of_expert: bool = False
    is_trained: bool = True

    @property
    def is_packed(self) -> bool:
        """Whether one tensor of the checkpoint holds this parameter of all experts."""
        return self.join.startswith("packed")

    @property
    def has_halves(self) -> bool:
        """Whether it is a gate and what the gate is for, one after the other."""
        return self.join.endswith("gate_up")


ENDS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), axis=0),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), axis=0),
)
NORMS = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",)),
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
)
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = (
    Rule("self_attention.linear_qkv.weight", tuple(f"{p}.weight" for p in QKV), "qkv", axis=0),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), axis=1),
)
LATENT = (
    Rule("self_attention.linear_kv_down_proj.weight", ("self_attn.kv_a_proj_with_mqa.weight",)),
    Rule("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",)),
    Rule("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight",), axis=0),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), axis=1),
)
SHORT_QUERIES = (
    Rule("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",)),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",)),
    Rule("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",), axis=0),
)
QUERIES = Rule("self_attention.linear_q_proj.weight", ("self_attn.q_proj.weight",), axis=0)
QKV_BIAS = Rule("self_attention.linear_qkv.bias", tuple(f"{p}.bias" for p in QKV), "qkv", axis=0)
PROJECTION_BIAS = Rule("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",))
QK_NORM = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
SINKS = Rule("self_attention.core_attention.softmax_offset", ("self_attn.sinks",), axis=0)
DENSE = (
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up", axis=0),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), axis=1),
)
ROUTER = Rule("mlp.router.weight", ("mlp.gate.weight",))
CHOICE_BIAS = Rule("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",), is_trained=False)
FC1, FC2 = (f"mlp.experts.local_experts.N.linear_fc{number}" for number in (1, 2))
EXPERT = (
    Rule(
        f"{FC1}.weight",
        ("mlp.experts.N.gate_proj.weight", "mlp.experts.N.up_proj.weight"),
        "gate_up",
        axis=0,
        of_expert=True,
    ),
    Rule(f"{FC2}.weight", ("mlp.experts.N.down_proj.weight",), axis=1, of_expert=True),
)
SHARED = (
    Rule(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        "gate_up",
        axis=0,
    ),
    Rule("mlp.shared_experts.linear_fc2.weight", ("mlp.shared_experts.down_proj.weight",), axis=1),
)
GPT_OSS_EXPERTS = (
    Rule("mlp.router.weight", ("mlp.router.weight",)),
    Rule("mlp.router.bias", ("mlp.router.bias",)),
    Rule(f"{FC1}.weight", ("mlp.experts.gate_up_proj",), "packed_gate_up", axis=0, of_expert=True),
    Rule(f"{FC1}.bias", ("mlp.experts.gate_up_proj_bias",), "packed_gate_up", axis=0, of_expert=True),
    Rule(f"{FC2}.weight", ("mlp.experts.down_proj",), "packed", axis=1, of_expert=True),
    Rule(f"{FC2}.bias", ("mlp.experts.down_proj_bias",), "packed", of_expert=True),
)


def layer_rules(hf: Any, architecture: Architecture, layer: int) -> tuple[Rule, ...]:
    """The rules of one layer of a family."""
    if architecture.is_latent:
        queries = (QUERIES,) if hf.q_lora_rank is None else SHORT_QUERIES
        return (*NORMS, *queries, *LATENT, *_feed_forward(hf, architecture, layer))
    attention = [
        *ATTENTION,
        *([QKV_BIAS] if architecture.qkv_bias else ()),
        *([PROJECTION_BIAS] if architecture.projection_bias else ()),
        *(QK_NORM if architecture.qk_norm else ()),
        *([SINKS] if architecture.sinks else ()),
    ]
    return (*NORMS, *attention, *_feed_forward(hf, architecture, layer))


def _feed_forward(hf: Any, architecture: Architecture, layer: int) -> tuple[Rule, ...]:
    if not architecture.has_experts[layer]:
        return DENSE
    if hf.model_type == "gpt_oss":
        return GPT_OSS_EXPERTS
    bias = (CHOICE_BIAS,) if architecture.choice_bias else ()
    return (ROUTER, *bias, *EXPERT, *(SHARED if architecture.shared_width else ()))
