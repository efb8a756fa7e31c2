"""Agents that crash, hang, fork, stop, write too much or take too much: each is an outcome, and nothing is left."""

from __future__ import annotations

import socket
import sys
import tempfile
from pathlib import Path

import pytest

from furlong.cli import main
from furlong.core.sample import Status
from furlong.files.sample_file import load_samples
from runs import Child, flags, free_ports, marked_processes, rows, train
from supervised_commands import live_commands

pytestmark = pytest.mark.nightly  # two faults last until the time limit

AGENT = """
import json, os, signal, sys, tempfile, time, urllib.request

def launch():  # the number of this launch
    number = 0
    while True:
        try:
            os.mkdir(os.path.join(sys.argv[1], str(number)))
            return number
        except FileExistsError:
            number += 1

def ask(prompt):
    body = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))

faults = ("crash", "hang", "fork", "output", "stop", "memory", "silent", "closed")
task, number = json.load(sys.stdin), launch() % 16
fault = faults[number] if number < 8 else ""
tempfile.mkdtemp()
if fault == "silent":
    sys.exit()
ask(task["prompt"])
if fault == "crash":
    os.abort()
if fault == "hang":
    time.sleep(1000)
if fault == "fork" and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    time.sleep(1000)
if fault == "output":
    print("x" * 200_000)
    sys.stderr.write("y" * 200_000)
if fault == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
if fault == "memory":
    bytearray(2 << 30)
if fault == "closed":
    os.close(1)
    os._exit(0)
os.mkdir(os.path.join(sys.argv[1], str(number), fault or "well"))
"""


def test_each_fault_is_an_outcome_and_leaves_no_process_port_or_folder(model, data, tmp_path, monkeypatch):
    program, launches, temporary = tmp_path / "agent.py", tmp_path / "launches", tmp_path / "temporary"
    program.write_text(AGENT)
    launches.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (port,) = free_ports(1)
    dump = tmp_path / "samples_{rollout_id}.safetensors"
    command = f"{sys.executable} -I -S {program} {launches}"
    words = flags(
        model, data, tmp_path / "run",
        num_rollout=1, input_key="input", agent_command=command, agent_memory_limit=0.5, episode_timeout=15,
        session_server_port=port, save_debug_rollout_data=dump,
    )  # fmt: skip
    assert train(words) == 1

    assert len(list(launches.iterdir())) == 16
    samples = [
        sample for group in load_samples(Path(str(dump).format(rollout_id=0))).groups for sample in group.samples
    ]
    failed = [sample for sample in samples if sample.status is Status.FAILED]
    limited = [sample for sample in samples if sample.metadata.get("episode_limit") == "episode_time"]
    assert sorted(path.name for path in launches.glob("*/*")) == ["fork", "output", *["well"] * 8]
    assert len(failed) == 1  # it sampled nothing; the others that failed are scored
    assert len(limited) == 2
    assert len(samples) == 16
    for sample in samples:
        assert (sample.reward is None) == (sample in failed)
        assert sample in failed or sum(sample.loss_mask or [1] * sample.response_length) > 0
    log = (tmp_path / "run" / "run.log").read_text()
    assert "MemoryError" in log
    assert "without an answer" in log
    assert "exit code 134" in log or "SIGABRT" in log  # with and without a shell between
    row = rows(tmp_path / "run")[-1]
    cut = [sample for sample in samples if sample.status is Status.TRUNCATED and "agent_error" not in sample.metadata]
    assert set(map(id, limited)) <= set(map(id, cut)), "an answer that ends at the length limit counts as a limit, too"
    assert (row["rollout/episodes/agent_error"], row["rollout/episodes/policy_limit"]) == (3, len(cut))
    assert main(["report", str(tmp_path / "run"), "--finished"]) == 0

    assert live_commands() == {}
    assert list(temporary.iterdir()) == []
    with socket.create_server(("127.0.0.1", port)):
        pass


FUNCTION = """
import json, os, sys, tempfile, time, urllib.request


def launch(folder):  # the number of this launch
    number = 0
    while True:
        try:
            os.mkdir(os.path.join(folder, str(number)))
            return number
        except FileExistsError:
            number += 1


def solve(base_url, prompt, metadata):
    number, faults = launch(os.environ["LAUNCHES"]), os.environ["FAULTS"].split(",")
    fault = faults[number] if number < len(faults) else ""
    if fault == "silent":
        return {"said": fault}
    body = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()
    request = urllib.request.Request(base_url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request).read()
    if fault == "hang":
        time.sleep(1000)
    if fault == "output":
        print("x" * 200_000)
        sys.stderr.write("y" * 200_000)
    if fault == "exit":
        sys.exit(3)
    return {"said": fault or "well"}
"""


def test_faults_of_an_agent_function_in_a_thread_do_not_end_the_run(model, data, tmp_path, forked):
    faults = "hang,output,exit,silent"
    (tmp_path / "agent.py").write_text(FUNCTION)
    (tmp_path / "launches").mkdir()
    argv = flags(
        model, data, tmp_path / "run",
        num_rollout=1, input_key="input", agent_function_path=f"{tmp_path}/agent.py:solve", tool_timeout=6,
        save_debug_rollout_data=tmp_path / "samples_{rollout_id}.safetensors",
    )  # fmt: skip
    child = Child(forked, argv, tmp_path, LAUNCHES=str(tmp_path / "launches"), FAULTS=faults)
    child.process.join(120)
    assert child.process.exitcode == 0, child.log.read_text()
    samples = [each for group in load_samples(tmp_path / "samples_0.safetensors").groups for each in group.samples]
    for sample in samples:
        is_failed = sample.status is Status.FAILED
        assert (sample.reward is None) == is_failed
        assert is_failed or sum(sample.loss_mask or [1] * sample.response_length) > 0
    said = sorted(str(each.metadata["said"]) for each in samples if "said" in each.metadata)
    assert said == ["output", "silent", *["well"] * 12]
    assert [each.metadata["episode_limit"] for each in samples if "episode_limit" in each.metadata] == ["tool_time"]
    assert [each.status for each in samples].count(Status.FAILED) == 1
    [error] = [each.metadata["agent_error"] for each in samples if "agent_error" in each.metadata]
    assert "SystemExit: 3" in error
    assert main(["report", str(tmp_path / "run"), "--finished"]) == 0
    assert marked_processes(child.mark) == []
