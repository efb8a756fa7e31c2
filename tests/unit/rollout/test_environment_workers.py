"""Environments in worker processes: the same episodes as in threads, and faults that end one episode."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

import process_environments
from furlong.config.sections import RolloutFlags
from furlong.core.sample import Sample, Status
from furlong.rollout.environments import EnvironmentWorkers, close_environment_workers, generate
from scripted_episodes import play
from supervised_commands import live_commands

FILE = process_environments.__file__


def played(
    entry: str, *, workers: tuple[str, ...] = ("process", "2"), memory: float | None = None, **options: Any
) -> Any:
    """Play a group of which each sample answers with its number and the length of its conversation."""
    args = {
        "environment": (f"{FILE}:{entry}",), "custom_rm_path": None, "rm_type": None, "rollout_seed": 42,
        "env_workers": workers, "agent_memory_limit": memory,
    }  # fmt: skip

    async def closing(given: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        running.add(asyncio.current_task())
        try:
            sample.label = sample.index
            return await generate(given, sample, params)
        finally:
            running.discard(asyncio.current_task())
            if not running:
                await close_environment_workers()

    running: set[Any] = set()
    samples = play(closing, lambda text: f"{_number(text)} is said", args=args, **options)
    assert live_commands() == {}
    return samples


def _number(conversation: str) -> str:
    return conversation.partition("begin 1+2= ")[2].partition(" ")[0] or "0"


def processes(samples: list[Sample]) -> list[int]:
    return [sample.metadata["info"].pop("process") for sample in samples]


def facts(sample: Sample) -> dict[str, Any]:
    names = ("tokens", "loss_mask", "reward", "status", "metadata", "rollout_log_probs")
    return {name: getattr(sample, name) for name in names}


@pytest.mark.parametrize("entry", ["Counting?rounds=3", "Asynchronous"])
def test_episodes_are_those_of_threads_in_other_processes(entry: str):
    threads, workers = played(entry, workers=("thread", "4"), num_samples=5), played(entry, num_samples=5)
    assert {*processes(threads)} == {os.getpid()}
    places = processes(workers)
    assert os.getpid() not in places
    assert len({*places}) == 2
    assert [facts(sample) for sample in workers] == [facts(sample) for sample in threads]


def test_an_environment_in_a_process_may_lead_the_conversation():
    threads, workers = (played("Leading", workers=(kind, "1"), num_samples=2) for kind in ("thread", "process"))
    places = [
        {each.metadata.get("seen", {}).pop("process", None) for each in samples} for samples in (threads, workers)
    ]
    assert places[0] - {None} == {os.getpid()} != places[1] - {None}
    assert [facts(sample) for sample in workers] == [facts(sample) for sample in threads]
    assert workers[0].metadata["said"] == "0 is said"
    assert {sample.metadata["role"] for sample in workers} == {"policy", "judge"}


FAULTS = {
    "none": ("", ""),
    "crash": ("infra", "killed by SIGSEGV"),
    "hang": ("", "tool_time"),
    "stop": ("", "tool_time"),
    "fork": ("", ""),
    "child": ("", ""),
    "output": ("", ""),
    "memory": ("failed", "MemoryError"),
    "closed": ("", ""),
    "closed_range": ("infra", "ended in step"),
    "exit": ("infra", "exit code 0"),
    "sys_exit": ("failed", "SystemExit: 3"),
    "orphan": ("infra", "ended in step"),
    "infra": ("infra", "InfraError: the sandbox is gone"),
    "error": ("failed", "ValueError: a bug"),
    "timeout": ("timed_out", "TimeoutError: the server"),
    "value": ("failed", "object has no JSON form"),
    "wrong": ("failed", "the reward nan"),
}


def test_each_fault_ends_its_episode_and_no_other():
    entry = f"Faulty?faults={','.join(FAULTS)}"
    samples = played(
        entry, workers=("process", "4"), num_samples=len(FAULTS) + 5, memory=1.0, flags=RolloutFlags(tool_timeout=4)
    )
    assert len(samples) == len(FAULTS) + 5
    for sample, (fault, (kind, reason)) in zip(samples, [*FAULTS.items(), *[("", ("", ""))] * 5], strict=True):
        if kind:
            assert sample.outcome is not None
            assert (fault, sample.outcome.kind, sample.status) == (fault, kind, Status.FAILED)
            assert reason in sample.outcome.reason
        elif reason:
            assert (fault, sample.metadata["episode_limit"], sample.status) == (fault, reason, Status.TRUNCATED)
            assert sample.reward == 1.0
        else:
            assert (fault, sample.status, sample.reward) == (fault, Status.COMPLETED, 6.0)


@pytest.mark.parametrize("name", ["Batched", "AsyncBatched"])
def test_step_many_gets_the_steps_of_the_episodes_of_one_process(name: str):
    samples = played(f"{name}?rounds=3", workers=("process", "2"), num_samples=8)
    assert [sample.reward for sample in samples] == [6.0] * 8
    batches = [sample.metadata["info"].pop("batch") for sample in samples]
    assert len(set(processes(samples))) == 2
    assert max(batches) > 1
    threads = played("Counting?rounds=3", workers=("thread", "2"), num_samples=8)
    for sample in threads:
        sample.metadata["environment"] = name
    processes(threads)
    assert [facts(sample) for sample in samples] == [facts(sample) for sample in threads]


def test_faults_of_batched_steps_end_their_episodes_only():
    faults = {"crash": ("infra", "killed by SIGSEGV"), "error": ("failed", "ValueError: a bug"),
              "memory": ("failed", "MemoryError"), "value": ("failed", "object has no JSON form")}  # fmt: skip
    entry = f"FaultyBatched?faults={','.join(faults)}"
    samples = played(entry, num_samples=len(faults) + 4, memory=1.0)
    for sample, (kind, reason) in zip(samples, [*faults.values(), *[("", "")] * 4], strict=True):
        if kind:
            assert sample.outcome is not None
            assert sample.outcome.kind == kind
            assert reason in sample.outcome.reason
        else:
            assert (sample.status, sample.reward) == (Status.COMPLETED, 6.0)


def test_a_hang_of_step_many_ends_its_episodes_at_their_limit_with_their_process():
    samples = played("FaultyBatched?faults=hang", num_samples=3, flags=RolloutFlags(tool_timeout=1))
    limits = [sample.metadata.get("episode_limit") for sample in samples]
    assert limits[0] == "tool_time"
    assert {sample.reward for sample, limit in zip(samples, limits, strict=True) if limit is None} <= {6.0}


def test_time_that_other_episodes_occupy_a_process_does_not_count():
    entry, limits = "Counting?rounds=1&wait_s=0.4", RolloutFlags(tool_timeout=2.5)
    samples = played(entry, workers=("process", "1"), num_samples=8, flags=limits)
    assert [sample.reward for sample in samples] == [1.0] * 8


def test_processes_start_when_they_are_needed_and_again_after_they_end():
    async def main() -> None:
        workers = EnvironmentWorkers(3)
        fields = {"path": f"{FILE}:Counting", "instance": 0}
        async with workers.seat() as (first, _):
            await first.call("load", fields)
            assert [len(each) for each in live_commands().values()] == [2], "a supervisor and one process"
            async with workers.seat() as (second, _):
                assert second is not first
                await first.end()
        async with workers.seat() as (third, _):
            assert third is not first
            assert not third.ending
        await workers.close()

    asyncio.run(main())
    assert live_commands() == {}
