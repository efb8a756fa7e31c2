"""What the flags say about algorithms agrees with the algorithms themselves."""

from __future__ import annotations

import itertools
import typing

import pytest

from furlong.algo.registry import ALGORITHMS, problems
from furlong.config.flags import config_from_values, parse
from furlong.config.paths import RM_TYPES
from furlong.config.sections.algorithm import AdvantageEstimator
from furlong.config.validate_algorithm import GROUP_BASELINE, KL_REWARD_IGNORED, REINFORCE_PLUS_PLUS, algorithm_problems
from furlong.rewards.registry import REWARDS

ESTIMATORS = typing.get_args(AdvantageEstimator)


def test_every_algorithm_is_a_choice() -> None:
    assert set(ESTIMATORS) == set(ALGORITHMS)


def test_every_verifier_is_known() -> None:
    assert set(RM_TYPES) == set(REWARDS)


def test_the_rules_name_the_algorithms_that_they_are_about() -> None:
    assert set(GROUP_BASELINE) == {name for name, row in ALGORITHMS.items() if row.baseline != "none"}
    assert set(KL_REWARD_IGNORED) == {name for name, row in ALGORITHMS.items() if not row.kl_in_reward}
    assert set(REINFORCE_PLUS_PLUS) == {name for name, row in ALGORITHMS.items() if row.whitened}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_derived_upper_clip_is_the_algorithms(name: str) -> None:
    assert parse(["--advantage-estimator", name]).config.algo.eps_clip_high == (ALGORITHMS[name].eps_clip_high or 0.2)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_an_algorithm_refuses_the_flags_refuse(name: str) -> None:
    choices = {
        "kl_coef": (0.0, 0.1),
        "gamma": (1.0, 0.9),
        "normalize_advantages": (False, True),
        "eps_clip_c": (None, 3.0),
        "loss_constant_len": (None, 9),
        "calculate_per_token_loss": (False, True),
        "n_samples_per_prompt": (1, 4),
        "rewards_normalization": (False, True),
    }
    for values in itertools.product(*choices.values()):
        config = config_from_values(dict(zip(choices, values, strict=True)) | {"advantage_estimator": name})
        if problems(config.algo, n_samples_per_prompt=config.data.n_samples_per_prompt):
            assert list(algorithm_problems(config))
