"""Every outcome of an episode is reached by generate functions, agents over HTTP, commands and environments alike."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from furlong import InfraError, policy
from furlong.core.sample import Group, Sample, Status
from furlong.environments import Step
from furlong.rollout import agent_function, environment_episode
from furlong.rollout.environment_workers import close_environment_workers
from furlong.rollout.episode_limits import EpisodeLimits
from furlong.rollout.sample_metrics import rollout_metrics
from furlong.sandboxes.supervised_process import MARK
from furlong.sessions.session_server import SessionServer
from scripted_episodes import chat_format, play

pytestmark = pytest.mark.slow  # limits of time are waited for
# What the agent of a sample does after two turns, and how its episode ends: limit, kind of outcome, status.
ENDS: dict[str, tuple[str, str, Status]] = {
    "answer": ("", "", Status.COMPLETED),
    "go_on": ("turns", "", Status.TRUNCATED),
    "hang": ("tool_time", "", Status.TRUNCATED),
    "wait": ("episode_time", "", Status.TRUNCATED),
    "raise": ("", "failed", Status.FAILED),
    "lose_once": ("", "", Status.COMPLETED),
    "lose": ("", "infra", Status.FAILED),
}
LIMITS = EpisodeLimits(max_turns=9, tool_s=2.0, episode_s=3.0)
COUNTS = {"policy_limit": 2, "agent_error": 2, "infra": 1, "reissued": 2}
AGENT = """
import json, os, sys, time, urllib.request

task, messages = json.load(sys.stdin), []
for turn in range(1000):
    if turn == 2 and task["metadata"]["do"] in ("answer", "raise", "lose_once", "lose"):
        sys.exit(task["metadata"]["do"] == "raise")
    if turn == 2 and task["metadata"]["do"] == "hang":
        time.sleep(1000)
    if task["metadata"]["do"] == "wait":
        time.sleep(0.9 if turn else 0)
    messages.append({"role": "user", "content": f"turn {turn}"})
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url, body = os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps({"messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        messages.append(json.load(reply)["choices"][0]["message"])
"""
lost: set[int] = set()


async def behave(do: str, turn: int, key: int) -> bool:
    """Do what the agent does before a turn; returns whether it ends."""
    if do == "wait" and turn:
        await asyncio.sleep(0.5)
    if turn != 2 or do in ("go_on", "wait"):
        return False
    if do == "hang":
        await asyncio.sleep(1000)
    if do == "raise":
        raise ValueError("a bug")
    if do == "lose" or (do == "lose_once" and key not in lost):
        lost.update([key] if do == "lose_once" else [])
        raise InfraError("the sandbox is gone")
    return True


async def with_policy(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    messages: list[Any] = []
    for turn in range(1000):
        if await behave(sample.metadata["do"], turn, 0):
            return sample
        messages.append({"role": "user", "content": f"turn {turn}"})
        reply = await policy().chat(messages)
        if not reply.tokens:
            return sample
        messages.append(reply.message)
    raise AssertionError


async def solve(base_url: str, metadata: dict[str, Any]) -> None:
    messages: list[Any] = []
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:
        for turn in range(1000):
            if await behave(metadata["do"], turn, 1):
                return
            messages.append({"role": "user", "content": f"turn {turn}"})
            reply = await client.post("/v1/chat/completions", json={"messages": messages})
            messages.append(reply.raise_for_status().json()["choices"][0]["message"])


class Playing:
    def reset(self, task: Any, seed: int) -> str:
        self.do, self.turn, self.folder = task.metadata["do"], 0, Path(task.metadata["folder"])
        return "turn 0"

    def step(self, message: Any) -> Step:
        self.turn += 1
        if self.do == "wait":
            time.sleep(0.5)
        if self.turn == 2 and self.do in ("answer", "hang", "raise", "lose", "lose_once"):
            if self.do == "hang":
                time.sleep(1000 if MARK in os.environ else 3)
            if self.do == "raise":
                raise ValueError("a bug")
            if self.do == "lose" or (self.do == "lose_once" and not (self.folder / "lost").exists()):
                if self.do == "lose_once":
                    (self.folder / "lost").touch()
                raise InfraError("the sandbox is gone")
            return Step(done=True, reward=1.0)
        return Step(f"turn {self.turn}", 0.0)


def ended(
    generate: Any, tmp_path: Path, *, ends: dict[str, Any], limits: EpisodeLimits = LIMITS, **flags: Any
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

    defaults = {"agent_function_path": None, "agent_command": None, "custom_rm_path": "own.py:fn", "rm_type": None}
    defaults |= {"agent_memory_limit": None, "rollout_seed": 1, "env_workers": ("thread", "8"), "environment": ()}
    server = SessionServer(model_name="models/tiny")
    lost.clear()
    chat_format()  # its template is proven here, outside the limits
    return play(
        told, lambda _: "3", num_samples=len(names), label=0.5, args=defaults | flags, limits=limits,
        session_server=server,
    )  # fmt: skip


def check(samples: list[Sample], ends: dict[str, tuple[str, str, Status]], counts: dict[str, int]) -> None:
    for sample, (name, (limit, kind, status)) in zip(samples, ends.items(), strict=True):
        seen = sample.metadata.get("episode_limit", ""), sample.outcome.kind if sample.outcome else "", sample.status
        assert (name, *seen) == (name, limit, kind or "scored", status)
        assert (sample.reward is None) == (status is Status.FAILED)
        assert status is Status.FAILED or sum(sample.loss_mask or []) >= 4, "partial episodes keep their tokens"
    metrics = rollout_metrics([Group(0, samples)])
    prefix = "rollout/episodes/"
    found = {key.removeprefix(prefix): each.value for key, each in metrics.items() if key.startswith(prefix)}
    assert found == counts


def test_of_a_generate_function(tmp_path: Path):
    check(ended(with_policy, tmp_path, ends=ENDS), ENDS, COUNTS)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_of_an_environment(kind: str, tmp_path: Path):
    samples = ended(
        environment_episode.generate, tmp_path, ends=ENDS, environment=(f"{__file__}:Playing",), env_workers=(kind, "8")
    )
    check(samples, ENDS, COUNTS)


def test_of_an_agent_function(tmp_path: Path):
    samples = ended(agent_function.generate, tmp_path, ends=ENDS, agent_function_path=f"{__file__}:solve")
    scored = ENDS | {"raise": ("", "", Status.COMPLETED)}
    check(samples, scored, COUNTS)


def test_of_a_command(tmp_path: Path):
    (tmp_path / "agent.py").write_text(AGENT)
    ends = {name: end for name, end in ENDS.items() if not name.startswith("lose")}
    ends["raise"] = ("", "", Status.COMPLETED)
    command = f"{sys.executable} -I -S {tmp_path}/agent.py"
    limits = EpisodeLimits(max_turns=9, tool_s=4.0, episode_s=6.0)  # programs take a while to start
    samples = ended(agent_function.generate, tmp_path, ends=ends, agent_command=command, limits=limits)
    check(samples, ends, {"policy_limit": 2, "agent_error": 2})
    assert json.dumps(samples[4].metadata["agent_error"])
