"""Rules of the selected algorithm: its table row (`core.algorithms`) combined with the flags.

Required log-probs, loss denominator, clip bounds, reward normalization, advantages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from furlong.algo.advantage import ADVANTAGES, AdvantageInputs, normalize_rewards, overlong_penalty, whiten
from furlong.algo.kl import kl_estimate
from furlong.algo.reduce import Reduce, identity
from furlong.config.sections import AlgoFlags
from furlong.core.algorithms import Aggregation, Algorithm, find_algorithm
from furlong.core.batch import FloatArray, IntArray
from furlong.errors import ConfigError, DataError


def algorithm(flags: AlgoFlags) -> Algorithm:
    """Return the table row of `--advantage-estimator`. Raises ConfigError for an unknown name."""
    return find_algorithm(flags.advantage_estimator)


@dataclass(frozen=True)
class Needs:
    """Log-prob passes to run before the first optimizer step of a rollout."""

    old_log_probs: bool
    ref_log_probs: bool


def needs(flags: AlgoFlags, num_steps_per_rollout: int, *, custom_advantages: bool = False) -> Needs:
    """Return the extra forward passes that the flags require.

    With one optimizer step per rollout the old policy is the live one and the ratio is exactly 1, so no pass is needed.
    With --use-rollout-logprobs the engine's log-probs are the old ones. `custom_advantages`: a user function computes
    advantages; with --kl-coef it receives the log-probs of the KL, whatever the algorithm.
    """
    reward_kl = (custom_advantages or algorithm(flags).kl_in_reward) and flags.kl_coef != 0
    return Needs(
        old_log_probs=not flags.use_rollout_logprobs and (num_steps_per_rollout > 1 or reward_kl),
        ref_log_probs=flags.use_kl_loss or reward_kl,
    )


@dataclass(frozen=True)
class Denominator:
    """Aggregation of token losses; arguments of `reduce.loss_weights`."""

    mode: Aggregation
    constant_len: int | None = None


def denominator(flags: AlgoFlags, *, max_response_len: int | None = None) -> Denominator:
    """Return the aggregation: the algorithm's, else --loss-constant-len, --calculate-per-token-loss, else per rollout.

    An algorithm that needs a constant defaults to `max_response_len`, as in the Dr. GRPO paper.
    """
    mode = algorithm(flags).aggregation
    if mode is None:
        mode = "constant" if flags.loss_constant_len else "token" if flags.calculate_per_token_loss else "rollout"
    if mode != "constant":
        return Denominator(mode)
    constant_len = flags.loss_constant_len or max_response_len
    if constant_len is None:
        raise ConfigError(f"{flags.advantage_estimator} divides by a constant; give --loss-constant-len")
    return Denominator(mode, constant_len)


def clip_bounds(flags: AlgoFlags) -> tuple[float, float]:
    """Return the lower and upper clip distance from 1. The upper defaults to the algorithm's, else to --eps-clip."""
    high = flags.eps_clip_high
    return flags.eps_clip, algorithm(flags).upper_clip(flags.eps_clip) if high is None else high


def training_rewards(
    flags: AlgoFlags,
    raw_rewards_N: NDArray[np.floating],
    *,
    group_ids_N: IntArray,
    rollout_ids_N: IntArray,
    response_lengths_N: IntArray,
    max_response_len: int,
) -> FloatArray:
    """Apply the over-long penalty, then the group baseline, to the rewards of a rollout. Returns [N] float32."""
    rewards = np.asarray(raw_rewards_N, dtype=np.float64)
    if flags.overlong_buffer_len is not None:
        rewards = rewards + overlong_penalty(
            response_lengths_N,
            max_len=max_response_len,
            buffer_len=flags.overlong_buffer_len,
            factor=flags.overlong_penalty_factor,
        )
    baseline = algorithm(flags).baseline if flags.rewards_normalization else "none"
    if baseline == "group_mean_std" and not flags.grpo_std_normalization:
        baseline = "group_mean"
    return normalize_rewards(rewards, group_ids_N, baseline=baseline, rollout_ids_N=rollout_ids_N)


def token_advantages(
    flags: AlgoFlags,
    *,
    rewards_S: Tensor,
    mask_R: Tensor,
    seq_of_R: Tensor,
    old_log_probs_R: Tensor | None = None,
    ref_log_probs_R: Tensor | None = None,
    reduce: Reduce = identity,
) -> Tensor:
    """Return the advantage of each response token of S concatenated responses, [R].

    `reduce` sums over the ranks with the rest of the rollout; only --normalize-advantages calls it, twice, on every
    rank. `old_log_probs_R` (the trainer's, or the engine's with --use-rollout-logprobs) and `ref_log_probs_R` are read
    if the algorithm has KL in the reward. Raises DataError if they are missing then.
    """
    row = algorithm(flags)
    kl_R = None
    if row.kl_in_reward and flags.kl_coef != 0:
        if old_log_probs_R is None or ref_log_probs_R is None:
            raise DataError(
                f"--kl-coef {flags.kl_coef} puts KL into the reward, which needs old and reference log-probs; got "
                f"old: {old_log_probs_R is not None}, reference: {ref_log_probs_R is not None}"
            )
        kl_R = kl_estimate(old_log_probs_R, ref_log_probs_R, flags.kl_loss_type)
    inputs = AdvantageInputs(rewards_S, mask_R, seq_of_R, kl_R, flags.kl_coef, flags.gamma)
    advantages_R = ADVANTAGES[row.advantages](inputs)
    return whiten(advantages_R, mask_R, reduce=reduce) if flags.normalize_advantages else advantages_R
