"""Rewards to token advantages.

N samples, R response tokens, S sequences. `normalize_rewards` runs once over a whole rollout (numpy). Token advantages
(torch) can be computed for any subset of whole sequences: only `whiten` mixes sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.algo.log_ratio import kl_estimate
from furlong.config.sections import AlgoFlags, OpdFlags
from furlong.core.algorithms import Baseline, find_algorithm
from furlong.core.batch import FloatArray, IntArray
from furlong.errors import ConfigError, DataError

Reduce = Callable[[Tensor], Tensor]


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor: this process has the whole batch."""
    return tensor


def normalize_rewards(
    rewards_N: NDArray[np.floating],
    group_ids_N: IntArray,
    *,
    baseline: Baseline,
    eps: float = 1e-6,
    rollout_ids_N: IntArray | None = None,
) -> FloatArray:
    """Subtract each prompt group's baseline from its rewards, [N] float32. Groups may have any size and order.

    "group_mean_std": (r - mean) / (unbiased std + eps), GRPO (arXiv:2402.03300 sec. 4.1.2); "group_mean": r - mean,
    Dr. GRPO (arXiv:2503.20783 eq. 2); "leave_one_out": r - mean of the others, RLOO (arXiv:2402.14740 eq. 8); "none".
    Samples with equal `rollout_ids_N` are parts of one completion and count once in mean, std and group size. A group
    with equal rewards gets exact zeros, and so does a group with one completion, which has no baseline. Raises
    DataError for a non-finite reward.

    >>> normalize_rewards(np.array([1.0, 0.0, 5.0]), np.array([7, 7, 3]), baseline="group_mean").tolist()
    [0.5, -0.5, 0.0]
    """
    rewards = np.asarray(rewards_N, dtype=np.float64)
    if (bad := np.flatnonzero(~np.isfinite(rewards))).size:
        raise DataError(
            f"{bad.size} of {rewards.size} rewards are not finite, first {rewards[bad[0]]} at row {int(bad[0])}. "
            "Report a failed reward call as an outcome and drop the sample before normalization"
        )
    if baseline == "none" or not rewards.size:
        return rewards.astype(np.float32)
    group, weight, num_rollouts, siblings = _group_layout(group_ids_N, rollout_ids_N)
    mean = np.bincount(group, weight * rewards) / num_rollouts
    centered = rewards - mean[group]
    order = np.argsort(group, kind="stable")
    first = np.searchsorted(group[order], np.arange(len(num_rollouts)))
    is_flat = np.minimum.reduceat(rewards[order], first) == np.maximum.reduceat(rewards[order], first)
    has_baseline = (num_rollouts > 1) & ~is_flat
    others = np.maximum(num_rollouts - 1.0, 1.0)
    match baseline:
        case "group_mean":
            advantage = centered
        case "group_mean_std":
            std = np.sqrt(np.bincount(group, weight * centered**2) / others)
            advantage = centered / np.where(has_baseline, std + eps, 1.0)[group]
        case "leave_one_out":
            completion = np.bincount(siblings, weight * rewards)[siblings]
            advantage = rewards - ((mean * num_rollouts)[group] - completion) / others[group]
    return np.where(has_baseline[group], advantage, 0.0).astype(np.float32)


def _group_layout(
    group_ids_N: IntArray, rollout_ids_N: IntArray | None
) -> tuple[IntArray, NDArray[np.float64], NDArray[np.float64], IntArray]:
    """Return dense group index [N], sample weight [N], completions per group [G] and dense completion index [N]."""
    group = np.unique(group_ids_N, return_inverse=True)[1].reshape(-1)
    rollout = np.arange(len(group)) if rollout_ids_N is None else np.unique(rollout_ids_N, return_inverse=True)[1]
    # A completion is a (group, rollout id) pair: ids need to be unique within a group only.
    siblings = np.unique(group * (int(rollout.max()) + 1) + rollout, return_inverse=True)[1].reshape(-1)
    weight = 1.0 / np.bincount(siblings)[siblings]
    return group, weight, np.rint(np.bincount(group, weight)), siblings


def overlong_penalty(lengths_N: IntArray, *, max_len: int, buffer_len: int, factor: float = 1.0) -> FloatArray:
    """Return the soft over-long penalty to add to the reward, [N] in [-factor, 0] (DAPO, arXiv:2503.14476 eq. 13).

    0 up to max_len - buffer_len response tokens, then linear to -factor at max_len, and -factor beyond.
    """
    if not 0 < buffer_len <= max_len:
        raise ConfigError(f"--overlong-buffer-len is {buffer_len}; it must be in 1..{max_len}, the response limit")
    excess = np.asarray(lengths_N, dtype=np.float64) - (max_len - buffer_len)
    return (-factor * np.clip(excess / buffer_len, 0.0, 1.0)).astype(np.float32)


@dataclass(frozen=True)
class AdvantageInputs:
    """Concatenated whole responses with their rewards.

    rewards_S: after group normalization; mask_R: float; seq_of_R: non-decreasing sequence index; kl_R: KL estimate of
    each token against the reference, None if the KL coefficient is 0. values_R: the critic's prediction before each
    token, None without a critic; lambd: of the generalized advantage estimate, or one per token of each sequence [S].
    by_turn: gamma and a single lambd count once per turn, a run of unmasked tokens. turn_rewards_R: rewards of turns,
    which are added to those of the samples.
    """

    rewards_S: Tensor
    mask_R: Tensor
    seq_of_R: Tensor
    kl_R: Tensor | None
    kl_coef: float
    gamma: float
    values_R: Tensor | None = None
    lambd: float | Tensor = 1.0
    by_turn: bool = False
    turn_rewards_R: Tensor | None = None

    @property
    def kl_penalty(self) -> Tensor:
        """kl_coef * KL of unmasked tokens, 0 elsewhere, [R]."""
        if self.kl_R is None:
            return torch.zeros_like(self.mask_R)
        return torch.where(self.mask_R > 0, self.kl_coef * self.kl_R, 0.0)


def constant_advantages(inputs: AdvantageInputs) -> Tensor:
    """Return the sample's normalized reward for every token, [R] (GRPO, Dr. GRPO, DAPO, GSPO, CISPO)."""
    return inputs.rewards_S[inputs.seq_of_R]


def penalized_advantages(inputs: AdvantageInputs) -> Tensor:
    """Return the sample's reward minus the token's KL penalty, [R] (REINFORCE++-baseline, as in slime).

    The paper (arXiv:2501.03262 sec. 3.3) puts KL in the loss instead: --use-kl-loss --kl-loss-type k2.
    """
    return inputs.rewards_S[inputs.seq_of_R] - inputs.kl_penalty


def return_advantages(inputs: AdvantageInputs) -> Tensor:
    """Return A_t = sum over s >= t of gamma^(s-t) r_s, [R] (REINFORCE++, arXiv:2501.03262 eq. 5-6).

    r_s is that of `token_rewards`. Masked tokens (tool output) are discounted over, unless gamma counts once per turn.
    """
    gamma: float | Tensor = inputs.gamma
    if inputs.by_turn:
        gamma = _once_per_turn(inputs.gamma, (inputs.mask_R > 0) & (inputs.mask_R.roll(-1) == 0))
    return discounted_returns(token_rewards(inputs), inputs.seq_of_R, gamma=gamma)


def gae_advantages(inputs: AdvantageInputs) -> Tensor:
    """Return the generalized advantage estimate, [R] (arXiv:1506.02438 eq. 16); masked tokens are 0.

    A_t = sum over s >= t of (gamma lambda)^(s-t) delta_s, delta_t = r_t + gamma V_{t+1} - V_t, over the trained tokens
    of a sample only: masked tokens (tool output) are neither steps nor discounted over. By turn, gamma and lambda are 1
    between the tokens of a turn, so that a turn is one step. r_t is that of `token_rewards`, and the value after the
    last trained token is 0, also for a truncated response. Raises DataError without values.
    """
    if inputs.values_R is None:
        raise DataError("generalized advantage estimation needs the critic's values; got none")
    kept_K = torch.nonzero(inputs.mask_R > 0).squeeze(1)
    seq_of_K, values_K = inputs.seq_of_R[kept_K], inputs.values_R[kept_K].double()
    next_K = torch.zeros_like(values_K)
    next_K[:-1] = torch.where(seq_of_K[1:] == seq_of_K[:-1], values_K[1:], 0.0)
    gamma: float | Tensor = inputs.gamma
    lambd = inputs.lambd[seq_of_K] if isinstance(inputs.lambd, Tensor) else inputs.lambd
    if inputs.by_turn:
        is_last_K = kept_K.roll(-1) - kept_K != 1
        gamma = _once_per_turn(inputs.gamma, is_last_K)
        lambd = lambd if isinstance(lambd, Tensor) else _once_per_turn(lambd, is_last_K)
    delta_K = token_rewards(inputs)[kept_K].double() + gamma * next_K - values_K
    advantages_R = torch.zeros_like(inputs.values_R)
    summed_K = discounted_returns(delta_K, seq_of_K, gamma=gamma * lambd)
    advantages_R[kept_K] = summed_K.to(advantages_R.dtype)
    return advantages_R


def _once_per_turn(value: float, is_last_R: Tensor) -> Tensor:
    return torch.ones(len(is_last_R), dtype=torch.float64, device=is_last_R.device).masked_fill(is_last_R, value)


def length_lambdas(inputs: AdvantageInputs, alpha: float) -> Tensor:
    """Return 1 - 1 / (alpha l) for each sample of l trained tokens, at least 0, [S] (VAPO, arXiv:2504.05118 eq. 7)."""
    lengths_S = torch.zeros(len(inputs.rewards_S), dtype=torch.float64, device=inputs.mask_R.device)
    lengths_S.index_add_(0, inputs.seq_of_R, (inputs.mask_R > 0).double())
    return (1 - 1 / (alpha * lengths_S.clamp_min(1))).clamp_min(0)


def token_rewards(inputs: AdvantageInputs) -> Tensor:
    """Return the reward of each token, [R]: its negative KL penalty, plus the sample's at its last unmasked token.

    `turn_rewards_R` are added. Masked tokens have none. A response without an unmasked token has rewards of 0.
    """
    num_sequences = len(inputs.rewards_S)
    position_R = torch.arange(len(inputs.mask_R), device=inputs.mask_R.device)
    last_S = torch.full((num_sequences,), -1, device=position_R.device, dtype=position_R.dtype)
    last_S.scatter_reduce_(0, inputs.seq_of_R, torch.where(inputs.mask_R > 0, position_R, -1), "amax")
    has_token_S = last_S >= 0
    token_rewards_R = -inputs.kl_penalty if inputs.turn_rewards_R is None else inputs.turn_rewards_R - inputs.kl_penalty
    token_rewards_R[last_S[has_token_S]] += inputs.rewards_S[has_token_S]
    return token_rewards_R


ADVANTAGES: Mapping[str, Callable[[AdvantageInputs], Tensor]] = {
    "constant": constant_advantages,
    "penalized": penalized_advantages,
    "return": return_advantages,
    "gae": gae_advantages,
}


def discounted_returns(rewards_R: Tensor, seq_of_R: Tensor, *, gamma: float | Tensor) -> Tensor:
    """Return the discounted sum of rewards from each token to the end of its sequence, [R].

    `gamma` is one number, or one for each token [R]: the discount of what follows it.

    Segmented suffix scan by doubling: after k rounds each token has the sum of the next 2^k tokens of its sequence, so
    it takes log2(longest response) vector operations. Accumulates in float64.
    """
    total_R = rewards_R.double()
    if not len(total_R):
        return rewards_R.clone()
    longest = int(torch.bincount(seq_of_R).max())
    reach = 1
    factor_R = gamma.double() if isinstance(gamma, Tensor) else None  # products of the next `reach` discounts
    while reach < longest:
        same_R = seq_of_R[reach:] == seq_of_R[:-reach]
        factor = gamma**reach if factor_R is None else factor_R[:-reach]
        step_R = torch.where(same_R, total_R[reach:], 0.0) * factor
        total_R = torch.cat([total_R[:-reach] + step_R, total_R[-reach:]])
        if factor_R is not None:
            factor_R = torch.cat([factor_R[:-reach] * factor_R[reach:], factor_R[-reach:]])
        reach *= 2
    return total_R.to(rewards_R.dtype)


def whiten(advantages_R: Tensor, mask_R: Tensor, *, reduce: Reduce = identity) -> Tensor:
    """Normalize to mean 0 and variance 1 over all unmasked tokens, [R]; masked tokens become 0.

    The variance is unbiased; `reduce` sums over all ranks with a part of the batch. A single unmasked token becomes 0.
    """
    values_R = torch.where(mask_R > 0, advantages_R, 0.0).double()
    weight_R = (mask_R > 0).double()
    total, count = reduce(torch.stack([values_R.sum(), weight_R.sum()])).unbind()
    centered_R = (values_R - total / count.clamp(min=1)) * weight_R
    variance = reduce(centered_R.square().sum()) / (count - 1).clamp(min=1)
    return (centered_R * torch.rsqrt(variance + 1e-8)).to(advantages_R.dtype)


def distilled(advantages_R: Tensor, opd: OpdFlags, kl_R: Tensor | None) -> Tensor:
    """Return opd_task_reward_coef * advantages - opd_kl_coef * `kl_R`, before whitening as in slime.

    kl_R: log p - log q of the sampled tokens, for --opd-loss sampled.
    """
    if not opd.use_opd:
        return advantages_R
    scaled_R = opd.opd_task_reward_coef * advantages_R
    return scaled_R if kl_R is None else scaled_R - opd.opd_kl_coef * kl_R


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
    baseline = find_algorithm(flags.advantage_estimator).baseline if flags.rewards_normalization else "none"
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
    values_R: Tensor | None = None,
    turn_rewards_R: Tensor | None = None,
    opd: OpdFlags | None = None,
    opd_kl_R: Tensor | None = None,
    reduce: Reduce = identity,
) -> tuple[Tensor, Tensor]:
    """Return advantage and return of each response token of S concatenated responses, [R] each.

    The return is what the critic learns to predict: the advantage at the critic's lambda, before whitening, plus the
    value; 0 at masked tokens. Without a critic's `values_R` it is the advantage. `reduce` sums over the ranks with the
    rest of the rollout; only --normalize-advantages calls it, twice, on every rank. `old_log_probs_R` (the trainer's,
    or the engine's with --use-rollout-logprobs) and `ref_log_probs_R` are read if the algorithm has KL in the reward.
    Raises DataError if they are missing then. `opd`, `opd_kl_R`: see `distilled`; they change no return.
    """
    row = find_algorithm(flags.advantage_estimator)
    kl_R = None
    if row.kl_in_reward and flags.kl_coef != 0:
        if old_log_probs_R is None or ref_log_probs_R is None:
            raise DataError(
                f"--kl-coef {flags.kl_coef} puts KL into the reward, which needs old and reference log-probs; got "
                f"old: {old_log_probs_R is not None}, reference: {ref_log_probs_R is not None}"
            )
        kl_R = kl_estimate(old_log_probs_R, ref_log_probs_R, flags.kl_loss_type)
    inputs = AdvantageInputs(rewards_S, mask_R, seq_of_R, kl_R, flags.kl_coef, flags.gamma, values_R, flags.lambd)
    if flags.return_level == "turn":
        inputs = replace(inputs, by_turn=True, turn_rewards_R=turn_rewards_R)
    estimate = ADVANTAGES[row.advantages]
    adaptive = flags.lambd_length_alpha
    raw_R = estimate(replace(inputs, lambd=length_lambdas(inputs, adaptive)) if adaptive else inputs)
    distilled_R = distilled(raw_R, opd or OpdFlags(), opd_kl_R)
    advantages_R = whiten(distilled_R, mask_R, reduce=reduce) if flags.normalize_advantages else distilled_R
    if values_R is None:
        return advantages_R, advantages_R
    critic_lambd = flags.lambd if flags.critic_lambd is None else flags.critic_lambd
    targets_R = estimate(replace(inputs, lambd=critic_lambd))
    return advantages_R, torch.where(mask_R > 0, targets_R + values_R, 0.0)
