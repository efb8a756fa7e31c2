"""Facts about the weights in SGLang's memory, by release and server options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HASHED = ("SGLang 0.5.16",)  # releases whose /weights_checker reports `transfer.device_checksum`s on CUDA
# Options of HASHED servers, and the values that keep experts in the layout of `layout_checksums`.
PLAIN_EXPERTS: Mapping[str, Sequence[Any]] = {
    "moe_runner_backend": ("auto", "triton"),  # the server reports the backend's name if auto selects another one
    "moe_a2a_backend": ("none",),
    "enable_eplb": (None, False),
    "ep_num_redundant_experts": (0,),
    "init_expert_location": ("trivial",),
    "kt_weight_path": (None,),
}
# The values that keep tensors in their own precision and on the GPU.
PLAIN_TENSORS: Mapping[str, Sequence[Any]] = {
    "rl_on_policy_target": (None,),
    "torchao_config": (None, ""),
    "cpu_offload_gb": (None, 0),
    "offload_group_size": (None, -1),
}
# The values with which several processes have the shards of `EngineSharding`.
PLAIN_SHARES: Mapping[str, Sequence[Any]] = {
    "attn_cp_size": (1,),
    "dcp_size": (1,),
    "moe_dp_size": (1,),
    "moe_dense_tp_size": (None,),
    "enable_prefill_cp": (False,),
    "elastic_ep_backend": (None,),
}
OWN_HEAD = (
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)  # families whose output layer is never tied
KEEPS_ROUTER = ("glm4_moe", "glm4_moe_lite")  # families that route by an old copy of the router's weights


def options_beside(answer: Mapping[str, Any], plain: Mapping[str, Sequence[Any]]) -> str:
    """Return the options in an answer of /server_info that have other values, as text; "" if there are none."""
    others = {name: answer.get(name) for name, values in plain.items() if answer.get(name) not in values}
    return ", ".join(f"{name} {value}" for name, value in others.items())


def has_own_head(software: str, family: str) -> bool:
    """Whether a server keeps an untied output layer for models of this family, whatever their config says."""
    return software in HASHED and family in OWN_HEAD


def unused_weights(software: str, family: str) -> str:
    """Return which weights of this model family a server does not use after an update, and why; "" if it uses all."""
    if software not in HASHED or family not in KEEPS_ROUTER:
        return ""
    return (
        f"routes tokens by a float32 copy of the router's weights, which {software} makes of {family} models at their "
        "first forward pass and never updates: log-probs of engine and trainer diverge as the router is trained. "
        "Freeze the router (--freeze-params-name-list), or patch SGLang to reset `_weight_fp32` when it loads weights"
    )
