"""Every `--*-path` hook is called as documented, and its result takes effect."""

from __future__ import annotations

import inspect
import json

import pytest

import hooks_zoo
import rewards_zoo
from furlong.data.audit import audit
from furlong.errors import ConfigError, TrainerError
from furlong.files.batch_file import load_batch
from furlong.files.sample_file import load_samples
from runs import flags, is_finite, ledger_events, reproducible, rows, train, write_prompts


def path_of(function) -> str:
    return f"{inspect.getsourcefile(function)}:{function.__name__}"


@pytest.fixture
def go(model, tmp_path):
    """Train with these flags, check what must hold for every run, and return its rows, calls and batches."""

    def run(folder="run", *, expect=2, **changes):
        data = write_prompts(tmp_path / "prompts.jsonl", 40)
        output = tmp_path / folder
        batches = f"{tmp_path}/{folder}_batches/{{rollout_id}}"
        argv = flags(model, data, output, **{"save_debug_train_data": batches, "num_rollout": expect} | changes)
        assert train(argv) == expect
        result = audit(output / "ledger.jsonl", finished=True)
        assert result.ok, result.summary()
        found = [row for row in rows(output) if row["step"]]
        assert all(is_finite(row) for row in found), found
        calls = output / "calls.jsonl"
        noted = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
        shown = [load_batch(p) for p in sorted((tmp_path / f"{folder}_batches").glob("*"))]
        return found, noted, shown

    return run


def test_tool_output_is_masked_and_costs_no_gradient(go):
    found, _, batches = go(custom_generate_function_path=path_of(hooks_zoo.generate_with_tool), log_multi_turn=True)
    batch = batches[0]
    n = len(hooks_zoo.TOOL)
    for i in range(len(batch)):
        mask = batch.loss_masks[batch.response_starts[i] : batch.response_starts[i + 1]].tolist()
        first = mask.index(0)
        assert mask[first : first + n] == [0] * n
        assert sum(mask) == len(mask) - n
    versions = batch.columns["token_versions"]
    assert set(versions[batch.loss_masks == 0].tolist()) == {-1}
    assert found[0]["multi_turn/multi_turn_metric/round_number_mean"] == 2
    assert found[0]["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_fanned_out_samples_are_scored_as_a_group_and_count_as_one_completion(go):
    found, _, batches = go(
        custom_generate_function_path=path_of(hooks_zoo.generate_fan_out),
        custom_rm_path=path_of(rewards_zoo.reward_group),
        group_rm=True,
        rm_type=None,
    )
    batch = batches[0]
    assert len(batch) == 4 * 6
    assert len(set(batch.rollout_ids.tolist())) == 16
    assert batch.raw_rewards[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert found[0]["train/global_batch_size"] == 16


def test_fanned_out_samples_pass_through_a_filter(go):
    found, noted, _ = go(
        custom_generate_function_path=path_of(hooks_zoo.generate_fan_out),
        dynamic_sampling_filter_path=path_of(hooks_zoo.filter_branches),
        over_sampling_batch_size=6,
    )
    assert noted
    assert all(call["branches"] == [1, 1, 2, 2] for call in noted)
    assert [row["train/global_batch_size"] for row in found] == [16, 16]


def test_generate_with_evaluation_parameter_receives_it(go, tmp_path):
    _, noted, _ = go(
        rm_type=None,
        custom_generate_function_path=path_of(hooks_zoo.generate_unseen),
        eval_prompt_data=["own", write_prompts(tmp_path / "eval.jsonl", 3)],
        eval_interval=2,
    )
    assert [call["evaluation"] for call in noted].count(True) == 6
    assert [call["evaluation"] for call in noted].count(False) == 32


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}],
    ids=["grpo", "reinforce_plus_plus"],
)
def test_reward_that_raises_is_counted_and_its_samples_are_masked(algorithm, go):
    found, _, batches = go(
        rm_type=None,
        custom_rm_path=path_of(rewards_zoo.reward_that_raises_at_times),
        num_reward_workers=1,
        **algorithm,
    )
    assert found[0]["rollout/reward_failed"] == 4
    starts = batches[0].response_starts
    assert all(batches[0].loss_masks[starts[i] : starts[i + 1]].sum() == 0 for i in range(0, 16, 4))


def test_filtered_groups_are_dropped_with_their_reason_and_all_are_shown(go):
    found, noted, batches = go(
        dynamic_sampling_filter_path=path_of(hooks_zoo.filter_by_index),
        rollout_all_samples_process_path=path_of(hooks_zoo.all_samples_process),
    )
    assert [sorted(set(b.group_ids.tolist())) for b in batches] == [[0, 1, 3, 4], [6, 7, 9, 10]]
    assert noted[0]["groups"] == [0, 1, 2, 3, 4]
    assert found[0]["rollout/dynamic_filter/drop_third"] == 1


def test_removed_samples_have_no_gradient(go):
    _, _, batches = go(rollout_sample_filter_path=path_of(hooks_zoo.sample_filter))
    starts = batches[0].response_starts
    masked = [batches[0].loss_masks[starts[i] : starts[i + 1]].sum() == 0 for i in range(16)]
    assert masked == [True, False, False, False] * 4


def test_postprocess_may_clear_masks(go):
    found, noted, batches = go(rollout_data_postprocess_path=path_of(hooks_zoo.postprocess))
    starts = batches[0].response_starts
    assert [batches[0].loss_masks[starts[i] : starts[i + 1]].any() for i in range(4)] == [False, True, False, True]
    assert {"advantages", "loss_masks", "rollout_log_probs", "tokens"} <= set(noted[0]["keys"])
    assert found[0]["train/grad_norm"] > 0


def test_custom_advantages_are_used(go):
    found, _, _ = go(custom_advantage_function_path=path_of(hooks_zoo.advantages))
    assert [row["rollout/advantages"] for row in found] == [0.5, 0.5]
    assert found[0]["train/pg_loss"] == pytest.approx(-0.5)


def test_custom_advantages_may_have_a_kl_whatever_the_algorithm(go):
    found, _, _ = go(custom_advantage_function_path=path_of(hooks_zoo.penalized_advantages), kl_coef=0.5)
    assert found[0]["rollout/advantages"] == 1
    assert found[1]["rollout/advantages"] != 1


@pytest.mark.parametrize("micro_batch_size", [16, 4])
def test_custom_loss_is_minimized(micro_batch_size, go):
    found, _, _ = go(
        loss_type="custom_loss",
        custom_loss_function_path=path_of(hooks_zoo.loss),
        micro_batch_size=micro_batch_size,
    )
    assert found[0]["train/my_loss"] == pytest.approx(found[0]["train/loss"])
    assert found[0]["train/loss"] > 1
    assert found[0]["train/my_gap"] == pytest.approx(0, abs=1e-5)  # one step a rollout: the old policy is the live one


@pytest.mark.parametrize(
    ("function", "what"), [(hooks_zoo.loss_by_token, "the loss"), (hooks_zoo.loss_with_list, "my_log_probs")]
)
def test_custom_loss_that_is_not_one_number_is_an_error(function, what, go):
    with pytest.raises(
        TrainerError, match=rf"--custom-loss-function-path returned {what} of shape .*sum_of_sample_mean"
    ):
        go(loss_type="custom_loss", custom_loss_function_path=path_of(function))


def test_custom_importance_weighting_scales_the_loss(go):
    advantage = path_of(hooks_zoo.advantages)
    found, _, _ = go(
        use_tis=True, custom_tis_function_path=path_of(hooks_zoo.tis), custom_advantage_function_path=advantage
    )
    assert found[0]["train/pg_loss"] == pytest.approx(-0.25)
    assert found[0]["train/my_ratio"] == pytest.approx(1, abs=1e-4)


def test_custom_reducer_scales_the_loss(go):
    advantage = path_of(hooks_zoo.advantages)
    found, _, _ = go(
        custom_pg_loss_reducer_function_path=path_of(hooks_zoo.reducer), custom_advantage_function_path=advantage
    )
    assert found[0]["train/pg_loss"] == pytest.approx(-1.5)


@pytest.mark.parametrize("ahead", [0, 1])
def test_rollout_function_brings_samples_and_evaluations(ahead, go, tmp_path):
    found, _, batches = go(
        rm_type=None,
        rollout_function_path=path_of(hooks_zoo.rollout_function),
        eval_prompt_data=["own", write_prompts(tmp_path / "eval.jsonl", 3)],
        eval_interval=1,
        async_buffer_size=ahead,
    )
    assert [row["rollout/own"] for row in found] == [0, 1]
    assert [row["eval/own"] for row in found] == [0.5, 0.5]
    assert found[0]["eval/extra"] == 3
    assert sorted(set(batches[1].group_ids.tolist())) == [5, 6, 7, 8]
    events = ledger_events(tmp_path / "run")
    assert [e["why"] for e in events if e["e"] == "dropped"] == ["rollout_function"] * 2
    assert [e["why"] for e in events if e["e"] == "returned"] == ["add_samples"] * 2


def test_rollout_function_brings_its_prompts(model, tmp_path):
    def argv(num_rollout, *more):
        return flags(
            model, None, tmp_path / "run", "--disable-rollout-global-dataset", *more, num_rollout=num_rollout,
            save=tmp_path / "save", save_interval=1, label_key=None, rm_type=None,
            rollout_function_path=path_of(hooks_zoo.rollout_function_with_prompts),
        )  # fmt: skip

    assert train(argv(2)) == 2
    assert train(argv(3, "--load", tmp_path / "save")) == 3
    trained = [e["g"] for e in ledger_events(tmp_path / "run") if e["e"] == "trained"]
    assert trained == list(range(12))
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).ok


@pytest.mark.nightly
def test_own_data_source_is_saved_and_resumed(model, tmp_path):
    def argv(num_rollout, *more):
        return flags(
            model, None, tmp_path / "run", *more, num_rollout=num_rollout, save=tmp_path / "save", save_interval=1,
            data_source_path=path_of(hooks_zoo.Endless), label_key=None,
        )  # fmt: skip

    assert train(argv(2)) == 2
    assert train(argv(4, "--load", tmp_path / "save")) == 4
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).num_trained == 16
    straight = tmp_path / "straight"
    train(
        flags(
            model, None, straight / "run", num_rollout=4, save=straight / "save", save_interval=1,
            data_source_path=path_of(hooks_zoo.Endless), label_key=None,
        )
    )  # fmt: skip
    assert [reproducible(r) for r in rows(straight / "run")] == [reproducible(r) for r in rows(tmp_path / "run")]


def test_samples_of_a_custom_data_source_name_their_generate_function(model, tmp_path):
    argv = flags(
        model, None, tmp_path / "run", num_rollout=1, data_source_path=path_of(hooks_zoo.Naming), label_key=None,
        save_debug_rollout_data=tmp_path / "samples_{rollout_id}.safetensors",
    )  # fmt: skip
    assert train(argv) == 1
    groups = load_samples(tmp_path / "samples_0.safetensors").groups
    own = [all(sample.response == "ab" for sample in group.samples) for group in groups]
    assert own == [True, False] * (len(groups) // 2)


def test_a_function_that_cannot_generate_a_sample_is_named(model, tmp_path):
    argv = flags(
        model, None, tmp_path / "run", num_rollout=1, data_source_path=path_of(hooks_zoo.NamingNone), label_key=None
    )
    with pytest.raises(ConfigError, match=r"generate_function_path .*filter_by_index' cannot be called. .*not async"):
        train(argv)
