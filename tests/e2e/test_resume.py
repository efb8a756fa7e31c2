"""A run that is resumed ends with the same bits as one that was never stopped."""

from __future__ import annotations

import shutil

import pytest

from furlong.commands.inspect_run import report
from furlong.data.audit import audit
from runs import flags, reproducible, rows, train, trainer_bytes, write_prompts

NUM, STOP = 6, 2
SETTINGS = {
    "synchronous": {},
    "one_ahead": {"async_buffer_size": 1},
    "two_ahead": {"async_buffer_size": 2},
    "two_ahead_updated_every_other": {"async_buffer_size": 2, "update_weights_interval": 2},
    "shuffled_over_two_epochs": {"rollout_shuffle": True},
    "streamed_and_shuffled": {"rollout_shuffle": True, "streaming_data": True, "num_data_workers": 2},
    "several_steps_and_warm_up": {
        "global_batch_size": 4,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 5,
        "min_lr": 1e-4,
    },
    "kl_to_a_reference_that_moves": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "k3",
        "ref_update_interval": 3,
    },
    "old_actor_kept": {"async_buffer_size": 1, "keep_old_actor": True, "global_batch_size": 8},
    "bfloat16": {"bf16": True},
    "critic_in_its_warm_up": {
        "advantage_estimator": "ppo",
        "num_critic_only_steps": 3,
        "global_batch_size": 8,
        "normalize_advantages": True,
        "kl_coef": 0.01,
        "kl_loss_type": "k3",
    },
    "filtered": {"dynamic_sampling_filter_path": "furlong.rollout.filters.check_reward_nonzero_std"},
    "filtered_and_over_sampled": {
        "dynamic_sampling_filter_path": "furlong.rollout.filters.check_reward_nonzero_std",
        "over_sampling_batch_size": 7,
        "n_samples_per_prompt": 2,
    },
    "filtered_over_sampled_one_ahead": {
        "dynamic_sampling_filter_path": "furlong.rollout.filters.check_reward_nonzero_std",
        "over_sampling_batch_size": 7,
        "n_samples_per_prompt": 2,
        "async_buffer_size": 1,
    },
    "evaluated": {"eval_interval": 2, "n_samples_per_eval_prompt": 2},
    "evaluated_one_ahead": {"eval_interval": 2, "async_buffer_size": 1},
    "evaluated_between_saves": {"eval_interval": 3, "async_buffer_size": 1},
}


def test_report_loses_no_rollouts_that_a_checkpoint_holds_for_a_larger_number(model, tmp_path, capsys):
    data, save, run = write_prompts(tmp_path / "prompts.jsonl", 14), tmp_path / "save", tmp_path / "run"

    def go(folder, num_rollout, **changes):
        return train(flags(model, data, folder, num_rollout=num_rollout, async_buffer_size=2, **changes))

    assert go(run, 4, save=save, save_interval=2) == 4
    assert go(tmp_path / "branch", 5, load=save, ckpt_step=2) == 5  # trains on what was ahead in another folder
    for number in (2, 3, 5):  # two rollouts are ahead of the checkpoint: less, and one of them, and more
        assert go(run, number, save=save, load=save, ckpt_step=2 if number < 5 else 3) == number
        assert report([str(run), str(tmp_path / "branch"), "--finished"]) == 0, capsys.readouterr().out
    assert audit(run / "ledger.jsonl", finished=True).num_trained == 20


@pytest.mark.parametrize("name", SETTINGS)
def test_resumed_run_equals_one_that_was_never_stopped(name, model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 14)
    changes = dict(SETTINGS[name])
    if "eval_interval" in changes:
        changes["eval_prompt_data"] = ["held_out", write_prompts(tmp_path / "held_out.jsonl", 3)]

    def argv(folder, *more):
        return flags(
            model, data, folder / "run", *more, num_rollout=NUM, save=folder / "save", save_interval=STOP, **changes
        )

    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert train(argv(straight)) == NUM
    shutil.copytree(straight, resumed)
    for step in range(STOP + 1, NUM + 1):
        shutil.rmtree(resumed / "save" / f"iter_{step:07d}", ignore_errors=True)
    (resumed / "save" / "latest_checkpointed_iteration.txt").write_text(f"{STOP}\n")

    assert train(argv(resumed, "--load", resumed / "save")) == NUM

    assert [reproducible(row) for row in rows(resumed / "run")] == [reproducible(row) for row in rows(straight / "run")]
    first = 0 if "eval_interval" in changes else 1
    assert [row["step"] for row in rows(resumed / "run")] == list(range(first, NUM + 1))
    want, got = trainer_bytes(straight / "save", NUM), trainer_bytes(resumed / "save", NUM)
    assert {name for name in want if want[name] != got[name]} == set()
    result = audit(resumed / "run" / "ledger.jsonl", finished=True)
    assert result.ok, result.summary()
    assert result.num_resumes == 1
