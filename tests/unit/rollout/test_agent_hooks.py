"""Set-up, teardown and abort beside agents, and agents that fail in the middle of an episode."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes_rollout import ScriptedEngine
from furlong.agent import policy
from furlong.core.sample import Group, Sample, Status
from furlong.core.supervised_process import ProcessLimits
from furlong.errors import HookError, InfraError, RolloutError
from furlong.interfaces import SamplingParams
from furlong.rollout import agents
from furlong.rollout.agents import AgentHooks, hook_beside, record_command_result, run_command
from furlong.rollout.metrics import rollout_metrics
from furlong.rollout.user_samples import complete_request
from furlong.sessions.session_server import SessionServer
from scripted_episodes import play


def test_hooks_run_once_and_teardown_in_reverse():
    calls: list[str] = []

    async def setup(args: Any) -> None:
        calls.append(f"setup {args}")

    first = SimpleNamespace(setup=setup, teardown=lambda args: calls.append("first down"))
    second = SimpleNamespace(teardown=lambda args: calls.append("second down"))

    async def main() -> None:
        hooks = AgentHooks({"one": first, "two": second, "three": SimpleNamespace()}, "args")
        await hooks.set_up()
        await hooks.tear_down()
        await hooks.tear_down()

    asyncio.run(main())
    assert calls == ["setup args", "second down", "first down"]


def test_a_failed_setup_is_named_and_torn_down():
    calls: list[str] = []

    def setup(args: Any) -> None:
        raise ValueError("no server")

    async def main() -> None:
        owner = SimpleNamespace(setup=setup, teardown=lambda args: calls.append("down"))
        hooks = AgentHooks({"--agent-function-path": owner}, None)
        with pytest.raises(HookError, match=r"--agent-function-path: setup.*no server"):
            await hooks.set_up()
        await hooks.tear_down()

    asyncio.run(main())
    assert calls == ["down"]


def test_setup_for_other_processes_cannot_assign_what_they_would_not_see():
    class Served:
        url = ""

        @classmethod
        def setup(cls, args: Any) -> None:
            cls.url = "http://127.0.0.1:1"

    async def set_up(*, has_processes: bool) -> None:
        hooks = AgentHooks({"--environment own.py:Served": Served}, None, has_processes=has_processes)
        try:
            await hooks.set_up()
        finally:
            await hooks.tear_down()

    asyncio.run(set_up(has_processes=False))
    Served.url = ""
    with pytest.raises(HookError, match=r"setup assigned url.*os.environ"):
        asyncio.run(set_up(has_processes=True))


def test_every_teardown_runs_although_one_fails():
    calls: list[str] = []

    def fail(args: Any) -> None:
        raise ValueError("stuck")

    async def main() -> None:
        hooks = AgentHooks({"a": SimpleNamespace(teardown=calls.append), "b": SimpleNamespace(teardown=fail)}, "args")
        await hooks.set_up()
        with pytest.raises(HookError, match="stuck"):
            await hooks.tear_down()

    asyncio.run(main())
    assert calls == ["args"]


def test_a_module_need_not_have_hooks(tmp_path: Path):
    (tmp_path / "no_hooks.py").write_text("setup = 3\ndef abort(sample): ...\n")
    assert hook_beside(f"{tmp_path}/no_hooks.py:solve", "setup") is None
    assert hook_beside(f"{tmp_path}/no_hooks.py:solve", "abort") is not None


def agent_args(**values: Any) -> dict[str, Any]:
    return {"agent_function_path": None, "agent_command": None, "custom_rm_path": None, "rm_type": None, **values}


def failing(monkeypatch: pytest.MonkeyPatch, num_calls: int) -> Any:
    async def run(args: Any, sample: Sample, sampling_params: Any) -> Any:
        for _ in range(num_calls):
            await policy().chat([{"role": "user", "content": "1+2="}])
        raise KeyError("answer")

    monkeypatch.setattr(agents, "_run", run)
    return agents.generate


def test_an_agent_that_fails_after_a_turn_is_scored_and_counted(monkeypatch: pytest.MonkeyPatch):
    generate = failing(monkeypatch, 1)
    (sample,) = play(generate, lambda _: "3", label=0.5, args=agent_args(custom_rm_path="reward.py:fn"))
    assert sample.reward == 0.5
    assert sample.status is Status.COMPLETED
    assert "KeyError" in sample.metadata["agent_error"]
    metrics = rollout_metrics([Group(0, [sample])])
    assert metrics["rollout/episodes/agent_error"].value == 1
    (sample,) = play(generate, lambda _: "3", args=agent_args())
    assert sample.reward == 0.0


def test_an_agent_that_fails_before_its_first_turn_fails_its_sample(monkeypatch: pytest.MonkeyPatch):
    (sample,) = play(failing(monkeypatch, 0), lambda _: "3", args=agent_args())
    assert sample.status is Status.FAILED


async def labelled(label: str) -> dict[str, Any]:
    await policy().chat([{"role": "user", "content": "1+2="}])
    return {"reward": float(label), "session_leaf": 0, "session_counts": "x", "session_turns": "many", "roles": 3}


def test_an_agent_gets_the_label_and_does_not_change_what_sessions_record():
    args = agent_args(agent_function_path=f"{__name__}:labelled", env_workers=("thread", "1"))
    for values in ({}, {"custom_rm_path": "reward.py:fn"}):
        server = SessionServer(model_name="tiny")
        samples = play(agents.generate, lambda _: "3", label="0.25", args=args | values, session_server=server)
        assert [sample.reward for sample in samples] == [0.25]
        assert rollout_metrics([Group(0, samples)])["session/turns"].value == 1


async def posting() -> int:
    """Post to the endpoint of the run with the seeds of both episodes; returns the turns that are counted here."""
    await policy().chat([{"role": "user", "content": "1+2="}])
    for seed in range(2):
        engine: Any = ScriptedEngine(lambda prompt, params: [7])
        await complete_request(engine, [5], SamplingParams(max_new_tokens=1, sampling_seed=seed))
    return policy().watch.num_turns


async def posting_beside_a_session(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    policy().open_session()
    sample.reward = await posting()
    return sample


def test_an_agent_does_not_use_up_the_turns_of_other_episodes():
    args = agent_args(agent_function_path=f"{__name__}:posting", env_workers=("thread", "1"))
    for function in (agents.generate, posting_beside_a_session):
        server = SessionServer(model_name="tiny")
        samples = play(function, lambda _: "3", num_samples=2, args=args, session_server=server)
        assert [sample.reward for sample in samples] == [1, 1]


def test_an_agent_that_is_killed_twice_has_crashed(monkeypatch: pytest.MonkeyPatch):
    num_runs = []

    async def killed(*_: Any) -> Any:
        num_runs.append(1)
        await policy().chat([{"role": "user", "content": "1+2="}])
        raise InfraError("--agent-command was killed from outside")

    monkeypatch.setattr(agents, "run_command", killed)
    args = agent_args(agent_command="agent", agent_env=(), agent_memory_limit=None)
    (sample,) = play(agents.generate, lambda _: "3", args=args, session_server=SessionServer(model_name="tiny"))
    assert (len(num_runs), sample.reward, sample.status) == (2, 0.0, Status.COMPLETED)
    assert "twice" in sample.metadata["agent_error"]


def test_an_agent_that_a_signal_from_outside_ends_is_infrastructure():
    for command in ("kill -9 $$", "sh -c 'kill -TERM $$'"):
        with pytest.raises(InfraError, match="from outside"):
            asyncio.run(run_command(command, "{}", {}, ProcessLimits()))
    for command in ("exit 3", "kill -SEGV $$"):
        with pytest.raises(RolloutError, match="--agent-command ended"):
            asyncio.run(run_command(command, "{}", {}, ProcessLimits()))


def test_nothing_that_a_command_prints_ends_the_run_or_changes_what_is_reported():
    args, deep = SimpleNamespace(**agent_args(custom_rm_path="reward.py:fn")), "[" * 900 + "]" * 900
    for line in ("[" * 5000, deep, f'{{"reward": 1, "n": {deep}}}'):
        assert asyncio.run(run_command(f"echo '{line}'", "{}", {}, ProcessLimits())) == line
    assert asyncio.run(run_command("echo '{\"n\": [[1]]}'", "{}", {}, ProcessLimits())) == {"n": [[1]]}
    sample = Sample(index=0, reward=0.5, metadata={"cases": 1})
    record_command_result(args, sample, {"raw_reward": "x", "round_number": 10**400, "cases": 2, "reward": 1, "n": 3})
    assert (sample.reward, sample.metadata) == (0.5, {"cases": 1, "n": 3})


def test_command_has_a_tmpdir_that_is_gone_at_its_end_and_without_one_the_machine_is_at_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = 'mkdir -p "$TMPDIR/a/b"; printf "%s" "$TMPDIR"'
    folder = asyncio.run(run_command(command, "{}", {}, ProcessLimits()))
    assert folder.startswith(f"{tmp_path}/furlong-")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(InfraError, match=r"TMPDIR cannot be made: .*absent"):
        asyncio.run(run_command(command, "{}", {}, ProcessLimits()))
