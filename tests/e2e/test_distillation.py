"""Distillation in whole runs: a teacher in the trainer, from a folder and from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from furlong.cli import main_train
from furlong.files.batch_file import load_batch
from furlong.quickstart import addition as task
from furlong.quickstart.quickstart import model_folder, quickstart_flags
from runs import flags, rows, train, write_model
from served_engine import served_folder

SLIME = "slime.rollout.on_policy_distillation"


@pytest.fixture
def teacher(tmp_path):
    return write_model(tmp_path / "teacher", seed=7, width=48)  # larger than the policy


def distil(model, data, folder, **changes):
    values = {"use_opd": True, "n_samples_per_prompt": 1, "opd_task_reward_coef": 0.0, "num_rollout": 2}
    values["save_debug_train_data"] = f"{folder}-batches/{{rollout_id}}"
    train(flags(model, data, folder, **values | changes))
    return load_batch(Path(f"{folder}-batches/0"))


@pytest.mark.parametrize("loss", ["sampled", "topk", "full"])
def test_a_larger_teacher_is_distilled_with_one_sample_per_prompt(model, data, teacher, tmp_path, loss):
    distil(model, data, tmp_path / "run", opd_teacher_load=teacher, opd_loss=loss, opd_type="megatron")
    last = rows(tmp_path / "run")[-1]
    assert {"train/opd_reverse_kl", "rollout/teacher_log_probs", "perf/teacher_time"} <= set(last)
    assert ("train/opd_topk_mass_teacher" in last) == (loss == "topk")


def test_a_checkpoint_is_a_teacher_and_a_run_with_one_resumes_bit_for_bit(model, data, tmp_path):
    train(flags(model, data, tmp_path / "first", lr=0.1, save=tmp_path / "save", num_rollout=2))
    given = {"opd_teacher_load": tmp_path / "save", "opd_teacher_ckpt_step": 2, "opd_loss": "full"}
    distil(model, data, tmp_path / "whole", **given, num_rollout=3)
    distil(model, data, tmp_path / "part", **given, save=tmp_path / "kept", num_rollout=2)
    distil(model, data, tmp_path / "part", **given, load=tmp_path / "kept", num_rollout=3)
    last = [rows(tmp_path / name)[-1] for name in ("whole", "part")]
    assert last[0]["train/opd_reverse_kl"] == last[1]["train/opd_reverse_kl"] > 0
    assert last[0]["train/grad_norm"] == last[1]["train/grad_norm"]


def test_a_server_and_the_trainer_give_the_same_log_probs(model, data, teacher, tmp_path):
    with served_folder(teacher) as url:
        functions = {
            "custom_rm_path": f"{SLIME}.reward_func", "rm_url": f"{url}/generate", "rm_type": None,
            "custom_reward_post_process_path": f"{SLIME}.post_process_rewards",
        }  # fmt: skip
        named = {"opd_teacher_urls": f"large={url}", "opd_log_prob_top_k": 5}
        served = [
            distil(model, data, tmp_path / name, **given, rollout_temperature=0.7)
            for name, given in (("functions", functions), ("named", named))
        ]
    given = {"opd_teacher_load": teacher, "rollout_temperature": 0.7, "opd_log_prob_top_k": 5}
    loaded = distil(model, data, tmp_path / "loaded", **given)
    for batch in served:
        assert np.array_equal(batch.tokens, loaded.tokens)
        np.testing.assert_allclose(batch.columns["teacher_log_probs"], loaded.columns["teacher_log_probs"], atol=2e-5)
    assert np.array_equal(served[1].columns["teacher_top_ids"], loaded.columns["teacher_top_ids"])
    top = "teacher_top_log_probs"
    np.testing.assert_allclose(served[1].columns[top], loaded.columns[top], atol=2e-5)
    for name in ("train/opd_reverse_kl", "train/grad_norm", "train/opd_topk_mass_teacher"):
        assert rows(tmp_path / "named")[0][name] == pytest.approx(rows(tmp_path / "loaded")[0][name], rel=1e-3), name


@pytest.mark.nightly
def test_the_quickstarts_model_learns_from_its_solved_self(tmp_path):
    """Seeds 2 and 3 and the other losses gain as much."""
    (tmp_path / "solved").mkdir()
    solved = quickstart_flags(tmp_path / "solved", seed=42, num_rollout=80, is_async=False)
    assert main_train(solved) == 0
    problems, held_out = tmp_path / "problems.jsonl", tmp_path / "held_out.jsonl"
    task.write_prompts(problems, task.problems(64 * 60, seed=1))
    task.write_prompts(held_out, task.held_out_problems())
    given = {
        "--hf-checkpoint": model_folder(), "--prompt-data": problems, "--input-key": "prompt", "--label-key": "label",
        "--rm-type": "math", "--num-rollout": 60, "--rollout-batch-size": 64, "--n-samples-per-prompt": 2,
        "--rollout-max-response-len": 8, "--lr": 1e-4, "--max-tokens-per-gpu": 8192, "--opd-task-reward-coef": 0,
        "--opd-teacher-load": tmp_path / "solved" / "model", "--opd-loss": "full",
        "--eval-prompt-data": f"held_out {held_out}", "--output-dir": tmp_path / "student",
    }  # fmt: skip
    words = [word for name, value in given.items() for word in (name, *str(value).split())]
    assert main_train([*words, "--use-opd", "--use-dynamic-batch-size"]) == 0
    lines = (tmp_path / "student" / "metrics.jsonl").read_text().splitlines()
    scores = [row["eval/held_out"] for line in lines if "eval/held_out" in (row := json.loads(line))]
    assert scores[-1] - scores[0] >= 0.3
