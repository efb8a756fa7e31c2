from __future__ import annotations

import numpy as np
import pytest
import torch

from furlong.algo.advantage import ADVANTAGES, token_advantages, training_rewards
from furlong.algo.passes import needed_passes
from furlong.algo.policy_loss import POLICY_LOSSES, PolicyLoss
from furlong.algo.reduce import denominator
from furlong.core.algorithms import ALGORITHMS
from furlong.errors import ConfigError, DataError
from oracles.cases import flags


@pytest.mark.parametrize(
    ("values", "num_steps", "want"),
    [
        ({}, 1, []),
        ({}, 2, ["old_log_probs"]),
        ({"use_tis": True}, 1, []),
        ({"use_rollout_logprobs": True}, 4, []),
        ({"use_kl_loss": True}, 1, ["ref_log_probs"]),
        ({"kl_coef": 0.1}, 1, []),  # grpo has no KL in its reward
        ({"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1}, 1, ["ref_log_probs", "old_log_probs"]),
        ({"advantage_estimator": "reinforce_plus_plus"}, 1, []),
        (
            {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "use_rollout_logprobs": True},
            1,
            ["ref_log_probs"],
        ),
        ({"use_rollout_entropy": True, "use_rollout_logprobs": True}, 2, ["old_log_probs"]),
    ],
)
def test_only_log_probs_that_are_read_are_computed(values, num_steps, want):
    passes = needed_passes(flags(values.pop("advantage_estimator", "grpo"), **values), num_steps)
    assert [each.column for each in passes] == want


def test_custom_advantages_get_both_log_probs_with_kl_coef():
    passes = needed_passes(flags("grpo", kl_coef=0.1), 1, custom_advantages=True)
    assert [each.column for each in passes] == ["ref_log_probs", "old_log_probs"]
    assert needed_passes(flags("grpo"), 1, custom_advantages=True) == ()


@pytest.mark.parametrize(
    ("name", "values", "want"),
    [
        ("grpo", {}, ("rollout", None)),
        ("grpo", {"calculate_per_token_loss": True}, ("token", None)),
        ("grpo", {"loss_constant_len": 7}, ("constant", 7)),
        ("dapo", {}, ("token", None)),
        ("dr_grpo", {}, ("constant", 512)),
        ("dr_grpo", {"loss_constant_len": 7}, ("constant", 7)),
    ],
)
def test_denominator_is_the_algorithms_then_the_flags(name, values, want):
    assert denominator(flags(name, **values), max_response_len=512) == want


def test_constant_denominator_without_a_constant_is_refused():
    with pytest.raises(ConfigError, match="--loss-constant-len"):
        denominator(flags("dr_grpo"))


def test_upper_clip_bound_defaults_to_the_algorithms_then_to_the_lower():
    def clip_bounds(name, **values):
        loss = PolicyLoss(flags(name, **values))
        return loss.eps_low, loss.eps_high

    assert clip_bounds("grpo", eps_clip=0.1) == (0.1, 0.1)
    assert clip_bounds("dapo") == (0.2, 0.28)
    assert clip_bounds("dapo", eps_clip_high=0.3) == (0.2, 0.3)


def test_every_row_names_existing_functions_and_each_function_has_a_row():
    rows = ALGORITHMS.values()
    assert {row.advantages for row in rows} == set(ADVANTAGES)
    assert {row.policy for row in rows} == set(POLICY_LOSSES)


def _rewards(settings, **values):
    arguments = {
        "group_ids_N": np.array([0, 0, 1, 1]),
        "rollout_ids_N": np.arange(4),
        "response_lengths_N": np.array([4, 10, 4, 4]),
        "max_response_len": 10,
    }
    return training_rewards(settings, np.array([1.0, 1.0, 0.0, 1.0]), **(arguments | values))


def test_overlong_penalty_comes_before_the_group_baseline():
    have = _rewards(flags("grpo", grpo_std_normalization=False, overlong_buffer_len=4, overlong_penalty_factor=0.5))
    assert have.tolist() == [0.25, -0.25, -0.5, 0.5]


def test_disabled_normalization_leaves_rewards():
    assert _rewards(flags("grpo", rewards_normalization=False)).tolist() == [1.0, 1.0, 0.0, 1.0]


def test_samples_of_one_completion_share_a_rollout_id_in_the_baseline():
    have = _rewards(flags("dr_grpo"), rollout_ids_N=np.array([0, 0, 2, 3]), group_ids_N=np.zeros(4, np.int64))
    np.testing.assert_allclose(have, [1 / 3, 1 / 3, -2 / 3, 1 / 3], rtol=1e-6)


def test_kl_in_the_reward_without_its_log_probs_is_refused():
    settings = flags("reinforce_plus_plus", kl_coef=0.1)
    with pytest.raises(DataError, match=r"--kl-coef 0\.1 .*old: True, reference: False"):
        token_advantages(
            settings,
            rewards_S=torch.ones(1),
            mask_R=torch.ones(2),
            seq_of_R=torch.zeros(2, dtype=torch.int64),
            old_log_probs_R=torch.zeros(2),
        )
