"""Runs that are killed at any moment and resumed with the same command line end as if nothing had happened."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from furlong.cli import main
from furlong.data.audit import audit
from runs import Child, flags, num_rows, reproducible, rows, train, trainer_bytes, write_prompts

pytestmark = pytest.mark.nightly

NUM = 16
REWARD = """
def reward_func(args, sample, **kwargs):
    return float(sum(map(ord, sample.response)) % 3)
"""


def _wait_for(run: Child, moment: str, rng: random.Random) -> None:
    if moment == "start":
        time.sleep(rng.uniform(0, 0.6))
        return
    before = num_rows(run.folder)
    while run.process.is_alive():
        if moment == "step" and num_rows(run.folder) != before:
            time.sleep(rng.uniform(0, 0.08))
            return
        if moment == "save" and any((run.folder / "save").glob("*.partial")):
            time.sleep(rng.uniform(0, 0.01))
            return
        time.sleep(0.0005)


MOMENTS = ("start", "start", "save", "step", "save", "step", "save", "step")


@pytest.mark.parametrize(
    ("seed", "changes"),
    [
        (1, {"async_buffer_size": 1, "rollout_shuffle": True, "save_interval": 1, "eval_interval": 4}),
        (
            2,
            {
                "save_interval": 2,
                "dynamic_sampling_filter_path": "furlong.rollout.filters.check_reward_nonzero_std",
                "over_sampling_batch_size": 6,
                "n_samples_per_prompt": 2,
                "keep_checkpoints": 2,
                "async_save": True,
            },
        ),
        (
            4,
            {
                "save_interval": 1,
                "advantage_estimator": "ppo",
                "num_critic_only_steps": 9,
                "normalize_advantages": True,
                "async_save": True,
            },
        ),
    ],
    ids=["one_ahead_shuffled", "filtered_over_sampled_saved_in_the_background", "critic_in_its_warm_up"],
)
def test_run_killed_eight_times_ends_like_one_that_was_not(seed, changes, model, tmp_path, forked):
    rng = random.Random(seed)
    data = write_prompts(tmp_path / "prompts.jsonl", 30)
    (tmp_path / "reward.py").write_text(REWARD)
    options = {
        "rm_type": None,
        "custom_rm_path": f"{tmp_path}/reward.py:reward_func",
        "num_reward_workers": 1,
        "lr_decay_style": "constant",  # the children run train.py, which has Megatron's default
    } | changes
    if "eval_interval" in changes:
        options["eval_prompt_data"] = ["held_out", write_prompts(tmp_path / "held_out.jsonl", 3)]

    def argv(folder: Path) -> list[str]:
        save = folder / "save"
        return flags(model, data, folder / "run", num_rollout=NUM, load=save, save=save, **options)

    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    assert train(argv(straight)) == NUM

    assert _kill_and_finish(argv(killed), killed, MOMENTS, forked, rng) >= 7

    want, got = trainer_bytes(straight / "save", NUM), trainer_bytes(killed / "save", NUM)
    assert {name for name in want if want[name] != got[name]} == set()
    assert [reproducible(r) for r in rows(killed / "run")] == [reproducible(r) for r in rows(straight / "run")]
    _check_accounts(killed)


def test_partial_rollouts_ahead_of_training_are_accounted_for_when_killed(model, tmp_path, forked):
    rng = random.Random(3)
    data, folder = write_prompts(tmp_path / "prompts.jsonl", 30), tmp_path / "killed"
    argv = flags(
        model, data, folder / "run", num_rollout=NUM, load=folder / "save", save=folder / "save", save_interval=2,
        partial_rollout=True, over_sampling_batch_size=8, rollout_max_response_len=40, async_buffer_size=2,
        rollout_stop_token_ids=list(range(31, 36)), pause_mode="hold",
    )  # fmt: skip
    assert _kill_and_finish(argv, folder, MOMENTS[1:7], forked, rng) >= 5
    _check_accounts(folder)


def _kill_and_finish(argv: list[str], folder: Path, moments: Sequence[str], forked: Any, rng: random.Random) -> int:
    """Start the run once for each moment, kill it then, and let it end at last; returns how often it was killed."""
    kills = 0
    for attempt, moment in enumerate(rng.sample(moments, len(moments))):
        run = Child(forked, argv, folder, attempt)
        _wait_for(run, moment, rng)
        kills += run.process.is_alive()
        run.kill()
    last = Child(forked, argv, folder, "last")
    last.process.join(60)
    assert last.process.exitcode == 0, last.log.read_text()
    last.kill()
    return kills


def _check_accounts(folder: Path) -> None:
    assert [row["step"] for row in rows(folder / "run") if row["step"]] == list(range(1, NUM + 1))
    assert (folder / "save" / "latest_checkpointed_iteration.txt").read_text() == f"{NUM}\n"
    assert not list((folder / "save").glob("*.partial"))
    assert main(["report", "--ledger", str(folder / "run"), "--finished"]) == 0
    assert audit(folder / "run" / "ledger.jsonl", finished=True).num_trained == NUM * 4
