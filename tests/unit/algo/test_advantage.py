from __future__ import annotations

import numpy as np
import pytest
import torch

from furlong.algo.advantage import (
    AdvantageInputs,
    discounted_returns,
    normalize_rewards,
    overlong_penalty,
    return_advantages,
    whiten,
)
from furlong.errors import ConfigError, DataError

REWARDS = np.array([1.0, 0.0, 0.5, 2.0, -1.0, 0.25, 3.0])
GROUPS = np.array([5, 9, 5, 9, 5, 9, 9])


@pytest.mark.parametrize("how", ["group_mean_std", "group_mean", "leave_one_out"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 1e6 / 3])
def test_group_with_equal_rewards_gets_exact_zeros(how, reward):
    have = normalize_rewards(np.array([reward] * 7 + [1.0, 2.0]), np.array([1] * 7 + [2, 2]), baseline=how)
    assert have[:7].tolist() == [0.0] * 7
    assert have[7] != 0.0


@pytest.mark.parametrize("how", ["group_mean_std", "group_mean", "leave_one_out"])
def test_single_sample_has_no_baseline_and_gets_zero(how):
    groups = np.array([0, 1, 1, 2])
    assert normalize_rewards(np.array([5.0, 1.0, 0.0, -2.0]), groups, baseline=how)[[0, 3]].tolist() == [0.0, 0.0]


def test_baseline_none_leaves_rewards_unchanged():
    assert normalize_rewards(REWARDS, GROUPS, baseline="none").tolist() == REWARDS.astype(np.float32).tolist()


@pytest.mark.parametrize("how", ["group_mean_std", "group_mean", "leave_one_out"])
def test_fanned_out_completion_counts_once_in_its_group(how):
    plain = normalize_rewards(np.array([1.0, 0.0, 0.3]), np.zeros(3, np.int64), baseline=how)
    fanned = normalize_rewards(
        np.array([1.0, 1.0, 1.0, 0.0, 0.3]),
        np.zeros(5, np.int64),
        baseline=how,
        rollout_ids_N=np.array([4, 4, 4, 8, 6]),
    )
    np.testing.assert_allclose(fanned, plain[[0, 0, 0, 1, 2]], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_reward_is_an_error_with_its_row(bad):
    with pytest.raises(DataError, match="at row 2"):
        normalize_rewards(np.array([1.0, 0.0, bad]), np.zeros(3, np.int64), baseline="group_mean")


def test_overlong_penalty_is_zero_then_linear_then_full():
    have = overlong_penalty(np.array([0, 12, 14, 16, 20]), max_len=16, buffer_len=4, factor=2.0)
    assert have.tolist() == [0.0, 0.0, -1.0, -2.0, -2.0]
    with pytest.raises(ConfigError, match="--overlong-buffer-len is 20"):
        overlong_penalty(np.array([1]), max_len=16, buffer_len=20)


def test_segment_scan_over_nothing_is_nothing():
    assert discounted_returns(torch.zeros(0), torch.zeros(0, dtype=torch.int64), gamma=0.9).shape == (0,)


def test_return_puts_the_reward_on_the_last_unmasked_token():
    inputs = AdvantageInputs(
        rewards_S=torch.tensor([2.0, 1.0]),
        mask_R=torch.tensor([1.0, 1, 0, 0, 1, 1]),
        seq_of_R=torch.tensor([0, 0, 0, 0, 1, 1]),
        kl_R=torch.tensor([0.5, 1.0, 7.0, torch.nan, 0.0, 1.0]),
        kl_coef=0.1,
        gamma=0.5,
    )
    expected = [0.5 * (2 - 0.1) - 0.05, 2 - 0.1, 0, 0, 0.5 * (1 - 0.1), 1 - 0.1]
    torch.testing.assert_close(return_advantages(inputs), torch.tensor(expected))


def test_return_of_a_fully_masked_response_is_zero():
    inputs = AdvantageInputs(
        rewards_S=torch.tensor([2.0, torch.nan, 1.0]),
        mask_R=torch.tensor([1.0, 0, 0, 1]),
        seq_of_R=torch.tensor([0, 1, 1, 2]),
        kl_R=torch.tensor([0.0, 3.0, torch.nan, 1.0]),
        kl_coef=0.1,
        gamma=1.0,
    )
    torch.testing.assert_close(return_advantages(inputs), torch.tensor([2.0, 0.0, 0.0, 0.9]))


def test_whitened_advantages_have_mean_zero_and_unbiased_variance_one_over_unmasked_tokens():
    values, mask = torch.randn(200, dtype=torch.float64) * 3 + 5, (torch.rand(200) > 0.3).double()
    values[mask == 0] = torch.nan
    have = whiten(values, mask)
    assert have[mask == 0].abs().sum() == 0
    kept = have[mask > 0]
    assert kept.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert kept.var().item() == pytest.approx(1.0, abs=1e-6)


def test_whitening_two_ranks_equals_whitening_the_whole():
    values, mask = torch.randn(50, dtype=torch.float64) + 2, torch.ones(50, dtype=torch.float64)
    whole = whiten(values, mask)
    first, second = values[:20], values[20:]
    mean = values.mean()
    other = iter([torch.stack([second.sum(), torch.tensor(30.0)]), (second - mean).square().sum()])
    torch.testing.assert_close(whiten(first, mask[:20], reduce=lambda x: x + next(other)), whole[:20])


@pytest.mark.parametrize("mask", [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], []])
def test_whitening_fewer_than_two_tokens_leaves_nothing_to_learn(mask):
    values = torch.full((len(mask),), 7.0)
    assert whiten(values, torch.tensor(mask)).tolist() == [0.0] * len(mask)


def test_a_rank_without_tokens_whitens_as_the_others_do():
    def of_all(part):
        return part + torch.tensor([3.0, 2.0]) if part.dim() else part + 0.5

    assert whiten(torch.ones(2), torch.zeros(2), reduce=of_all).tolist() == [0.0, 0.0]
