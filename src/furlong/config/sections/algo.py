"""What is optimized: advantages, the policy loss, KL, entropy and corrections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag
from furlong.core.algorithms import ALGORITHMS


@dataclass(frozen=True)
class AlgoFlags:
    """The algorithm and its coefficients."""

    advantage_estimator: str = flag("grpo", "The algorithm.", choices=ALGORITHMS)
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = flag(
        "policy_loss", "What is minimized: the algorithm's loss, next-token cross-entropy, or your function."
    )
    compute_advantages_and_returns: bool = flag(True, "Compute no advantages (demonstrations, custom losses).")
    rewards_normalization: bool = flag(True, "Do not center rewards within each prompt's group.")
    grpo_std_normalization: bool = flag(True, "Do not divide centered rewards by their group's standard deviation.")
    normalize_advantages: bool = flag(False, "Whiten advantages over all trained tokens of the batch.")
    gamma: float = flag(1.0, "Discount per token of the REINFORCE++ return.", within="[0, 1]")
    eps_clip: float = flag(0.2, "The ratio is clipped below at 1 minus this.", within="[0, inf)")
    eps_clip_high: float | None = flag(
        None, "The ratio is clipped above at 1 plus this. Without it: --eps-clip.", within="[0, inf)"
    )
    eps_clip_c: float | None = flag(
        None, "Dual clip: bound of the loss where the advantage is negative.", within="(1, inf)"
    )
    calculate_per_token_loss: bool = flag(
        False, "Average over all tokens of the batch, not first over the tokens of each response."
    )
    loss_constant_len: int | None = flag(
        None, "Divide each response's sum by this many tokens, not by its length (Dr. GRPO).", within="[1, inf)"
    )
    kl_coef: float = flag(0.0, "Weight of the KL to the reference in the reward.", within="[0, inf)")
    use_kl_loss: bool = flag(False, "Add the KL to the reference to the loss.")
    kl_loss_coef: float = flag(0.0, "Weight of that term.", within="[0, inf)", needs="use_kl_loss")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag(
        "k1",
        "Estimator of the KL, in loss and reward. In the loss k1 has a gradient of 0 on average; k2 has the KL's.",
    )
    use_unbiased_kl: bool = flag(False, "Multiply the KL estimate by the ratio, with gradient.", needs="use_kl_loss")
    ref_update_interval: int | None = flag(
        None, "Rollouts after which the reference becomes the policy. Without it: never.", within="[1, inf)"
    )
    entropy_coef: float = flag(0.0, "Weight of the entropy bonus.")
    use_rollout_entropy: bool = flag(False, "Compute the entropy in the log-prob pass as well.")
    keep_old_actor: bool = flag(
        False, "Keep the weights that generated the batch, at most one rollout old, and clip against them."
    )
    use_rollout_logprobs: bool = flag(False, "Clip against the engine's log-probs; excludes --use-tis.")
    get_mismatch_metrics: bool = flag(
        False, "Report what importance sampling would correct, without --use-tis correcting nothing."
    )
    use_tis: bool = flag(False, "Weight the loss by trainer / engine probability (importance sampling).")
    tis_clip: float = flag(2.0, "Upper bound of that weight.", within="(0, inf)", needs="use_tis")
    tis_clip_low: float = flag(0.0, "Lower bound of that weight.", within="[0, inf)", needs="use_tis")
    tis_mode: Literal["truncate", "clip", "mask"] = flag(
        "truncate", "Outside the bounds: cap above, clamp both ways, or drop (IcePop).", needs="use_tis"
    )
    tis_level: Literal["token", "sequence", "geometric"] = flag(
        "token", "One weight per token, per response (product), or per response (geometric mean).", needs="use_tis"
    )
    tis_veto: float | None = flag(
        None, "Drop a response in which any token's ratio is below this.", within="[0, 1]", needs="use_tis"
    )
    use_opsm: bool = flag(False, "Mask responses with negative advantage that drifted from the policy.")
    opsm_delta: float = flag(1e-4, "Mean log-ratio above which such a response is masked.", needs="use_opsm")
    mask_truncated: bool = flag(False, "Do not train on responses that hit the length limit.")
    overlong_buffer_len: int | None = flag(
        None, "Last tokens of --rollout-max-response-len over which a penalty grows (DAPO).", within="[1, inf)"
    )
    overlong_penalty_factor: float = flag(
        1.0, "Penalty at the length limit.", within="[0, inf)", needs="overlong_buffer_len"
    )
    custom_loss_function_path: str | None = flag(None, "Your loss, with --loss-type custom_loss.")
    custom_tis_function_path: str | None = flag(None, "Your importance weighting.")
    custom_pg_loss_reducer_function_path: str | None = flag(None, "Your reduction of the policy loss.")
    custom_advantage_function_path: str | None = flag(None, "Your advantages.")
