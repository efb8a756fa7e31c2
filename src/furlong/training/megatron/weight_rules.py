"""Weight rules: the Hugging Face tensors that form each Megatron-core parameter. Imports no torch.

A rule names the tensors, how they are joined, and the axis that tensor parallelism splits. `weight_names` applies rules
in both directions. Here are the rules that families share; `families/` has the others.

    one             the tensor itself
    qkv             for each key/value head: the queries of its group, its keys, its values
    gate_up         the rows of gate_proj, then those of up_proj; each half is split on its own
    packed          one expert's row of a tensor of all experts; matrices are transposed
    packed_gate_up  the same; gate and up rows alternate in the checkpoint, and are one half each in the parameter
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Join = Literal["one", "qkv", "gate_up", "packed", "packed_gate_up"]


@dataclass(frozen=True)
class WeightRule:
    """One kind of parameter. `ours` (Megatron-core) and `theirs` (Hugging Face) lack the layer's prefix.

    axis: split by tensor parallelism; None if replicated. of_expert: there is one for each expert, split by expert
    tensor parallelism. N in a name is the expert's number: within the rank in ours, in the whole model in theirs.
    is_trained: False for buffers.
    """

    ours: str
    theirs: tuple[str, ...]
    join: Join = "one"
    axis: int | None = None
    of_expert: bool = False
    is_trained: bool = True

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
NORMS = (
    WeightRule("input_layernorm.weight", ("input_layernorm.weight",)),
    WeightRule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
)
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = (
    WeightRule("self_attention.linear_qkv.weight", tuple(f"{p}.weight" for p in QKV), "qkv", axis=0),
    WeightRule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), axis=1),
)
QKV_BIAS = WeightRule("self_attention.linear_qkv.bias", tuple(f"{p}.bias" for p in QKV), "qkv", axis=0)
PROJECTION_BIAS = WeightRule("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",))
QK_NORM = (
    WeightRule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    WeightRule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
SINKS = WeightRule("self_attention.core_attention.softmax_offset", ("self_attn.sinks",), axis=0)
DENSE_MLP = (
    WeightRule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up", axis=0),
    WeightRule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), axis=1),
)
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
