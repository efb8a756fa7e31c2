"""Mixtures of experts: which experts tokens go to, and what keeps these evenly used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class MoeFlags:
    """Routing of tokens to experts in training."""

    use_routing_replay: bool = flag(
        False,
        "Train with the experts that the policy chose in the log-prob pass before the first optimizer step, which is "
        "then always run; gating weights are computed anew.",
    )
    use_rollout_routing_replay: bool = flag(
        False,
        "Train, and compute log-probs of the policy, with the experts that the engine chose when it generated; goes "
        "before --use-routing-replay.",
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = flag(
        "aux_loss",
        "Which tokens --moe-aux-loss-coeff counts together: those of a micro-batch (`aux_loss`, which depends on how "
        "samples are packed) or of a sample (`seq_aux_loss`). With a coefficient of 0 there is nothing to count.",
    )
    moe_aux_loss_coeff: float = flag(
        0.0, "Weight of the loss that keeps experts evenly used; with --train-backend megatron.", within="[0, inf)"
    )
    moe_z_loss_coeff: float | None = flag(
        None, "Weight of the loss that keeps routers' logits small; with --train-backend megatron.", within="[0, inf)"
    )
    moe_router_enable_expert_bias: bool = flag(
        False,
        "Move the bias of each expert's choice after every step, up if it was chosen less than the average; for models "
        "that have such a bias, with --train-backend megatron. Without it the bias stays as it was loaded.",
    )
    moe_token_dispatcher_type: Literal["alltoall"] = flag(
        "alltoall", "How tokens reach the ranks of their experts; with --train-backend megatron."
    )
    moe_router_dtype: Literal["fp32"] = flag("fp32", "Precision of the routers' logits and weights.")
    moe_grouped_gemm: bool | None = flag(
        None,
        "Multiply all experts of a rank at once. Without it: in bfloat16, the only precision that has it; with "
        "--train-backend megatron.",
    )
    moe_permute_fusion: bool = flag(
        False,
        "Sort tokens by expert in one kernel where TransformerEngine has it, which is not used here: results are the "
        "same, and so is the speed; with --train-backend megatron.",
    )
    moe_router_bias_update_rate: float = flag(
        1e-3, "How far it is moved; 0 leaves it as it is.", within="[0, inf)", needs="moe_router_enable_expert_bias"
    )
    log_routing_agreement: bool | None = flag(
        None,
        "Have the engine say which experts it chose, and log the share of them that the trainer chooses, too "
        "(`train/routing_agreement`). Without it: with --use-rollout-routing-replay, and with an embedded engine in "
        "this process.",
    )
