"""What the row of the chosen algorithm (`core.algorithms`) and the flags say together.

Which log-probs are needed, by what a loss is divided, where ratios are clipped, rewards, advantages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from furlong.algo.advantage import ADVANTAGES, AdvantageInputs, normalize_rewards, overlong_penalty, whiten
from furlong.algo.kl import kl_estimate
from furlong.algo.reduce import Reduce, identity
from furlong.algo.settings import Settings
from furlong.core.algorithms import Aggregation, Algorithm, find_algorithm
from furlong.core.batch import FloatArray, IntArray
from furlong.errors import ConfigError, DataError


def algorithm(settings: Settings) -> Algorithm:
    """The row of `--advantage-estimator`. Raises ConfigError for a name that has none."""
    return find_algorithm(settings.advantage_estimator)


@dataclass(frozen=True)
class Needs:
    """Log-probs that have to be computed before the first optimizer step of a rollout."""

    old_log_probs: bool
    ref_log_probs: bool


def needs(settings: Settings, num_steps_per_rollout: int, *, own_advantages: bool = False) -> Needs:
    """Say which extra forward passes this setup needs.

    With one optimizer step a rollout the old policy is the live one, whose log-probs the loss has anyway; the ratio is
    then exactly 1. With --use-rollout-logprobs the engine's log-probs are the old ones. With `own_advantages` a
    function of the user makes advantages: where --kl-coef is given it gets what the KL is made of, whatever the
    algorithm.
    """
    reward_kl = (own_advantages or algorithm(settings).kl_in_reward) and settings.kl_coef != 0
    return Needs(
        old_log_probs=not settings.use_rollout_logprobs and (num_steps_per_rollout > 1 or reward_kl),
        ref_log_probs=settings.use_kl_loss or reward_kl,
    )


@dataclass(frozen=True)
class Denominator:
    """How token losses are averaged: arguments of `reduce.loss_weights`."""

    mode: Aggregation
    constant_len: int | None = None


def denominator(settings: Settings, *, max_response_len: int | None = None) -> Denominator:
    """Pick the aggregation: the algorithm's own, else --loss-constant-len, --calculate-per-token-loss, else rollout.

    An algorithm that needs a constant and got none uses `max_response_len`, as the Dr. GRPO paper does.
    """
    mode = algorithm(settings).aggregation
    if mode is None:
        mode = "constant" if settings.loss_constant_len else "token" if settings.calculate_per_token_loss else "rollout"
    if mode != "constant":
        return Denominator(mode)
    constant_len = settings.loss_constant_len or max_response_len
    if constant_len is None:
        raise ConfigError(f"{settings.advantage_estimator} divides by a constant; give --loss-constant-len")
    return Denominator(mode, constant_len)


def clip_bounds(settings: Settings) -> tuple[float, float]:
    """Lower and upper clip distance from 1."""
    high = settings.eps_clip_high
    if high is None:
        high = algorithm(settings).eps_clip_high
    return settings.eps_clip, settings.eps_clip if high is None else high


def training_rewards(
    settings: Settings,
    raw_rewards_N: NDArray[np.floating],
    *,
    group_ids_N: IntArray,
    rollout_ids_N: IntArray,
    response_lengths_N: IntArray,
    max_response_len: int,
) -> FloatArray:
    """Shape and normalize the rewards of a rollout: over-long penalty, then group baseline. Returns [N] float32."""
    rewards = np.asarray(raw_rewards_N, dtype=np.float64)
    if settings.overlong_buffer_len is not None:
        rewards = rewards + overlong_penalty(
            response_lengths_N,
            max_len=max_response_len,
            buffer_len=settings.overlong_buffer_len,
            factor=settings.overlong_penalty_factor,
        )
    how = algorithm(settings).baseline if settings.rewards_normalization else "none"
    if how == "group_mean_std" and not settings.grpo_std_normalization:
        how = "group_mean"
    return normalize_rewards(rewards, group_ids_N, how=how, rollout_ids_N=rollout_ids_N)


def token_advantages(
    settings: Settings,
    *,
    rewards_S: Tensor,
    mask_R: Tensor,
    seq_of_R: Tensor,
    old_log_probs_R: Tensor | None = None,
    ref_log_probs_R: Tensor | None = None,
    reduce: Reduce = identity,
) -> Tensor:
    """Advantage of each response token of S whole responses laid end to end, [R].

    `reduce` sums over the ranks that hold the rest of the rollout; only --normalize-advantages calls it, twice, on
    every rank. `old_log_probs_R` (the trainer's, or the engine's with --use-rollout-logprobs) and `ref_log_probs_R`
    are read if the algorithm takes KL into the reward. Raises DataError if they are then missing.
    """
    row = algorithm(settings)
    kl_R = None
    if row.kl_in_reward and settings.kl_coef != 0:
        if old_log_probs_R is None or ref_log_probs_R is None:
            raise DataError(
                f"--kl-coef {settings.kl_coef} puts KL into the reward; that takes old and reference log-probs, got "
                f"old: {old_log_probs_R is not None}, reference: {ref_log_probs_R is not None}"
            )
        kl_R = kl_estimate(old_log_probs_R, ref_log_probs_R, settings.kl_loss_type)
    inputs = AdvantageInputs(rewards_S, mask_R, seq_of_R, kl_R, settings.kl_coef, settings.gamma)
    advantages_R = ADVANTAGES[row.advantages](inputs)
    return whiten(advantages_R, mask_R, reduce=reduce) if settings.normalize_advantages else advantages_R
