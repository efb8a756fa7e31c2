"""What is known of the weights in SGLang's memory, by its version and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HASHED = ("SGLang 0.5.16",)  # whose /weights_checker answers `core.device_checksum`s on CUDA
PLAIN_EXPERTS: Mapping[
    str, Sequence[Any]
] = {  # options with which HASHED servers have experts as `sglang_layout.expert_stacks` says
    "moe_runner_backend": ("auto", "triton"),  # auto is another's name where it becomes another
    "moe_a2a_backend": ("none",),
    "enable_eplb": (None, False),
    "ep_num_redundant_experts": (0,),
    "init_expert_location": ("trivial",),
    "kt_weight_path": (None,),
}
PLAIN_TENSORS: Mapping[str, Sequence[Any]] = {  # with which they have tensors in their own precision, on the GPU
    "rl_on_policy_target": (None,),
    "torchao_config": (None, ""),
    "cpu_offload_gb": (None, 0),
    "offload_group_size": (None, -1),
}
PLAIN_SHARES: Mapping[str, Sequence[Any]] = {  # with which several processes have the shards of `EngineSharding`
    "attn_cp_size": (1,),
    "dcp_size": (1,),
    "moe_dp_size": (1,),
    "moe_dense_tp_size": (None,),
    "enable_prefill_cp": (False,),
    "elastic_ep_backend": (None,),
}
OWN_HEAD = ("glm4_moe", "glm4_moe_lite", "gpt_oss", "qwen2_moe", "qwen3_moe")  # families whose heads HASHED never tie
KEEPS_ROUTER = ("glm4_moe", "glm4_moe_lite")  # families of which HASHED servers compute with an old copy of routers


def options_beside(answer: Mapping[str, Any], plain: Mapping[str, Sequence[Any]]) -> str:
    """The options in an answer of /server_info that are none of the plain ones, with their values; "" if all are."""
    found = {name: answer.get(name) for name, values in plain.items() if answer.get(name) not in values}
    return ", ".join(f"{name} {value}" for name, value in found.items())


def has_own_head(software: str, family: str) -> bool:
    """Whether a server has an output layer apart from the embedding, whatever the config of a model says."""
    return software in HASHED and family in OWN_HEAD


def unused_weights(software: str, family: str) -> str:
    """Which weights of a model of this family a server has, but does not compute with; "" if all are used."""
    if software not in HASHED or family not in KEEPS_ROUTER:
        return ""
    return (
        f"routes tokens by a float32 copy of the router's weights, which {software} makes of {family} models at their "
        "first forward pass and keeps whatever is loaded: log-probs of engine and trainer grow apart as the router is "
        "trained. Freeze it (--freeze-params-name-list), or have SGLang forget `_weight_fp32` when it loads weights"
    )
