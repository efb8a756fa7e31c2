"""A mixture of environments in processes that is killed and resumed trains on what an uninterrupted run trains on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from furlong.data.audit import audit
from runs import Child, differences, flags, num_rows, reproducible, rows, write_prompts
from supervised_commands import live_commands

pytestmark = pytest.mark.nightly

NUM = 8
ENVIRONMENTS = """
import time

from furlong.environments import Rubric, Step


def digits(episode):
    return sum(character.isdigit() for character in episode.answer) / 8


def turns(episode):
    return len(episode.answers)


class Judged:
    rubric = Rubric(digits, metrics=[turns])

    def reset(self, task, seed):
        return task.prompt

    def step(self, message):
        time.sleep(0.02)
        return Step(done=True)


class Stepped:
    def __init__(self, rounds=2):
        self.left = rounds

    async def reset(self, task, seed):
        return f"{seed % 9}+1="

    async def step(self, message):
        self.left -= 1
        return Step("1+1=", reward=float("1" in message["content"]), done=self.left == 0)
"""


def command(model: Path, folder: Path) -> list[str]:
    data, few = write_prompts(folder / "prompts.jsonl", 20), write_prompts(folder / "few.jsonl", 3)
    (folder / "environments.py").write_text(ENVIRONMENTS)
    entries = ["Judged?weight=2&max_turns=1", f"Stepped?rounds=2&prompt_data={few}"]
    changes: dict[str, Any] = {
        "num_rollout": NUM, "rm_type": None, "save": folder / "save", "load": folder / "save", "save_interval": 1,
        "rollout_shuffle": True, "rollout_max_response_len": 6, "num_reward_workers": 1,
        "eval_prompt_data": ["Stepped", str(few)], "eval_interval": 4, "env_workers": ["process", "2"],
    }  # fmt: skip
    words = flags(model, data, folder / "run", **changes)
    return [*words, "--environment", *(f"{folder}/environments.py:{entry}" for entry in entries)]


def test_a_killed_mixture_of_environments_resumes_exactly_and_accounts_for_every_prompt(model, tmp_path, forked):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    reference = Child(forked, command(model, whole), whole)
    reference.process.join(180)
    assert reference.process.exitcode == 0, reference.log.read_text()
    argv = command(model, killed)
    for attempt in range(2):
        run = Child(forked, argv, killed, attempt)
        before, deadline = num_rows(killed), time.monotonic() + 120
        while run.process.is_alive() and num_rows(killed) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert run.process.is_alive(), run.log.read_text()
        assert live_commands(run.process.pid), "environments run in processes"
        run.kill()
        deadline = time.monotonic() + 10
        while live_commands(run.process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert live_commands(run.process.pid) == {}
    last = Child(forked, argv, killed, "last")
    last.process.join(180)
    assert last.process.exitcode == 0, last.log.read_text()

    result = audit(killed / "run" / "ledger.jsonl", finished=True)
    assert result.ok, result.summary()
    assert result.num_trained == NUM * 4
    by_step = {row["step"]: reproducible(row) for row in rows(killed / "run")}
    expected = {row["step"]: reproducible(row) for row in rows(whole / "run")}
    assert differences([by_step[step] for step in sorted(by_step)], [expected[step] for step in sorted(expected)]) == []
    assert expected[NUM]["env/Judged/reward/turns"] == 1.0
    assert expected[NUM]["env/Stepped/turns"] == 2.0
    assert "eval/Stepped" in expected[NUM]
    episodes = [sum(row[f"env/{name}/episodes"] for row in expected.values() if f"env/{name}/episodes" in row)
                for name in ("Judged", "Stepped")]  # fmt: skip
    assert abs(episodes[0] - 2 * episodes[1]) <= 8
