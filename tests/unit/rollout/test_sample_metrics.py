from __future__ import annotations

import random
from itertools import combinations
from math import comb

import numpy as np
import pytest

from furlong.config.sections import TrackFlags
from furlong.core.outcome import Outcome
from furlong.core.sample import Group, Sample, Status
from furlong.errors import DataError
from furlong.rollout.metrics import eval_metrics, is_repetitive, pass_at_k, reward_label, rollout_metrics
from furlong.sessions.samples import EPISODE


def sample(reward=None, *, length=4, status=Status.COMPLETED, **fields):
    return Sample(tokens=[1] * (length + 2), response_length=length, reward=reward, status=status, **fields)


def groups_of(*rewards_of_groups):
    return [Group(i, [sample(r) for r in rewards]) for i, rewards in enumerate(rewards_of_groups)]


def shown(metrics):
    return {name: metric.value for name, metric in metrics.items()}


def test_rollout_metrics_carry_slime_names_and_values():
    groups = [
        Group(0, [sample(1.0, length=2), sample(0.0, length=6, status=Status.TRUNCATED)]),
        Group(1, [sample(1.0, length=4), sample(1.0, length=8)]),
    ]
    metrics = shown(rollout_metrics(groups))
    assert metrics["rollout/response_len/mean"] == 5
    assert metrics["rollout/response_len/median"] == 5
    assert metrics["rollout/response_len/max"] == 8
    assert metrics["rollout/response_len/min"] == 2
    assert metrics["rollout/truncated_ratio"] == 0.25
    assert metrics["rollout/raw_reward"] == 0.75
    assert metrics["rollout/zero_std/count_1"] == 1
    assert metrics["rollout/zero_std_frac"] == 0.5
    assert metrics["rollout/reward_range"] == 1
    assert metrics["rollout/repetition_frac"] == 0
    assert "rollout/reward_failed" not in metrics


def test_failed_rewards_are_counted_and_not_averaged():
    failed = sample(status=Status.FAILED, outcome=Outcome.failed("boom"))
    slow = sample(status=Status.FAILED, outcome=Outcome.timed_out(3))
    metrics = shown(rollout_metrics([Group(0, [sample(1.0, outcome=Outcome.scored(1.0)), failed, slow])]))
    assert metrics["rollout/raw_reward"] == 1
    assert metrics["rollout/reward_failed"] == 1
    assert metrics["rollout/reward_timed_out"] == 1


def test_lengths_of_correct_samples_are_measured_on_request():
    groups = [Group(0, [sample(1.0, length=2), sample(0.0, length=8), sample(None, length=4)])]
    metrics = shown(rollout_metrics(groups, TrackFlags(log_correct_samples=True)))
    assert metrics["rollout/correct_response_len/mean"] == 2
    assert metrics["rollout/correct_response_len/max"] == 2


def test_a_conversation_whose_last_answer_was_cut_counts_as_ended_by_a_limit():
    episode = {"leaves": 1, "turns": 2, "prefix_kept_frac": 1.0, "versions": 1, "continued": 1}
    metadata = {EPISODE: {**episode, "branches": {}, "counts": {}}}
    cut, whole = (sample(1.0, status=s, metadata=metadata) for s in (Status.TRUNCATED, Status.COMPLETED))
    metrics = shown(rollout_metrics([Group(0, [cut, whole, sample(1.0, status=Status.TRUNCATED)])]))
    assert metrics["rollout/episodes/policy_limit"] == 1


def test_seconds_that_generate_functions_wrote_into_samples_are_shown_if_there_are_any():
    metrics = shown(rollout_metrics([Group(0, [sample(1.0, non_generation_time=0.5), sample(1.0)])]))
    assert metrics["perf/non_generation_time/mean"] == 0.25
    assert metrics["perf/non_generation_time/max"] == 0.5
    assert not [name for name in rollout_metrics(groups_of([1.0])) if "non_generation" in name]


def test_a_rollout_without_scores_has_no_reward_metric():
    metrics = rollout_metrics([Group(0, [sample()])])
    assert not any("raw_reward" in name or "zero_std" in name for name in metrics)
    assert rollout_metrics([]) == {}


def test_response_length_counts_trained_tokens_and_multi_turn_shows_both():
    turn = sample(1.0, length=4, loss_mask=[1, 0, 0, 1], metadata={"round_number": 3})
    metrics = shown(rollout_metrics([Group(0, [turn])], TrackFlags(log_multi_turn=True)))
    assert metrics["rollout/response_len/mean"] == 2
    assert metrics["multi_turn/raw_response_length/max"] == 4
    assert metrics["multi_turn/wo_obs_response_length/max"] == 2
    assert metrics["multi_turn/multi_turn_metric/round_number_mean"] == 3


def test_dict_rewards_need_a_key_and_give_categories():
    groups = [Group(0, [sample({"score": 1.0, "why": "ok"}), sample({"score": 0.0, "why": "format"})])]
    metrics = shown(rollout_metrics(groups, TrackFlags(log_reward_category="why"), reward_key="score"))
    assert metrics["rollout/raw_reward"] == 0.5
    assert metrics["rollout/error_cat/format"] == 0.5
    with pytest.raises(DataError, match="reward-key"):
        rollout_metrics(groups)
    with pytest.raises(DataError, match="--log-reward-category colour"):
        rollout_metrics(groups, TrackFlags(log_reward_category="colour"), reward_key="score")


def test_metadata_raw_reward_replaces_only_the_shown_reward():
    shaped = sample(-0.3, metadata={"raw_reward": 1.0})
    metrics = shown(rollout_metrics([Group(0, [shaped, sample(-0.3)])]))
    assert metrics["rollout/raw_reward"] == pytest.approx(0.35)
    assert metrics["rollout/zero_std/count_-0.3"] == 1


def test_pass_at_k_equals_the_mean_over_all_subsets():
    draw = random.Random(0)
    attempts = [np.array([float(draw.random() < 0.4) for _ in range(6)]) for _ in range(5)]
    metrics = shown(pass_at_k(attempts, ks=[1, 2, 3, 6]))
    for k in (1, 2, 3, 6):
        each = [sum(any(s) for s in combinations(a.tolist(), k)) / comb(6, k) for a in attempts]
        assert metrics[f"pass@{k}"] == pytest.approx(float(np.mean(each)), abs=1e-9)


def test_pass_at_k_of_nothing_right_is_0():
    for n in (1, 7, 16, 64):
        metrics = shown(pass_at_k([np.zeros(n)], ks=range(1, n + 1)))
        assert {str(value) for value in metrics.values()} == {"0.0"}


def test_pass_at_k_leaves_out_small_groups_and_unreached_k():
    attempts = [np.array([1.0, 0.0, 0.0, 0.0]), np.array([0.0])]
    metrics = pass_at_k(attempts)
    assert sorted(metrics) == ["pass@1", "pass@2", "pass@4"]
    assert metrics["pass@4"].value == 1
    assert metrics["pass@4"].weight == 1
    assert metrics["pass@1"].value == pytest.approx(0.125)
    assert pass_at_k([]) == {}
    assert pass_at_k([np.array([])]) == {}


def test_samples_fanned_out_from_one_completion_are_one_attempt():
    fanned = [sample(1.0, rollout_id=7), sample(1.0, rollout_id=7), sample(0.0, rollout_id=8)]
    assert shown(rollout_metrics([Group(0, fanned)], TrackFlags(log_passrate=True)))["passrate/pass@1"] == 0.5


def test_eval_metrics_carry_slime_names():
    metrics = shown(eval_metrics("aime", groups_of([1.0, 0.0], [0.0, 0.0])))
    assert metrics["eval/aime"] == 0.25
    assert metrics["eval/aime-truncated_ratio"] == 0
    assert metrics["eval/aime-pass@1"] == pytest.approx(0.25)
    assert metrics["eval/aime-pass@2"] == pytest.approx(0.5)
    assert metrics["eval/aime/response_len/mean"] == 4
    assert not any("pass@" in name for name in eval_metrics("one", groups_of([1.0], [0.0])))
    assert not any("pass@" in name for name in eval_metrics("off", groups_of([1.0, 0.0]), pass_k=False))


def test_only_long_texts_that_repeat_are_repetitive():
    draw = random.Random(0)
    assert is_repetitive("I am sorry. " * 1000)
    assert not is_repetitive("I am sorry. " * 100)
    assert not is_repetitive("".join(draw.choice("abcdefghijklmnop \n") for _ in range(12_000)))
    assert is_repetitive("\ud800 lone surrogates do not raise " * 1000)


def test_metric_names_have_whole_rewards_without_decimals():
    for reward, label in ((1.0, "1"), (0, "0"), (-1.0, "-1"), (0.5, "0.5"), (0.25, "0.2"), (-0.04, "0")):
        assert reward_label(reward) == label


def test_empty_answers_and_exits_with_the_best_reward_are_counted():
    texts = {"": 1.0, "<|im_end|>": 1.0, " \n": 0.0, "import os; os._exit(0)": 1.0, "5": 1.0, "6": 0.0}
    samples = [Sample(index=i, response=text, response_length=1, reward=r) for i, (text, r) in enumerate(texts.items())]
    found = {name: each.value for name, each in rollout_metrics([Group(0, samples)]).items() if "suspicious" in name}
    assert found == {
        "rollout/suspicious/empty": 3, "rollout/suspicious/empty_best": 2,
        "rollout/suspicious/exit": 1, "rollout/suspicious/exit_best": 1,
    }  # fmt: skip
    for sample in samples:
        sample.reward = 1.0  # of which none is better than others
    assert not any("suspicious" in name for name in rollout_metrics([Group(0, samples)]))
