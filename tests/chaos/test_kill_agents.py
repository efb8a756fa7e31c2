"""A run that is killed with the programs of twenty agents in flight, and resumed."""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from furlong.data.audit import audit
from furlong.data.ledger import parse_event
from furlong.files.checkpoint_folder import read_state
from furlong.files.sample_file import load_samples
from furlong.loop.checkpoints import GROUPS
from runs import Child, flags, free_ports, num_rows, write_prompts
from supervised_commands import live_commands

pytestmark = pytest.mark.nightly

NUM = 7
AGENT = """
import json, os, sys, tempfile, time, urllib.request

def ask(messages):
    body = json.dumps({"messages": messages, "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))["choices"][0]["message"]

task = json.load(sys.stdin)
tempfile.mkdtemp()
if os.fork() == 0:  # a daemon in its own session
    os.setsid()
    os.close(1)
    time.sleep(1000)
messages = [{"role": "user", "content": task["prompt"]}]
for turn in range(2 + os.getpid() % 4):
    messages += [ask(messages), {"role": "user", "content": "1+1="}]
    time.sleep(0.05)
print(json.dumps({"reward": float(os.getpid() % 2)}))
"""


def assert_nothing_is_left(pid: int | None, port: int, temporary: Path) -> None:
    deadline = time.monotonic() + 10
    while (live_commands(pid) or list(temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert live_commands(pid) == {}
    assert list(temporary.iterdir()) == []
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_run_killed_with_twenty_agents_in_flight_resumes_with_a_clean_ledger(model, tmp_path, forked):
    data, temporary = write_prompts(tmp_path / "prompts.jsonl", 40), tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "agent.py").write_text(AGENT)
    (port,) = free_ports(1)
    argv = flags(
        model, data, tmp_path / "run", num_rollout=NUM, load=tmp_path / "save", save=tmp_path / "save", save_interval=1,
        agent_command=f"{sys.executable} -I -S {tmp_path}/agent.py", session_server_port=port, rm_type=None,
        rollout_batch_size=5, n_samples_per_prompt=2, global_batch_size=10, async_buffer_size=3,
        max_concurrent_episodes=20, max_token_staleness=5, use_tis=True, rollout_max_response_len=40,
    )  # fmt: skip
    for attempt in range(2):
        run = Child(forked, argv, tmp_path, attempt, TMPDIR=str(temporary))
        before, deadline = num_rows(tmp_path), time.monotonic() + 120
        while run.process.is_alive() and num_rows(tmp_path) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert run.process.is_alive(), run.log.read_text()
        assert len(live_commands(run.process.pid)) >= 5, "agents were running"
        run.kill()
        assert_nothing_is_left(run.process.pid, port, temporary)
        newest = max((tmp_path / "save").glob("iter_*[0-9]"))
        saved = load_samples(newest / GROUPS)
        assert read_state(newest)["groups"] == len(saved.groups)
        assert saved.names.count("running") * 2 >= 10, "episodes were in flight"
    last = Child(forked, argv, tmp_path, "last", TMPDIR=str(temporary))
    last.process.join(180)
    assert last.process.exitcode == 0, last.log.read_text()
    assert_nothing_is_left(last.process.pid, port, temporary)

    result = audit(tmp_path / "run" / "ledger.jsonl", finished=True)
    assert result.ok, result.summary()
    assert result.num_trained == NUM * 5
    lines = (tmp_path / "run" / "ledger.jsonl").read_bytes().splitlines()
    issued = Counter(event["g"] for event in map(parse_event, lines) if event and event["e"] == "issued")
    assert max(issued.values()) > 1, "what was in flight is issued again"
