"""Values of other types than those that a custom conversion or post-processing must return."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from furlong.config.hooks import Hooks
from furlong.config.sections import AlgoFlags
from furlong.core.sample import Group, Sample, Status
from furlong.errors import DataError
from furlong.rollout.train_batch import Conversion, batch_from_groups

FLAG = "--custom-convert-samples-to-train-data-path"
GOOD = {"tokens": [[1, 2, 3], [4, 5]], "response_lengths": [2, 1], "rewards": [0.5, -0.5]}
SAMPLES = [
    Sample(
        group_index=0, index=i, rollout_id=i, tokens=[9, 1, 2], response_length=2, reward=float(i),
        rollout_log_probs=[-0.5, -0.5], token_versions=[3, 3], status=Status.COMPLETED,
    )
    for i in range(2)
]  # fmt: skip


def convert(samples, *, convert=None, post_process=None):
    hooks = Hooks(custom_reward_post_process=post_process, custom_convert_samples_to_train_data=convert)
    return batch_from_groups(7, [Group(0, list(samples), 0, 0)], Conversion(algo=AlgoFlags(), hooks=hooks))


def test_another_conversion_is_an_error_that_names_the_flag():
    wrong = [
        None, [], {}, {1: 2}, {"tokens": [[1, 2, -3], [4, 5]]}, {"tokens": [[1, 2, 1 << 40], [4, 5]]},
        {"tokens": ["abc", "de"]}, {"response_lengths": [9, 1]}, {"response_lengths": [1.5, 1]},
        {"rewards": [float("inf"), 0]}, {"rewards": [10**400, 1]}, {"rewards": [1, 2, 3]}, {"raw_reward": "abc"},
        {"loss_masks": [[2, 1], [1]]}, {"loss_masks": [[1], [1]]}, {"loss_masks": (x for x in [1, 2])},
        {"truncated": [0.5, 1]}, {"rollout_ids": [None, None]}, {"sample_indices": object()}, {"mine": [[1.0], [1.0]]},
    ]  # fmt: skip
    for each in wrong:
        data = GOOD | each if isinstance(each, dict) and each and "tokens" in GOOD and 1 not in each else each
        with pytest.raises(DataError, match=FLAG):
            convert(SAMPLES, convert=lambda args, samples, data=data: data)


def test_arrays_and_tensors_are_numbers():
    data = {
        "tokens": [np.array([1, 2, 3]), torch.tensor([4, 5])],
        "response_lengths": torch.tensor([2, 1]),
        "rewards": np.array([0.5, -0.5]),
        "loss_masks": [torch.ones(2), (0,)],
        "mine": [torch.ones(2), [2.0]],
    }
    batch = convert(SAMPLES, convert=lambda args, samples: data)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5]
    assert batch.loss_masks.tolist() == [1, 1, 0]
    assert batch.columns["mine"].tolist() == [1, 1, 2]


def test_a_post_processing_returns_numbers():
    for part in ("ab", ["a", "b"], [[1], [1, 2]], {"a": 1}, object(), [1], [10**400, 1]):
        for result in ([part, [1.0, 0.0]], [[1.0, 0.0], part]):
            with pytest.raises(DataError, match="--custom-reward-post-process-path"):
                convert(SAMPLES, post_process=lambda args, samples, result=result: result)
