"""Flags of the section `algo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag
from furlong.core.algorithms import ALGORITHMS, find_algorithm

_NOT_SFT = "loss_type!=sft_loss"
_CRITIC = f"{_NOT_SFT}; advantage_estimator.has_critic"
_SHARED = "the critic shares the policy's GPUs, as in slime and Miles"
_CLIPS = f"{_NOT_SFT}; advantage_estimator.clips or loss_type=custom_loss"


@dataclass(frozen=True)
class AlgoFlags:
    """Algorithm, loss, KL, entropy and off-policy corrections."""

    advantage_estimator: str = flag(
        "grpo", "Algorithm: how advantages and the policy loss are computed.", choices=ALGORITHMS
    )
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = flag(
        "policy_loss",
        "Loss to minimize: the algorithm's policy loss, next-token cross-entropy on the labels, or a function of "
        "yours.",
    )
    compute_advantages_and_returns: bool = flag(True, "Do not compute advantages; for losses that do not use them.")
    rewards_normalization: bool = flag(True, "Do not subtract the mean reward of the prompt group.")
    grpo_std_normalization: bool = flag(
        True, "Do not divide centered rewards by the standard deviation of the prompt group."
    )
    normalize_advantages: bool = flag(False, "Whiten advantages over all trained tokens of the batch.")
    gamma: float = flag(
        1.0, "Discount of PPO's and REINFORCE++'s returns, per token or per turn (--return-level).", within="[0, 1]"
    )
    return_level: Literal["token", "turn"] = flag(
        "token",
        "Steps of --gamma, --lambd and --critic-lambd: tokens, or turns of an agent. `turn` also pays the rewards in a "
        "sample's metadata `step_rewards`, those of an environment's steps, at the last token of their turn.",
        needs="advantage_estimator.discounted",
    )
    lambd: float = flag(
        1.0,
        "Lambda of the generalized advantage estimate: 1 is the return minus the critic's value, with the least bias; "
        "0 the error of the value one token ahead, with the least variance.",
        within="[0, 1]",
        needs=_CRITIC,
    )
    critic_lambd: float | None = flag(
        None, "Lambda of the returns that the critic learns. Default: --lambd.", within="[0, 1]", needs=_CRITIC
    )
    lambd_length_alpha: float | None = flag(
        None,
        "Length-adaptive lambda of the policy's advantages: 1 - 1 / (this value x trained tokens of the response), in "
        "place of --lambd. 0 disables it.",
        within="[0, inf)",
        needs=_CRITIC,
    )
    positive_nll_coef: float = flag(
        0.0,
        "Weight of the negative log-likelihood of samples whose reward is above 0, averaged over their tokens.",
        within="[0, inf)",
        needs=_NOT_SFT,
    )
    value_clip: float = flag(
        0.2,
        "Clipping bound of the critic: how far a value may move in a rollout before its loss stops falling.",
        within="(0, inf)",
        needs=_CRITIC,
    )
    num_critic_only_steps: int = flag(
        0,
        "Rollouts at the start of the run that train only the critic. With at least --num-rollout the policy is never "
        "trained.",
        within="[0, inf)",
        needs=_CRITIC,
    )
    critic_lr: float | None = flag(None, "Learning rate of the critic. Default: --lr.", within="[0, 10]", needs=_CRITIC)
    critic_lr_warmup_iters: int = flag(
        0, "Optimizer steps over which the critic's learning rate rises.", within="[0, inf)", needs=_CRITIC
    )
    critic_steps_per_rollout: int = flag(
        1, "How often the critic trains on the optimizer steps of a rollout.", within="[1, inf)", needs=_CRITIC
    )
    critic_freeze_params_name_list: tuple[str, ...] | None = flag(
        None,
        "Regular expressions; parameters of the critic whose name matches one of them are not trained. The policy's "
        "lists do not apply to the critic.",
        needs=_CRITIC,
    )
    critic_load: str | None = flag(
        None,
        "Initial weights of the critic: a Hugging Face folder, of a language model or of a value model, or a "
        "checkpoint directory. Default: those of the policy, with a new head.",
        needs=_CRITIC,
        hub="model",
    )
    critic_save: str | None = flag(
        None,
        "Directory for the critic as a Hugging Face model (AutoModelForTokenClassification) at every checkpoint; "
        "`{rollout_id}` is replaced. Checkpoints of --save contain the critic in any case.",
        needs=f"save; {_CRITIC}",
    )
    critic_num_nodes: int | None = flag(
        None,
        "Accepted for Miles compatibility; no effect: the critic shares the policy's GPUs.",
        within="[1, inf)",
        needs=_CRITIC,
        instead=_SHARED,
    )
    critic_num_gpus_per_node: int | None = flag(
        None,
        "Accepted for Miles compatibility; no effect: the critic shares the policy's GPUs.",
        within="[1, inf)",
        needs=_CRITIC,
        instead=_SHARED,
    )
    megatron_config_path: str | None = flag(
        None,
        "YAML file with optimizer flags, `load` and `save` of the roles actor and critic, which override the command "
        "line, as in slime.",
        needs=_CRITIC,
    )
    eps_clip: float = flag(
        0.2,
        "Lower clipping bound: the probability ratio is clipped below at 1 minus this value.",
        within="[0, inf)",
        needs=_CLIPS,
    )
    eps_clip_high: float | None = flag(
        None,
        "Upper clipping bound: the probability ratio is clipped above at 1 plus this value. Default: the algorithm's "
        "own, else --eps-clip.",
        within="[0, inf)",
        needs=_CLIPS,
    )
    eps_clip_c: float | None = flag(
        None, "Dual clip: bound on the loss of tokens with negative advantage.", within="(1, inf)", needs=_CLIPS
    )
    calculate_per_token_loss: bool = flag(
        False, "Average the loss over all tokens of the batch, instead of over each response first."
    )
    loss_constant_len: int | None = flag(
        None,
        "Divide the summed loss of each response by this number of tokens instead of by its length (Dr. GRPO).",
        within="[1, inf)",
    )
    kl_coef: float = flag(
        0.0, "Weight of the KL to the reference model in the reward.", within="[0, inf)", excludes="kl_loss_coef"
    )
    use_kl_loss: bool = flag(False, "Add the KL to the reference model to the loss.", needs=_NOT_SFT)
    kl_loss_coef: float = flag(0.0, "Weight of the KL in the loss.", within="[0, inf)", needs="use_kl_loss")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag(
        "k1",
        "KL estimator, in loss and reward. In the loss, the expected gradient of k1 is zero; that of k2 is the "
        "gradient of the KL.",
    )
    use_unbiased_kl: bool = flag(
        False, "Multiply the KL estimate by the probability ratio, with gradient.", needs="use_kl_loss"
    )
    ref_update_interval: int | None = flag(
        None,
        "Rollouts between updates of the reference model to the current policy. Default: never.",
        within="[1, inf)",
        needs="use_kl_loss or kl_coef",
    )
    entropy_coef: float = flag(0.0, "Weight of the entropy bonus.", needs=_NOT_SFT)
    use_rollout_entropy: bool = flag(False, "Also compute the entropy in the log-prob pass.")
    keep_old_actor: bool = flag(
        False, "Keep the weights that generated the batch, at most one rollout old, and clip against them."
    )
    use_rollout_logprobs: bool = flag(
        False,
        "Use the engine's log-probs as those of the old policy in clipping.",
        needs=_NOT_SFT,
        excludes="use_tis keep_old_actor",
    )
    get_mismatch_metrics: bool = flag(
        False, "Report importance-sampling metrics; without --use-tis the loss is unchanged."
    )
    use_tis: bool = flag(
        False, "Weight the loss by the ratio of trainer to engine probability (importance sampling).", needs=_NOT_SFT
    )
    tis_clip: float = flag(2.0, "Upper bound of the importance weight.", within="(0, inf)", needs="use_tis")
    tis_clip_low: float = flag(
        0.0, "Lower bound of the importance weight.", within="[0, inf)", needs="use_tis", bound="<= tis_clip"
    )
    tis_mode: Literal["truncate", "clip", "mask"] = flag(
        "truncate",
        "Importance weights outside the bounds: `truncate` caps them above, `clip` clamps both sides, `mask` drops "
        "the token (IcePop).",
        needs="use_tis",
    )
    tis_level: Literal["token", "sequence", "geometric"] = flag(
        "token",
        "Granularity of the importance weight: per token, per response (product), or per response (geometric mean).",
        needs="use_tis",
    )
    tis_veto: float | None = flag(
        None, "Drop a response if the ratio of any of its tokens is below this value.", within="[0, 1]", needs="use_tis"
    )
    tis_upper_bound: float | None = flag(
        None, "--tis-clip by its name in slime's mis.yaml.", within="(0, inf)", needs="use_tis"
    )
    tis_lower_bound: float | None = flag(
        None,
        "--tis-clip-low by its name in slime's mis.yaml; not used by --tis-mode truncate. Default with "
        "--tis-upper-bound: its reciprocal.",
        within="[0, inf)",
        needs="use_tis",
    )
    tis_batch_normalize: bool = flag(
        False,
        "Divide the importance weights by their mean over the micro-batch, as slime's mis.py does. The mean depends on "
        "how samples are packed.",
        needs="use_tis",
    )
    use_rs: bool = flag(
        False, "Also reject tokens whose importance weight at --rs-level is out of bounds.", needs="use_tis"
    )
    rs_level: Literal["token", "sequence", "geometric"] = flag(
        "token", "Granularity of rejection; see --tis-level.", needs="use_rs"
    )
    rs_lower_bound: float | None = flag(
        None,
        "Lower bound of rejection. Default: --tis-lower-bound or --tis-clip-low, or the reciprocal of the upper bound "
        "of the weights.",
        within="[0, inf)",
        needs="use_rs",
    )
    rs_upper_bound: float | None = flag(
        None, "Upper bound of rejection. Default: that of the weights.", within="(0, inf)", needs="use_rs"
    )
    rs_veto_threshold: float | None = flag(
        None, "--tis-veto by its name in slime's mis.yaml.", within="[0, 1]", needs="use_rs"
    )
    use_opsm: bool = flag(
        False, "Mask responses with negative advantage that have drifted from the current policy.", needs=_NOT_SFT
    )
    opsm_delta: float = flag(1e-4, "Mean log-ratio above which such a response is masked.", needs="use_opsm")
    mask_truncated: bool = flag(
        False, "Exclude responses that reached the length limit from training.", excludes="overlong_buffer_len"
    )
    overlong_buffer_len: int | None = flag(
        None,
        "Number of tokens before --rollout-max-response-len over which a length penalty grows linearly (DAPO).",
        within="[1, inf)",
        needs="rollout_max_response_len",
        bound="< rollout_max_response_len",
    )
    overlong_penalty_factor: float = flag(
        1.0, "Length penalty at the limit.", within="[0, inf)", needs="overlong_buffer_len"
    )
    custom_loss_function_path: str | None = flag(None, "User loss function.", needs="loss_type=custom_loss")
    custom_tis_function_path: str | None = flag(
        None, "User function that computes importance weights.", needs="use_tis or get_mismatch_metrics"
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, "User function that reduces the policy loss.", excludes="loss_constant_len"
    )
    custom_advantage_function_path: str | None = flag(None, "User function that computes advantages.")

    @property
    def rejection_bounds(self) -> tuple[float, float]:
        """Bounds of --use-rs; unset ones are those of the weights, as in slime."""
        low = self.tis_clip_low or 1 / self.tis_clip if self.tis_lower_bound is None else self.tis_lower_bound
        high = self.tis_clip if self.rs_upper_bound is None else self.rs_upper_bound
        return low if self.rs_lower_bound is None else self.rs_lower_bound, high

    @property
    def uses_critic(self) -> bool:
        """Whether a value model is trained."""
        return find_algorithm(self.advantage_estimator).has_critic and self.loss_type != "sft_loss"

    @property
    def uses_reference(self) -> bool:
        """Whether loss or reward has a KL to the reference model."""
        return bool(self.kl_coef or self.use_kl_loss)
