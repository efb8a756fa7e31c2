from __future__ import annotations

import numpy as np
import pytest
import torch

from furlong.algo.reduce import loss_weights, sequence_mean, step_mean
from furlong.core.metric import mean, total
from furlong.errors import DataError
from oracles.cases import random_batch


def _slow_weights(batch, steps, mode, constant_len):
    starts, out = batch.response_starts, np.zeros(len(batch.loss_masks))
    for rows in steps:
        ids = sorted({int(batch.rollout_ids[r]) for r in rows})
        step_mask = sum(int(batch.loss_masks[starts[r] : starts[r + 1]].sum()) for r in rows)
        for r in rows:
            siblings = [q for q in rows if batch.rollout_ids[q] == batch.rollout_ids[r]]
            own = sum(int(batch.loss_masks[starts[q] : starts[q + 1]].sum()) for q in siblings)
            scale = {
                "rollout": 1 / (max(1, own) * len(ids)),
                "token": 1 / max(1, step_mask),
                "constant": 1 / ((constant_len or 1) * len(ids)),
            }[mode]
            for t in range(starts[r], starts[r + 1]):
                out[t] = scale * batch.loss_masks[t]
    return out


@pytest.mark.parametrize("mode", ["rollout", "token", "constant"])
@pytest.mark.parametrize("fan_out", [False, True])
def test_weights_equal_the_slow_loop_over_steps_rollouts_and_tokens(mode, fan_out):
    batch = random_batch(3, fan_out=fan_out)
    steps = [np.array([4, 0, 1, 7]), np.array([2, 3, 5, 6, 8])]
    have = loss_weights(batch, steps, mode=mode, constant_len=16)
    np.testing.assert_allclose(have, _slow_weights(batch, steps, mode, 16), rtol=1e-6)
    assert have.dtype == np.float32


def test_fully_masked_rollout_counts_in_the_denominator_and_adds_nothing():
    batch = random_batch(5, groups=(2,))
    batch.loss_masks[: batch.response_lengths[0]] = 0
    weights = loss_weights(batch, [np.arange(2)], mode="rollout", constant_len=None)
    assert weights.sum() == pytest.approx(0.5, abs=1e-6)


def test_rows_of_no_step_weigh_nothing():
    batch = random_batch(0)
    weights = loss_weights(batch, [np.array([0, 1])], mode="rollout", constant_len=None)
    assert weights[batch.response_starts[2] :].sum() == 0


def test_sample_in_two_steps_is_refused():
    with pytest.raises(DataError, match="step 1 repeats a sample"):
        loss_weights(random_batch(0), [np.array([0, 1]), np.array([1])], mode="token", constant_len=None)
    with pytest.raises(DataError, match="step 0 repeats a sample"):
        loss_weights(random_batch(0), [np.array([0, 0])], mode="token", constant_len=None)


def test_rollout_split_over_steps_is_refused():
    with pytest.raises(DataError, match="rollout id 100 has samples in steps"):
        loss_weights(random_batch(0, fan_out=True), [np.array([0]), np.array([1])], mode="rollout", constant_len=None)


def test_constant_mode_needs_a_constant():
    with pytest.raises(DataError, match="--loss-constant-len"):
        loss_weights(random_batch(0), [np.arange(9)], mode="constant", constant_len=None)


def test_sequence_mean_skips_masked_values_whatever_they_are():
    values = torch.tensor([1.0, torch.nan, 3.0, torch.inf, 5.0])
    mask, seq = torch.tensor([1.0, 0, 1, 0, 1]), torch.tensor([0, 0, 0, 1, 2])
    assert sequence_mean(values, mask, seq, 4).tolist() == [2.0, 0.0, 5.0, 0.0]


def test_step_mean_averages_sums_and_keeps_the_weights_of_means():
    steps = [{"loss": total(1.0), "kl": mean(1.0, 1)}, {"loss": total(3.0), "kl": mean(4.0, 2)}]
    merged = step_mean(steps)
    assert merged["loss"].value == 2.0
    assert merged["kl"].value == 3.0
