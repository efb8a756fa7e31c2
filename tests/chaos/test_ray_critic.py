"""PPO on two Ray ranks that share their slots with the engines: as in one process, and after kill -9 in the warm-up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from forked_ray import RayWorkers
from runs import Child, flags, num_rows, reproducible, rows, train, trainer_bytes, write_prompts

pytestmark = pytest.mark.nightly

NUM, WARM_UP, KILLED_AT = 5, 3, 2
PPO: dict[str, Any] = {
    "advantage_estimator": "ppo",
    "critic_lr": 0.1,
    "num_critic_only_steps": WARM_UP,
    "normalize_advantages": True,
    "kl_coef": 0.01,
    "optimizer": "sgd",  # Adam would divide gradients that are rounding noise by themselves
    "lr": 0.1,
    "lr_decay_style": "constant",  # the children run train.py, which has Megatron's default
    "num_rollout": NUM,
    "save_interval": 1,
}
CLOSE = (
    *("train/critic-value_loss", "train/critic-grad_norm", "train/critic-explained_variance", "train/loss"),
    *("train/grad_norm", "rollout/values", "rollout/returns", "rollout/raw_reward", "rollout/response_len/mean"),
)


def test_a_critic_on_ranks_trains_as_in_one_process_and_resumes_bitwise_after_a_kill_in_its_warm_up(
    forked: Any, ray_workers: RayWorkers, model: Path, tmp_path: Path
) -> None:
    data = write_prompts(tmp_path / "prompts.jsonl")

    def argv(name: str, **changes: Any) -> list[str]:
        save = tmp_path / name / "save"
        (tmp_path / name).mkdir(exist_ok=True)
        return flags(model, data, tmp_path / name / "run", load=save, save=save, **PPO, **changes)

    def finished(name: str, attempt: object = 0) -> list[dict[str, Any]]:
        run = Child(forked, argv(name, **on_ranks), tmp_path / name, attempt, prepare=ray_workers.use)
        run.process.join(240)
        assert run.process.exitcode == 0, run.log.read_text()
        found = rows(tmp_path / name / "run")
        for phase in ("sleep", "wake_up", "offload_rollout", "onload_rollout"):  # of trainer and engines, in turn
            assert all(row[f"perf/{phase}_time"] > 0 for row in found), phase
        return [
            {key: value for key, value in reproducible(row).items() if not key.startswith("engine/")} for row in found
        ]

    on_ranks = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "colocate": True}
    assert train(argv("alone")) == NUM
    straight = finished("straight")
    for there, here in zip(straight, rows(tmp_path / "alone" / "run"), strict=True):
        assert {name for name in CLOSE if name in there} == {name for name in CLOSE if name in here}
        for name in CLOSE:
            if name in here:
                assert there[name] == pytest.approx(here[name], rel=1e-3, abs=2e-5), (there["step"], name)
    assert ["train/loss" in row for row in straight] == [False] * WARM_UP + [True] * (NUM - WARM_UP)

    killed = Child(forked, argv("killed", **on_ranks), tmp_path / "killed", "first", prepare=ray_workers.use)
    deadline = time.monotonic() + 240
    while num_rows(killed.folder) < KILLED_AT:
        assert killed.process.is_alive(), killed.log.read_text()
        assert time.monotonic() < deadline, killed.log.read_text()
        time.sleep(0.02)
    killed.kill()
    assert finished("killed", "second") == straight
    assert trainer_bytes(tmp_path / "killed" / "save", NUM) == trainer_bytes(tmp_path / "straight" / "save", NUM)
