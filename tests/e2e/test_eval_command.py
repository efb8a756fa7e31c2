"""`furlong eval` as its user runs it: a folder of weights and an endpoint, data and environments."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from furlong.cli import main
from runs import FORKED, command_in_child
from served_engine import serve_process
from supervised_commands import live_commands

pytestmark = pytest.mark.nightly  # loads models

ENVIRONMENT = """
from furlong.environments import Step


class Twice:
    def reset(self, task, seed):
        self.seed, self.rounds = seed, 0
        return f"{seed % 10}+1="

    def step(self, message):
        self.rounds += 1
        value = len(message["content"]) + self.seed % 7
        return Step("again", reward=float(value % 2), done=self.rounds == 2, info={"episode": self.seed})
"""


def records(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return sorted(rows, key=lambda row: (row["task"], row["sample"]))


def values(path: Path) -> list[Any]:
    """Return what does not depend on time or on how tokens are counted."""
    return [[row[key] for key in ("task", "sample", "reward", "outcome", "turns", "info")] for row in records(path)]


@pytest.fixture(scope="module")
def served(model):
    with serve_process(model) as (_, url):
        yield f"{url}/v1"


def test_a_folder_and_an_endpoint_of_it_are_evaluated_alike(model, served, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "twice.py").write_text(ENVIRONMENT)
    words = ["eval", f"{tmp_path}/twice.py:Twice", "-n", "3", "-k", "2", "--eval-max-response-len", "4"]
    assert main([*words, "--hf-checkpoint", str(model), "-o", "folder.jsonl"]) == 0
    assert main([*words, "--base-url", served, "-o", "endpoint.jsonl", "--json"]) == 0
    out = capsys.readouterr().out
    summary = json.loads(out[out.index("{") :])["sets"][0]
    assert (summary["tasks"], summary["samples"], summary["turns"]) == (3, 6, 2.0)
    assert len(values(Path("folder.jsonl"))) == 6
    assert {row["turns"] for row in records(Path("endpoint.jsonl"))} == {2}
    assert all(row["tokens"] <= 8 for row in records(Path("endpoint.jsonl")))
    (tmp_path / "tasks.jsonl").write_text('{"input": "1+1="}\n{"input": "2+1="}\n')
    words[1] += "?prompt_data=tasks.jsonl"
    assert main([*words, "--base-url", served, "-o", "tasks-of-it.jsonl"]) == 0
    assert len(records(Path("tasks-of-it.jsonl"))) == 4


def test_data_is_scored_and_resumed(model, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["eval", str(data), "--hf-checkpoint", str(model), "--label-key", "label", "--rm-type", "math"]
    words += ["-k", "2", "--eval-max-response-len", "4", "-o", "sums.jsonl"]
    assert main([*words, "-n", "3"]) == 0
    before = Path("sums.jsonl").read_text()
    assert main([*words, "-n", "5"]) == 2  # exists
    assert main([*words, "-n", "5", "--resume"]) == 0
    assert set(before.splitlines()) < set(Path("sums.jsonl").read_text().splitlines())
    assert len(records(Path("sums.jsonl"))) == 10
    assert "pass@2" in capsys.readouterr().out


def test_an_agent_function_is_evaluated_and_a_wrong_url_ends_the_evaluation(
    served, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "solver.py").write_text(
        "import httpx\n\n\n"
        "async def solve(base_url, prompt, request_kwargs):\n"
        "    body = {'messages': [{'role': 'user', 'content': prompt}], **request_kwargs}\n"
        "    async with httpx.AsyncClient(timeout=60) as client:\n"
        "        (await client.post(base_url + '/v1/chat/completions', json=body)).raise_for_status()\n"
    )
    words = ["eval", str(data), "--label-key", "label", "--rm-type", "math", "-n", "2", "--eval-max-response-len", "4"]
    agent = ["--agent-function-path", f"{tmp_path}/solver.py:solve"]
    assert main([*words, *agent, "--base-url", served, "-o", "agent.jsonl"]) == 0
    assert [row["outcome"] for row in records(Path("agent.jsonl"))] == ["policy_limit"] * 2
    assert main([*words, "--base-url", served + "x", "-o", "wrong.jsonl"]) == 2
    assert "404" in capsys.readouterr().err


HOOKED = """
import os
from pathlib import Path

from furlong.environments import Step

LOG = Path(os.environ["HOOK_LOG"])


def write(line):
    with LOG.open("a") as file:
        file.write(line + "\\n")


class Hooked:
    @staticmethod
    def setup(args):
        write(f"setup {args.n_samples_per_eval_prompt}")
        if os.environ.get("SETUP_FAILS"):
            raise ValueError("no database")

    @staticmethod
    async def teardown(args):
        write("teardown")

    def reset(self, task, seed):
        return "1+1="

    def step(self, message):
        write("step")
        return Step(reward=1.0, done=True)

    def close(self):
        write("close")
"""


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_set_up_and_teardown_of_an_environment_surround_the_evaluation(workers, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOOK_LOG", str(tmp_path / "log"))
    (tmp_path / "hooked.py").write_text(HOOKED)
    words = ["eval", f"{tmp_path}/hooked.py:Hooked", "--hf-checkpoint", str(model), "-n", "3", "-k", "2"]
    words += ["--eval-max-response-len", "4", "--env-workers", workers, "2"]
    assert main(words) == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("setup 2", "teardown")
    assert sorted(lines[1:-1]) == ["close"] * 6 + ["step"] * 6
    assert live_commands() == {}
    (tmp_path / "log").unlink()
    monkeypatch.setenv("SETUP_FAILS", "1")
    assert main([*words, "--output", "second.jsonl"]) != 0
    assert (tmp_path / "log").read_text().split() == ["setup", "2", "teardown"]
    assert "no database" in capsys.readouterr().err
    assert not Path("second.jsonl").exists()


def test_an_evaluation_that_is_killed_resumes_to_the_records_of_a_whole_one(model, tmp_path):
    (tmp_path / "twice.py").write_text(
        "import time\n" + ENVIRONMENT.replace("self.rounds += 1", "self.rounds += 1; time.sleep(0.05)")
    )
    words = ["eval", f"{tmp_path}/twice.py:Twice", "--hf-checkpoint", str(model), "-n", "16", "-k", "2"]
    words += ["--eval-max-response-len", "4", "--concurrency", "2", "--env-workers", "process", "2"]
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert main([*words, "-o", str(whole)]) == 0
    process = FORKED.Process(target=command_in_child, args=([*words, "-o", str(killed)], tmp_path / "log.txt"))
    process.start()
    while process.is_alive() and _num_lines(killed) < 6:
        time.sleep(0.005)
    assert process.is_alive(), (tmp_path / "log.txt").read_text()
    process.kill()
    process.join()
    deadline = time.monotonic() + 10
    while live_commands(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert live_commands(process.pid) == {}
    assert _num_lines(killed) < _num_lines(whole)
    with killed.open("ab") as file:
        file.write(whole.read_bytes()[-40:-20])  # the kernel may write a part of what a killed process wrote
    assert main([*words, "-o", str(killed), "--resume"]) == 0
    assert len(values(killed)) == 32
    assert values(killed) == values(whole)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "nothing to evaluate"),
        (["--seed", "1", "--log-level", "INFO", "sums.jsonl"], "did you mean --prompt-data sums.jsonl"),
        (["--data", "sums.jsonl"], "use --prompt-data"),
        (["absent.jsonl"], "no file"),
        (["absent.py:Thing"], "absent"),
        (["episodes:0"], "episodes"),
        (["episodes:3", "-k", "0"], "--samples"),
        (["episodes:3", "--base-url", "host:1"], "http"),
        (["episodes:3", "--base-url", "http://host", "--extra-body", "[1]"], "JSON object"),
    ],
)
def test_wrong_commands_are_explained(words, text, model, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = [] if "--base-url" in words else ["--hf-checkpoint", str(model)]
    assert main(["eval", *words, "--rm-type", "random", *more]) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
