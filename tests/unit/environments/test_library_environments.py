"""Environments of other libraries: with the library where it is installed, and over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from furlong.config.environment_specs import PLUGS, class_path, parse_environments
from furlong.environments.nemo_gym import NemoGym
from furlong.environments.protocol import Task
from furlong.errors import ConfigError, InfraError, RolloutError
from supervised_commands import live_commands

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ROW = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "1+1?"}],
        "instructions": "use the tool",
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}],
    },
    "expected": "2",
}


def test_prefixes_name_classes_with_the_rest_as_target():
    (spec,) = parse_environments(("nemo-gym:http://host:1/x?name=n&timeout_s=3",))
    assert (spec.path, spec.name, spec.arguments) == (
        "furlong.environments.nemo_gym:NemoGym", "n", {"target": "http://host:1/x", "timeout_s": 3},
    )  # fmt: skip
    (spec,) = parse_environments(("nemo-gym:http://host:1/x",))
    assert spec.name == "http-host-1-x"
    assert class_path("file.py:Class?a=1") == "file.py:Class"
    with pytest.raises(ConfigError, match="names nothing"):
        parse_environments(("nemo-gym:",))


@pytest.mark.parametrize("prefix", ["gym", "openenv", "verifiers"])
def test_a_missing_library_is_an_error_with_the_command_that_installs_it(prefix, monkeypatch):
    monkeypatch.setattr("furlong.config.environment_specs.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install 'furlong-rl\[{PLUGS[prefix][2]}\]'"):
        parse_environments((f"{prefix}:absent-{prefix}",))


def nemo(handler: Any) -> NemoGym:
    made = NemoGym("http://gym")
    made._client = httpx.AsyncClient(base_url="http://gym", transport=httpx.MockTransport(handler))
    return made


def test_nemo_gym_runs_tools_in_one_session_and_verifies_the_episode():
    seen: list[tuple[str, Any, str]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        seen.append((request.url.path, body, request.headers.get("cookie", "")))
        if request.url.path == "/seed_session":
            return httpx.Response(200, json={}, headers={"set-cookie": "session=7"})
        if request.url.path == "/add":
            return httpx.Response(200, json={"sum": 2})
        return httpx.Response(200, json={"reward": 0.5, "note": "x", "steps": 3})

    async def main() -> None:
        env = nemo(handler)
        first = await env.reset(Task("", metadata=ROW), 0)
        assert [message["role"] for message in first.messages] == ["system", "user"]
        assert first.tools == [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        step = await env.step({"role": "assistant", "content": None, "tool_calls": [CALL]})
        assert list(step.messages) == [{"role": "tool", "tool_call_id": "c1", "content": '{"sum": 2}'}]
        unknown = {**CALL, "function": {"name": "seed_session", "arguments": "{}"}}
        refused: Any = (await env.step({"content": "", "tool_calls": [unknown]})).messages
        assert "no tool" in refused[0]["content"]
        last = await env.step({"role": "assistant", "content": "2"})
        assert (last.reward, last.done, last.info) == (0.5, True, {"reward": 0.5, "steps": 3})
        await env.close()

    asyncio.run(main())
    assert [path for path, _, _ in seen] == ["/seed_session", "/add", "/verify"]
    assert seen[1][2] == "session=7"
    verified = seen[2][1]
    assert verified["expected"] == "2"
    kinds = [item["type"] for item in verified["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"] * 2 + ["message"]


def test_nemo_gym_tells_a_lost_server_from_a_wrong_row():
    def down(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(InfraError, match="refused"):
        asyncio.run(nemo(down).reset(Task("", metadata=ROW), 0))
    with pytest.raises(InfraError, match="500"):
        asyncio.run(nemo(lambda _: httpx.Response(500)).reset(Task("", metadata=ROW), 0))
    with pytest.raises(RolloutError, match="responses_create_params"):
        asyncio.run(nemo(down).reset(Task("", metadata={}), 0))


def test_gymnasium_environments_take_numbers_and_keep_their_seed():
    pytest.importorskip("gymnasium", reason="needs the extra gym")
    from furlong.environments.gymnasium_text import GymnasiumText

    env = GymnasiumText("FrozenLake-v1", is_slippery=False)
    assert env.reset(Task(""), 1) == "0"
    assert env.step({"content": "no idea"}).info == {"no_action": 1}
    assert env.step({"content": "9"}).info == {"no_action": 1}
    assert env.step({"content": "I go to 2"}).messages == "1"
    done = [env.step({"content": str(action)}) for action in (2, 1, 1, 1, 2)]
    assert (done[-1].reward, done[-1].done) == (1.0, True)
    env.close()
    with pytest.raises(ConfigError, match="Nope"):
        GymnasiumText.check_arguments("Nope")
    with pytest.raises(ConfigError, match="Box"):
        GymnasiumText.check_arguments("Pendulum-v1")


def evaluated(words: list[str], file: Path, workers: str) -> list[Any]:
    """Evaluate an environment in threads or processes; return the records, without times and transcripts."""
    from furlong.cli import main

    more = ["-o", str(file), "--eval-max-response-len", "4", "--env-workers", workers, "2"]
    assert main(["eval", *words, *more]) == 0
    assert live_commands() == {}
    rows = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    keys = ("task", "sample", "reward", "parts", "turns", "outcome", "info")
    return sorted([row[key] for key in keys] for row in rows)


def test_gymnasium_environments_are_the_same_in_processes(tmp_path, model):
    pytest.importorskip("gymnasium", reason="needs the extra gym")
    words = ["gym:FrozenLake-v1?is_slippery=false", "--hf-checkpoint", str(model), "-n", "3", "--max-turns", "3"]
    rows = [evaluated(words, tmp_path / f"{workers}.jsonl", workers) for workers in ("thread", "process")]
    assert len(rows[0]) == 3
    assert rows[0] == rows[1]


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_tasksets_of_verifiers_are_played_over_a_session(workers, tmp_path, model, monkeypatch):
    pytest.importorskip("verifiers.v1", reason="needs the extra verifiers")
    from furlong.cli import main

    (tmp_path / "two_digits.py").write_text(
        "import verifiers.v1 as vf\n\n\n"
        "class DigitTask(vf.Task[vf.TaskData]):\n"
        "    @vf.reward(weight=0.5)\n"
        "    async def short(self, trace) -> float:\n"
        "        return float(len(trace.last_reply) < 100)\n\n\n"
        "class TwoDigits(vf.Taskset[DigitTask, vf.TasksetConfig]):\n"
        "    def load(self):\n"
        "        for a in range(3):\n"
        "            yield DigitTask(vf.TaskData(prompt=f'{a}+1='), self.config.task)\n\n\n"
        "__all__ = ['TwoDigits']\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["verifiers:two_digits?harness=null", "--hf-checkpoint", str(model), "-n", "2"]
    rows = evaluated(words, tmp_path / "v.jsonl", workers)
    assert [row[2:5] for row in rows] == [[0.5, {"short": 0.5}, 1]] * 2
    assert main(["eval", "verifiers:absent_taskset", *words[1:3], "--env-workers", workers, "2"]) == 2


SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class EchoAction(Action):
    message: str = ""


class EchoObservation(Observation):
    text: str = ""


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.turns = 0
        return EchoObservation(text=f"seed {seed}")

    def step(self, action, timeout_s=None, **more):
        self.turns += 1
        return EchoObservation(text=action.message, done=self.turns == 2, reward=float(len(action.message)))

    @property
    def state(self):
        return State(step_count=self.turns)


app = create_app(Echo, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


def test_servers_of_openenv_have_a_session_for_each_episode(tmp_path, model):
    pytest.importorskip("openenv.core", reason="needs the extra openenv")
    import subprocess
    import time

    from furlong.environments.openenv_client import OpenEnvClient
    from runs import free_ports

    (port,) = free_ports(1)
    (tmp_path / "server.py").write_text(SERVER)
    process = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(port)])

    async def main() -> None:
        env = OpenEnvClient(f"http://127.0.0.1:{port}", observation_key="text")
        deadline = time.monotonic() + 120
        while True:
            try:
                first = await env.reset(Task("x"), 5)
                break
            except InfraError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
        assert first == "seed 5"
        step = await env.step({"content": "abc"})
        assert (step.messages, step.reward, step.done) == ("abc", 3.0, False)
        last = await env.step({"content": '{"message": "four"}'})
        assert (last.reward, last.done) == (4.0, True)
        await env.close()

    words = [f"openenv:http://127.0.0.1:{port}?observation_key=text", "--hf-checkpoint", str(model), "-n", "3"]
    try:
        asyncio.run(main())
        rows = [evaluated(words, tmp_path / f"{workers}.jsonl", workers) for workers in ("thread", "process")]
        assert [row[4] for row in rows[0]] == [2] * 3
        assert rows[0] == rows[1]
    finally:
        process.kill()
        process.wait()
    with pytest.raises(InfraError):
        asyncio.run(OpenEnvClient(f"http://127.0.0.1:{port}").reset(Task("x"), 1))
