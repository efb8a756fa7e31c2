"""Agents and an environment that end their episode in the way that `metadata["do"]` names, after two turns."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httpx

from furlong import InfraError, policy
from furlong.core.sample import Sample
from furlong.core.supervised_process import MARK
from furlong.environments import Step

AGENT = """
import json, os, sys, time, urllib.request

task, messages = json.load(sys.stdin), []
for turn in range(1000):
    if turn == 2 and task["metadata"]["do"] in ("answer", "raise", "lose_once", "lose"):
        sys.exit(task["metadata"]["do"] == "raise")
    if turn == 2 and task["metadata"]["do"] == "hang":
        time.sleep(1000)
    messages.append({"role": "user", "content": f"turn {turn}"})
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url, body = os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps({"messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        messages.append(json.load(reply)["choices"][0]["message"])
"""


async def behave(metadata: dict[str, Any], turn: int) -> bool:
    """Do what the agent does before a turn; returns whether it ends."""
    do, lost = metadata["do"], Path(metadata["folder"]) / "lost"
    if turn != 2 or do == "go_on":
        return False
    if do == "hang":
        await asyncio.sleep(1000)
    if do == "raise":
        raise ValueError("a bug")
    if do == "lose" or (do == "lose_once" and not lost.exists()):
        if do == "lose_once":
            lost.touch()
        raise InfraError("the sandbox is gone")
    return True


async def with_policy(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    messages: list[Any] = []
    for turn in range(1000):
        if await behave(sample.metadata, turn):
            return sample
        messages.append({"role": "user", "content": f"turn {turn}"})
        reply = await policy().chat(messages)
        if not reply.tokens:
            return sample
        messages.append(reply.message)
    raise AssertionError


async def solve(base_url: str, metadata: dict[str, Any]) -> None:
    messages: list[Any] = []
    async with httpx.AsyncClient(base_url=base_url, timeout=60, verify=False) as client:
        for turn in range(1000):
            if await behave(metadata, turn):
                return
            messages.append({"role": "user", "content": f"turn {turn}"})
            reply = await client.post("/v1/chat/completions", json={"messages": messages})
            messages.append(reply.raise_for_status().json()["choices"][0]["message"])


def solve_in_thread(base_url: str, metadata: dict[str, Any]) -> None:
    asyncio.run(solve(base_url, metadata))


class Playing:
    def reset(self, task: Any, seed: int) -> str:
        self.do, self.turn, self.folder = task.metadata["do"], 0, Path(task.metadata["folder"])
        return "turn 0"

    def step(self, message: Any) -> Step:
        self.turn += 1
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
