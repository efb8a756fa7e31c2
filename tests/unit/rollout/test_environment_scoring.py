"""A rubric may use the environment after the episode: it is closed afterwards, once, however the episode ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import judged_environments
from furlong.config.sections import RolloutFlags
from furlong.core.outcome import Outcome
from furlong.core.sample import Sample, Status
from furlong.environments import Rubric
from furlong.rollout.environments import close_environment_workers, generate
from furlong.rollout.episodes import EpisodeLoad
from scripted_episodes import play


async def by_rubric(samples: Any) -> list[Outcome]:
    values = await judged_environments.Workshop.rubric.of_group(None, samples)
    return [value if isinstance(value, Outcome) else Outcome.scored(value) for value in values]


def played(log: Path, fault: str = "", *, kind: str = "thread", reward_timeout: float = 0.5, **options: Any) -> Any:
    """Play an episode; returns the samples and what happened to the instances."""
    log.unlink(missing_ok=True)
    args = {
        "environment": (f"{judged_environments.__file__}:Workshop?log={log}&fault={fault}",), "custom_rm_path": None,
        "rm_type": None, "rollout_seed": 42, "env_workers": (kind, "1"), "agent_memory_limit": None,
        "reward_timeout": reward_timeout,
    }  # fmt: skip

    async def closing(given: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        return await generate(given, sample, params)

    async def scored(samples: Any) -> list[Outcome]:
        await close_environment_workers()
        return await by_rubric(samples)

    samples = play(closing, lambda _: "four", reward=scored, args=args, **options)
    return samples, log.read_text().split()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_functions_of_the_rubric_get_the_instance_before_it_is_closed(kind: str, tmp_path: Path):
    [sample], seen = played(tmp_path / "log", kind=kind)
    assert seen == ["made", "ready", "judged", "closed"]
    assert sample.metadata["rewards"] == {"left": 2.0, "slowly": 1.0, "answers": 2.0}
    assert sample.reward == pytest.approx(2.52)


def test_the_environment_is_closed_once_however_the_episode_ends(tmp_path: Path):
    whole, short = ["made", "ready", "judged", "closed"], ["made", "ready", "closed"]
    cases: list[tuple[str, dict[str, Any], list[str], str]] = [
        ("step_raises", {}, short, "ValueError: a bug"),
        ("step_hangs", {"flags": RolloutFlags(episode_timeout=0.3)}, whole, ""),
        ("step_hangs", {"flags": RolloutFlags(tool_timeout=0.3)}, whole, ""),
        ("", {"flags": RolloutFlags(max_turns=1)}, whole, ""),
        ("step_hangs", {"timeout_s": 0.3}, short, "no answer within 0.3 s"),
        ("slow_reset", {"flags": RolloutFlags(episode_timeout=0.2)}, short, "nothing was sampled within 0.2 s"),
        ("slow_close", {"flags": RolloutFlags(episode_timeout=9)}, whole, ""),
        ("judge_raises", {}, whole, "the rubric's left raised ValueError: a bug"),
        ("judge_text", {}, whole, "the rubric's left returned 'many'"),
        ("judge_hangs", {}, whole, "slowly did not return within 0.5 s (--reward-timeout)"),
        ("judge_blocks", {"kind": "process"}, whole, "left did not return within 0.5 s (--reward-timeout); the"),
        ("judge_infra", {}, whole * 2, "the sandbox is gone"),
    ]
    for fault, options, events, reason in cases:
        [sample], seen = played(tmp_path / "log", fault, **options)
        assert (fault, seen) == (fault, events)
        assert (sample.status is Status.FAILED) == bool(reason)
        assert reason in (sample.outcome.reason if reason else "")
        assert "step_hangs" not in fault or reason or sample.metadata["rewards"]["left"] == 2


def test_a_cancelled_episode_closes_its_environment_before_it_ends(tmp_path: Path):
    for fault in ("step_hangs", "slow_close"):

        async def client() -> None:
            while not (tmp_path / "log").exists() or "ready" not in (tmp_path / "log").read_text():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            raise KeyError("the run ends")

        with pytest.raises(KeyError):
            played(tmp_path / "log", fault, client=client)
        assert (tmp_path / "log").read_text().split()[-1] == "closed"


def test_an_episode_that_is_scored_does_not_hold_its_permit(tmp_path: Path):
    samples, seen = played(tmp_path / "log", "judge_hangs", num_samples=2, load=EpisodeLoad(1), reward_timeout=1.0)
    assert [sample.status for sample in samples] == [Status.FAILED] * 2
    assert seen.index("closed") > max(i for i, what in enumerate(seen) if what == "ready"), "it was generated meanwhile"


def test_a_value_of_another_place_is_not_taken_for_that_of_the_environment():
    sample = Sample(metadata={"messages": []}, status=Status.COMPLETED)
    [outcome] = asyncio.run(Rubric(judged_environments.left).of_group(None, [sample]))
    assert isinstance(outcome, Outcome)
    assert "left needs the environment of the episode" in outcome.reason
