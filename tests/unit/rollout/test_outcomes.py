"""Every outcome of an episode is reached by generate functions, agents over HTTP, commands and environments alike."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import ending_agents
from furlong.config.sections import RolloutFlags
from furlong.core.sample import Group, Sample, Status
from furlong.rollout import agents, environments
from furlong.rollout.environments import close_environment_workers
from furlong.rollout.metrics import rollout_metrics
from furlong.sessions.session_server import SessionServer
from scripted_episodes import play

# What the agent of a sample does after two turns, and how its episode ends: limit, kind of outcome, status.
ENDS: dict[str, tuple[str, str, Status]] = {
    "answer": ("", "", Status.COMPLETED),
    "go_on": ("turns", "", Status.TRUNCATED),
    "hang": ("tool_time", "", Status.TRUNCATED),
    "raise": ("", "failed", Status.FAILED),
    "lose_once": ("", "", Status.COMPLETED),
    "lose": ("", "infra", Status.FAILED),
}
LIMITS = RolloutFlags(max_turns=5, tool_timeout=2.5)
COUNTS = {"policy_limit": 1, "agent_error": 2, "infra": 1, "reissued": 2}


def ended(
    generate: Any,
    tmp_path: Path,
    *,
    ends: dict[str, Any],
    limits: RolloutFlags = LIMITS,
    timeout_s: float | None = None,
    **flags: Any,
) -> list[Sample]:
    """Play one group whose samples behave differently, and return its samples."""
    names, running = list(ends), [0]

    async def told(args: Any, sample: Sample, params: Any) -> Sample:
        sample.metadata |= {"do": names[sample.index or 0], "folder": str(tmp_path)}
        running[0] += 1
        try:
            return await generate(args, sample, params)
        finally:
            running[0] -= 1
            if not running[0]:
                await close_environment_workers()

    defaults = {
        "agent_function_path": None,
        "agent_command": None,
        "agent_env": (),
        "custom_rm_path": "own.py:fn",
        "rm_type": None,
    }
    defaults |= {"agent_memory_limit": None, "rollout_seed": 1, "env_workers": ("thread", "8"), "environment": ()}

    def played(num_samples: int, **options: Any) -> list[Sample]:
        server = SessionServer(model_name="models/tiny")
        return play(
            told, lambda _: "3", num_samples=num_samples, label=0.5, args=defaults | flags, session_server=server,
            **options,
        )  # fmt: skip

    played(1)  # what is done once in a process is not part of the limits
    return played(len(names), flags=limits, timeout_s=timeout_s)


def check(samples: list[Sample], ends: dict[str, tuple[str, str, Status]], counts: dict[str, int]) -> None:
    for sample, (name, (limit, kind, status)) in zip(samples, ends.items(), strict=True):
        seen = sample.metadata.get("episode_limit", ""), sample.outcome.kind if sample.outcome else "", sample.status
        assert (name, *seen) == (name, limit, kind or "scored", status)
        assert (sample.reward is None) == (status is Status.FAILED)
        assert status is Status.FAILED or sum(sample.loss_mask or []) >= 4, "partial episodes keep their tokens"
    metrics = rollout_metrics([Group(0, samples)])
    prefix = "rollout/episodes/"
    found = {key.removeprefix(prefix): each.value for key, each in metrics.items() if key.startswith(prefix)}
    limits = Counter(f"limit/{limit}" for limit, _, _ in ends.values() if limit)
    assert found == counts | limits


def test_of_a_generate_function(tmp_path: Path):
    check(ended(ending_agents.with_policy, tmp_path, ends=ENDS), ENDS, COUNTS)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_of_an_environment(kind: str, tmp_path: Path):
    samples = ended(
        environments.generate,
        tmp_path,
        ends=ENDS,
        environment=(f"{ending_agents.__file__}:Playing",),
        env_workers=(kind, "8"),
    )
    check(samples, ENDS, COUNTS)


@pytest.mark.parametrize("workers", [("thread", "8"), ("process", "4")])
@pytest.mark.parametrize("name", ["solve", "solve_in_thread"])
def test_of_an_agent_function(name: str, workers: tuple[str, str], tmp_path: Path):
    path = f"{ending_agents.__file__}:{name}"
    samples = ended(agents.generate, tmp_path, ends=ENDS, agent_function_path=path, env_workers=workers)
    scored = ENDS | {"raise": ("", "", Status.COMPLETED)}
    check(samples, scored, COUNTS)


def test_an_agent_that_hangs_or_crashes_without_a_reward_function_gets_0(tmp_path: Path):
    path = f"{ending_agents.__file__}:solve"
    ends = {name: ENDS[name] for name in ("answer", "hang", "raise")}
    samples = ended(agents.generate, tmp_path, ends=ends, agent_function_path=path, custom_rm_path=None)
    assert [sample.reward for sample in samples] == [0.5, 0.0, 0.0]  # that of the row, where the agent ends


@pytest.mark.parametrize("limits", [RolloutFlags(), RolloutFlags(tool_timeout=9)])
def test_an_agent_that_exceeds_the_generate_timeout_counts_as_crashed(limits: RolloutFlags, tmp_path: Path):
    path = f"{ending_agents.__file__}:solve"
    ends = {name: ENDS[name] for name in ("answer", "hang")}
    samples = ended(
        agents.generate,
        tmp_path,
        ends=ends,
        limits=limits,
        agent_function_path=path,
        custom_rm_path=None,
        timeout_s=1.5,
    )
    assert [(sample.reward, sample.status) for sample in samples] == [(0.5, Status.COMPLETED), (0.0, Status.COMPLETED)]
    assert "not finished within 1.5 s (--generate-timeout)" in samples[1].metadata["agent_error"]
    assert sum(samples[1].loss_mask or []) >= 4


def test_of_a_command(tmp_path: Path):
    (tmp_path / "agent.py").write_text(ending_agents.AGENT)
    ends = {name: end for name, end in ENDS.items() if not name.startswith("lose")}
    ends["raise"] = ("", "", Status.COMPLETED)
    command = f"{sys.executable} -I -S {tmp_path}/agent.py"
    limits = RolloutFlags(max_turns=5, tool_timeout=5.0)  # programs take a while to start
    samples = ended(agents.generate, tmp_path, ends=ends, agent_command=command, limits=limits)
    check(samples, ends, {"policy_limit": 1, "agent_error": 2})
    assert "exit code 1" in samples[3].metadata["agent_error"]
