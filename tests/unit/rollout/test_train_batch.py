from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from furlong.config.hooks import Hooks
from furlong.config.sections import AlgoFlags, RewardFlags, RolloutFlags
from furlong.core.sample import Group, Outcome, Sample, Status
from furlong.errors import DataError, RolloutError
from furlong.rollout.train_batch import Conversion, batch_from_groups


def sample(index, reward=0.0, *, n=2, group=0, **fields) -> Sample:
    values = {
        "group_index": group,
        "index": index,
        "rollout_id": index,
        "tokens": [9] + [index or 0] * n,
        "response_length": n,
        "reward": reward,
        "rollout_log_probs": [-0.5] * n,
        "token_versions": [3] * n,
        "status": Status.COMPLETED,
    }
    return Sample(**values | fields)


def convert(*groups, algo=None, post_process=None, convert=None, **options):
    packed = [Group(i, list(samples), 0, i) for i, samples in enumerate(groups)]
    hooks = Hooks(custom_reward_post_process=post_process, custom_convert_samples_to_train_data=convert)
    return batch_from_groups(7, packed, Conversion(algo=algo or AlgoFlags(), hooks=hooks, **options))


def test_columns_are_laid_end_to_end_in_the_order_given():
    batch = convert([sample(0, 1.0, n=1), sample(1, 0.0, n=3)], [sample(2, 1.0, group=1), sample(3, 1.0, group=1)])
    assert batch.rollout_id == 7
    assert batch.tokens.tolist() == [9, 0, 9, 1, 1, 1, 9, 2, 2, 9, 3, 3]
    assert batch.response_lengths.tolist() == [1, 3, 2, 2]
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.columns["token_versions"].tolist() == [3] * 8
    assert batch.loss_masks.tolist() == [1] * 8
    assert batch.metadata is None


def test_rewards_are_normalized_by_group_id_and_kept_raw():
    batch = convert([sample(0, 1.0), sample(1, 0.0)], [sample(2, 5.0, group=1), sample(3, 5.0, group=1)])
    assert batch.raw_rewards.tolist() == [1, 0, 5, 5]
    assert batch.rewards[:2] == pytest.approx([0.7071, -0.7071], abs=1e-3)
    assert batch.rewards[2:].tolist() == [0, 0]


def test_failed_sample_is_masked_and_takes_no_part_in_its_group():
    failed = sample(2, None, status=Status.FAILED, rollout_log_probs=None, token_versions=[])
    batch = convert([sample(0, 1.0), sample(1, 0.0), failed])
    assert np.isnan(batch.raw_rewards).tolist() == [False, False, True]
    assert batch.rewards.tolist()[2] == 0
    assert batch.rewards[:2] == pytest.approx([0.7071, -0.7071], abs=1e-3)
    assert batch.loss_masks.tolist() == [1, 1, 1, 1, 0, 0]
    assert batch.columns["rollout_log_probs"].tolist() == [-0.5] * 4 + [0.0] * 2


def test_removed_sample_counts_in_its_group_and_is_masked():
    batch = convert([sample(0, 1.0, remove_sample=True), sample(1, 0.0)])
    assert batch.loss_masks.tolist() == [0, 0, 1, 1]
    assert batch.rewards[1] < 0


def test_truncated_sample_is_marked_and_may_be_masked():
    for mask_truncated, masks in ((False, [1, 1, 1, 1]), (True, [0, 0, 1, 1])):
        batch = convert(
            [sample(0, 1.0, status=Status.TRUNCATED), sample(1)], algo=AlgoFlags(mask_truncated=mask_truncated)
        )
        assert batch.truncated.tolist() == [1, 0]
        assert batch.loss_masks.tolist() == masks


def test_overlong_penalty_counts_from_the_longest_response():
    flags = AlgoFlags(rewards_normalization=False, overlong_buffer_len=2, overlong_penalty_factor=1.0)
    batch = convert(
        [sample(0, 1.0, n=2), sample(1, 1.0, n=4)], algo=flags, rollout=RolloutFlags(rollout_max_response_len=4)
    )
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert batch.raw_rewards.tolist() == [1.0, 1.0]


def test_key_picks_from_a_dict_reward():
    rewards = [{"score": 1.0, "x": 9.0}, {"score": 0.0, "x": 9.0}]
    batch = convert([sample(i, r) for i, r in enumerate(rewards)], reward=RewardFlags(reward_key="score"))
    assert batch.raw_rewards.tolist() == [1, 0]
    with pytest.raises(DataError, match="--reward-key"):
        convert([sample(i, r) for i, r in enumerate(rewards)])


def test_post_process_replaces_normalization():
    batch = convert(
        [sample(0, 1.0), sample(1, 0.0)],
        post_process=lambda args, samples: ([s.reward for s in samples], [args.x * i for i, _ in enumerate(samples)]),
        args=SimpleNamespace(x=3),
    )
    assert batch.rewards.tolist() == [0, 3]


def test_post_process_is_not_given_samples_that_failed():
    seen = []

    def halves(args, samples):
        seen.extend(s.index for s in samples)
        return [s.get_reward_value(args) for s in samples], [s.get_reward_value(args) / 2 for s in samples]

    failed = sample(1, None, status=Status.FAILED)
    batch = convert([sample(0, 1.0), failed, sample(2, 3.0)], post_process=halves)
    assert seen == [0, 2]
    assert batch.rewards.tolist() == [0.5, 0, 1.5]
    assert batch.raw_rewards.tolist() == pytest.approx([1, math.nan, 3], nan_ok=True)
    with pytest.raises(DataError, match=r"shapes \(1,\) and \(2,\) for 2 samples"):
        convert([sample(0, 1.0), failed, sample(2, 3.0)], post_process=lambda args, samples: ([1], [1, 2]))
    with pytest.raises(DataError, match=r"--custom-reward-post-process-path .*nan .*sample 2 \(1 of 2 "):
        convert([sample(0, 1.0), failed, sample(2, 3.0)], post_process=lambda args, samples: ([1, 3], [1, math.nan]))


def test_mask_may_be_of_any_kind_of_zeros_and_ones():
    for mask in ([True, False], [1.0, 0.0], np.array([1, 0])):
        batch = convert([sample(0, loss_mask=mask), sample(1)])
        assert batch.loss_masks.tolist() == [1, 0, 1, 1]


def test_mask_of_something_else_is_an_error_that_names_the_sample():
    for mask, shown in (([0.5, 1], "0.5"), ([2, 1], "2"), ([-1, 1], "-1"), ([1, None], "None")):
        with pytest.raises(
            DataError, match=f"the loss_mask of sample 1 .* {shown}; .*--custom-advantage-function-path"
        ):
            convert([sample(0), sample(1, loss_mask=mask)])


def test_masks_of_other_lengths_are_an_error_even_if_they_add_up():
    for masks in (([1, 0, 1], [1]), ([1], [1, 0, 1]), ([[1, 0]], [1, 1])):
        first, second = masks
        wrong = 1 if len(first) == 2 else 0
        with pytest.raises(DataError, match=f"the loss_mask of sample {wrong} has shape .* 2 tokens"):
            convert([sample(0, loss_mask=first), sample(1, loss_mask=second)])


def test_reward_of_a_failed_sample_is_an_error_with_the_reason():
    failed = sample(7, None, status=Status.FAILED, outcome=Outcome.failed("ValueError: gone"))
    with pytest.raises(DataError, match=r"sample 7 .*: ValueError: gone; .*Status\.FAILED"):
        failed.get_reward_value()


def test_training_metadata_is_carried_if_any_sample_has_some():
    batch = convert([sample(0, train_metadata={"a": 1}), sample(1)])
    assert batch.metadata == [{"a": 1}, None]


def test_column_that_one_sample_lacks_is_an_error_that_names_it():
    with pytest.raises(RolloutError, match="sample 1 has 0 rollout_log_probs for 2 response tokens; a function"):
        convert([sample(0), sample(1, rollout_log_probs=None)])


def test_values_of_a_teacher_are_columns_and_a_failed_sample_has_none():
    ids = np.array([[4, 5, 6], [7, 8, 9]], np.int32)
    whole = {"teacher_log_probs": torch.tensor([-1.0, -2.0]), "teacher_top_ids": ids}  # tensors, as of slime
    cut = whole | {"teacher_mask": [1, 0], "teacher_top_log_probs": -ids / 8}
    failed = sample(2, None, status=Status.FAILED)
    columns = convert([sample(0, **whole, teacher_top_log_probs=-ids / 4), sample(1, **cut), failed]).columns
    assert columns["teacher_log_probs"].tolist() == [-1, -2] * 2 + [0, 0]
    assert columns["teacher_mask"].tolist() == [1, 1, 1, 0, 0, 0]
    assert columns["teacher_top_ids"].tolist() == [*ids.tolist() * 2, [0, 0, 0], [0, 0, 0]]
    assert columns["teacher_top_log_probs"].shape == (6, 3)
    assert "teacher_mask" not in convert([sample(0, **whole), failed]).columns
    with pytest.raises(RolloutError, match="sample 1 has teacher_log_probs that are not finite"):
        convert([sample(0, **whole), sample(1, **whole | {"teacher_log_probs": [0.0, -math.inf]})])
    with pytest.raises(RolloutError, match=r"teacher_log_probs of up to 2 are no log-probs.* check their sign"):
        convert([sample(0, **whole | {"teacher_log_probs": [1.0, 2.0]})])


def test_sample_without_index_is_an_error():
    with pytest.raises(RolloutError, match="no index or group_index"):
        convert([sample(0), sample(None)])


def test_own_conversion_needs_tokens_lengths_and_rewards_only():
    def own(args, samples):
        return {"tokens": [s.tokens for s in samples], "response_lengths": [2, 2], "rewards": [1.0, 2.0]}

    batch = convert([sample(0), sample(1)], convert=own)
    assert batch.rewards.tolist() == batch.raw_rewards.tolist() == [1, 2]
    assert batch.loss_masks.tolist() == [1] * 4
    assert batch.columns == {}


OWN = {"tokens": [[1, 2, 3]] * 2, "response_lengths": [2, 2], "rewards": [1.0, 2.0]}


def test_a_custom_conversion_may_add_columns():
    answer = {**OWN, "weight": [[0.5, 1.0], [2.0, 3.0]], "rollout_mask_sums": [2, 2]}
    batch = convert([sample(0), sample(1)], convert=lambda args, samples, answer=answer: answer)
    assert {name: column.tolist() for name, column in batch.columns.items()} == {"weight": [0.5, 1.0, 2.0, 3.0]}


def test_own_conversion_that_does_not_fit_is_an_error():
    cases = [
        ({"tokens": [[1, 2, 3]] * 2}, r"returned no \['response_lengths', 'rewards'\]"),
        ({**OWN, "tokens": [[1, 2, 3]]}, "one entry for each of 2 samples"),
        ({**OWN, "tokens": [[1, 2]] * 2}, "needs at least one token"),
        ({**OWN, "sources": ["a", "b"]}, "returned 'sources', which is not one number per response token"),
        ({**OWN, "weight": [[1.0], [1.0]]}, "returned 'weight', which is not one number"),
        ({**OWN, "loss_masks": [[1, 1], [1, 0.5]]}, "row 1 of loss_masks .*0.5"),
        ({**OWN, "loss_masks": [[1, 1, 1], [1]]}, r"row 0 of loss_masks .* \(3,\).* 2 tokens"),
        ({**OWN, "rollout_log_probs": None}, "returned 'rollout_log_probs', which is not one number"),
    ]
    flag = "--custom-convert-samples-to-train-data-path"
    wrong = [
        {"tokens": [[1, 2, -3], [4, 5, 6]]}, {"tokens": [[1, 2, 1 << 40], [4, 5, 6]]}, {"tokens": ["abc", "def"]},
        {"response_lengths": [9, 1]}, {"response_lengths": [1.5, 1]}, {"rewards": [float("inf"), 0]},
        {"rewards": [10**400, 1]}, {"rewards": [1, 2, 3]}, {"raw_reward": "abc"}, {"loss_masks": (x for x in [1, 2])},
        {"truncated": [0.5, 1]}, {"rollout_ids": [None, None]}, {"sample_indices": object()},
    ]  # fmt: skip
    cases += [(None, flag), ([], flag), ({1: 2}, flag), *(({**OWN, **each}, flag) for each in wrong)]
    for answer, message in cases:
        with pytest.raises(DataError, match=message):
            convert([sample(0), sample(1)], convert=lambda args, samples, answer=answer: answer)


def test_arrays_and_tensors_are_numbers():
    data = {
        "tokens": [np.array([1, 2, 3]), torch.tensor([4, 5])],
        "response_lengths": torch.tensor([2, 1]),
        "rewards": np.array([0.5, -0.5]),
        "loss_masks": [torch.ones(2), (0,)],
        "mine": [torch.ones(2), [2.0]],
    }
    batch = convert([sample(0), sample(1)], convert=lambda args, samples: data)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5]
    assert batch.loss_masks.tolist() == [1, 1, 0]
    assert batch.columns["mine"].tolist() == [1, 1, 2]


def test_a_post_processing_returns_numbers():
    for part in ("ab", ["a", "b"], [[1], [1, 2]], {"a": 1}, object(), [1], [10**400, 1]):
        for result in ([part, [1.0, 0.0]], [[1.0, 0.0], part]):
            with pytest.raises(DataError, match="--custom-reward-post-process-path"):
                convert([sample(0), sample(1)], post_process=lambda args, samples, result=result: result)


TURNS = AlgoFlags(advantage_estimator="ppo", return_level="turn")


def turn_rewards(**fields):
    """Of a sample with five response tokens, of which those at 0, 1, 3 and 4 are trained: two turns."""
    one = sample(0, 1.0, n=5, loss_mask=[1, 1, 0, 1, 1], **fields)
    return convert([one], algo=TURNS).columns["turn_rewards"].tolist()


def test_rewards_of_turns_are_paid_at_the_last_token_of_each_and_taken_from_the_last_of_all():
    assert turn_rewards(metadata={"step_rewards": [0.25, 0.5]}) == [0, 0.25, 0, 0, -0.25]
    assert turn_rewards(metadata={"step_rewards": [0.25]}) == [0, 0.25, 0, 0, -0.25]
    assert turn_rewards() == [0] * 5
    assert turn_rewards(metadata={"step_rewards": "none"}, remove_sample=True) == [0] * 5
    assert "turn_rewards" not in convert([sample(0, metadata={"step_rewards": [1]})]).columns


def test_a_leaf_is_paid_for_its_turns_and_those_after_them_and_not_for_those_before():
    ends = [[1, 1], [3, 4]]  # turns 0 and 2 are in other leaves
    rewards = [1.0, 2.0, 4.0, 8.0, 16.0]  # the last turn is of a later leaf
    assert turn_rewards(metadata={"step_rewards": rewards, "turn_ends": ends}) == [0, 6, 0, 0, 24 - 31]


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ([1, 2, 3], "are 3 numbers, but it has 2 turns.*one number per turn"),
        ([1, math.nan], "give finite numbers, 0 for a turn without a reward"),
        ([1, None], "give finite numbers"),
        ("abc", "'abc'; expected numbers"),
    ],
)
def test_rewards_of_turns_that_do_not_fit_are_an_error(rewards, problem):
    with pytest.raises(DataError, match=f"step_rewards of sample 0 .*{problem}"):
        turn_rewards(metadata={"step_rewards": rewards})
