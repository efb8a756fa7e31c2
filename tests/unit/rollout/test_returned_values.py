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


@pytest.mark.parametrize(
    "data",
    [None, 5, "abc", b"ab", float("nan"), [], (1, 2), object(), DataError, (x for x in "a"), {}, {1: 2}, 10**400],
)
def test_a_conversion_returns_a_dict(data):
    with pytest.raises(DataError, match=FLAG):
        convert(SAMPLES, convert=lambda args, samples: data)


@pytest.mark.parametrize("name", ["tokens", "response_lengths", "rewards", "loss_masks", "raw_reward", "rollout_ids",
                                  "sample_indices", "truncated", "mine"])  # fmt: skip
@pytest.mark.parametrize(
    "value",
    [5, "abc", float("nan"), [1], [1, 2, 3], ["a", "b"], [None, None], [[1], [[2]]], {"a": 1}, {"a": 1, "b": 2},
     object(), (x for x in [1, 2]), [10**400, 1], [{}, {}]],
)  # fmt: skip
def test_a_column_of_another_type_is_an_error(name, value):
    if name == "raw_reward" and value == [None, None]:
        value = [None, "a"]  # None alone is "not scored"
    with pytest.raises(DataError, match=FLAG):
        convert(SAMPLES, convert=lambda args, samples: GOOD | {name: value})


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [[1, 2, -3], [4, 5]]}, {"tokens": [[1, 2, 3.5], [4, 5]]}, {"tokens": [[1, 2, 1 << 40], [4, 5]]},
        {"tokens": ["abc", "de"]}, {"response_lengths": [9, 1]}, {"response_lengths": [-1, 1]},
        {"response_lengths": [1.5, 1]}, {"rewards": [float("inf"), 0]}, {"loss_masks": [[2, 1], [1]]},
        {"loss_masks": [[1], [1]]}, {"truncated": [0.5, 1]}, {"mine": [[1.0], [1.0]]},
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_an_error(change):
    with pytest.raises(DataError, match=FLAG):
        convert(SAMPLES, convert=lambda args, samples: GOOD | change)


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


@pytest.mark.parametrize("part", ["ab", ["a", "b"], [[1], [1, 2]], {"a": 1}, object(), [1], [10**400, 1]])
@pytest.mark.parametrize("place", [0, 1])
def test_a_post_processing_returns_numbers(part, place):
    result = [[1.0, 0.0], [1.0, 0.0]]
    result[place] = part
    with pytest.raises(DataError, match="--custom-reward-post-process-path"):
        convert(SAMPLES, post_process=lambda args, samples: result)
