"""Flags of the section `moe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class MoeFlags:
    """Mixture-of-experts routing and load balancing in training."""

    use_routing_replay: bool = flag(
        False,
        "Reuse the expert choices of the log-prob pass in all optimizer steps of a rollout; the pass then always "
        "runs. Gating weights are recomputed.",
        needs="compute_advantages_and_returns",
        excludes="debug_rollout_only",
    )
    use_rollout_routing_replay: bool = flag(
        False,
        "Reuse the engine's expert choices for training and log-probs. Takes precedence over --use-routing-replay.",
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = flag(
        "aux_loss",
        "Scope of the load-balancing loss (--moe-aux-loss-coeff): `aux_loss` counts tokens per micro-batch, which "
        "depends on packing; `seq_aux_loss` counts them per sample.",
        needs="train_backend=megatron",
    )
    moe_aux_loss_coeff: float = flag(
        0.0, "Weight of the load-balancing loss.", within="[0, inf)", needs="train_backend=megatron"
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
    moe_token_dispatcher_type: Literal["alltoall"] = flag(
        "alltoall", "How tokens are sent to the ranks of their experts, with --train-backend megatron."
    )
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
    )
