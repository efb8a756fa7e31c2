"""Intervals over problems and seeds, against the plain Wilson interval and simulations."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest

from furlong.evals.eval_summary import Estimate, wilson
from furlong.reproduce.published import accuracy_interval, gap

RIGHT = [1] * 30 + [0] * 70


def test_one_seed_has_the_wilson_interval_of_its_problems():
    assert astuple(accuracy_interval([RIGHT])) == pytest.approx(astuple(wilson(0.3, 100)))


def test_seeds_that_repeat_the_same_answers_do_not_narrow_the_interval():
    assert astuple(accuracy_interval([RIGHT] * 3)) == pytest.approx(astuple(wilson(0.3, 100)))


def test_seeds_that_disagree_widen_the_interval():
    same, other = accuracy_interval([RIGHT, RIGHT]), accuracy_interval([[1] * 10 + [0] * 90, [1] * 50 + [0] * 50])
    assert other.value == same.value
    assert other.high - other.low > 1.5 * (same.high - same.low)


def test_all_right_keeps_a_width():
    estimate = accuracy_interval([[1] * 20] * 3)
    assert 0.8 < estimate.low < estimate.high == pytest.approx(1.0)


def test_the_interval_covers_the_true_accuracy_in_at_least_nineteen_of_twenty_simulations():
    rng, covered, runs = random.Random(0), 0, 400
    for _ in range(runs):
        chances = [rng.betavariate(2, 2) for _ in range(60)]  # accuracy 0.5 over all problems
        right = [[int(rng.random() < chance) for chance in chances] for _ in range(3)]
        estimate = accuracy_interval(right)
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.95 <= covered / runs < 1.0


def test_seeds_without_the_same_problems_are_refused():
    for right in [[], [[]], [[1, 0], [1]]]:
        with pytest.raises(ValueError, match="same problems"):
            accuracy_interval(right)


@pytest.mark.parametrize(
    ("measured", "missed"),
    [((0.7, 0.6, 0.8), 0.0), ((0.3, 0.2, 0.4), -0.1), ((0.9, 0.85, 0.95), 0.15), ((0.4, 0.3, 0.5), 0.0)],
)
def test_gap_is_the_distance_between_intervals(measured, missed):
    assert gap(Estimate(*measured), Estimate(0.6, 0.5, 0.7)) == pytest.approx(missed)
