"""Signals stop a run cleanly: one log line, the right exit code, no leaked process, and the run can be resumed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from furlong.data.audit import audit
from furlong.diagnosis.postmortem.run_examination import examine
from runs import Child, finish, flags, num_rows, rows, start, write_prompts

pytestmark = pytest.mark.nightly

REWARD = """
import time

def reward_func(args, sample, **kwargs):
    time.sleep(0.002)
    return float(len(sample.response) % 2)
"""
NUM = 500


@pytest.fixture
def argv(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 30)
    (tmp_path / "reward.py").write_text(REWARD)

    def make(folder, num_rollout=NUM):
        return flags(
            model,
            data,
            folder / "run",
            num_rollout=num_rollout,
            rm_type=None,
            custom_rm_path=f"{tmp_path}/reward.py:reward_func",
            num_reward_workers=1,
            save=folder / "save",
            load=folder / "save",
            save_interval=1,
            async_buffer_size=1,
        )

    return make


@pytest.mark.parametrize("delay_s", [0.0, 0.013, 0.05])
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGTERM, 143, "ended by SIGTERM"), (signal.SIGINT, 130, "furlong: interrupted")],
)
def test_signal_ends_the_run_in_good_order_and_it_resumes(number, code, said, delay_s, argv, tmp_path, forked):
    folder = tmp_path / "stopped"
    run = Child(forked, argv(folder), folder)
    run.wait_for_step()
    time.sleep(delay_s)
    for _ in range(3 if number == signal.SIGTERM else 1):  # more than one must not interrupt the shutdown
        os.kill(run.process.pid, number)
        time.sleep(0.01)
    run.process.join(20)
    assert run.process.exitcode == code, run.log.read_text()
    text = run.log.read_text()
    assert said in text.splitlines()[-1]
    assert "Traceback" not in text
    assert "Error" not in text
    run.kill()  # which checks that nothing is left
    assert audit(folder / "run" / "ledger.jsonl", finished=True).ok
    examined = examine(folder / "run")
    by = "by SIGTERM" if number == signal.SIGTERM else "by Ctrl-C"
    assert (examined.status, examined.error) == ("stopped", by)

    done = num_rows(folder)
    again = Child(forked, argv(folder, done + 2), folder, "again")
    again.process.join(30)
    assert again.process.exitcode == 0, again.log.read_text()
    again.kill()
    assert [row["step"] for row in rows(folder / "run")] == list(range(1, done + 3))
    assert audit(folder / "run" / "ledger.jsonl", finished=True).ok


BLOCKING = """
import asyncio
import time

async def sleeps(args, sample, sampling_params):
    time.sleep(1000)

async def computes(args, sample, sampling_params):
    while True:
        pass

async def cleans_up(args, sample, sampling_params):
    try:
        await asyncio.sleep(1000)
    finally:
        time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("name", "line", "number", "code"),
    [
        ("sleeps", 6, signal.SIGTERM, 143),
        ("computes", 9, signal.SIGINT, 130),
        ("cleans_up", 16, signal.SIGTERM, 143),
    ],
)
def test_signal_ends_a_run_whose_event_loop_is_blocked_by_user_code(name, line, number, code, model, tmp_path, forked):
    (tmp_path / "functions.py").write_text(BLOCKING)
    data = write_prompts(tmp_path / "prompts.jsonl")
    path = f"{tmp_path}/functions.py:{name}"
    run = Child(forked, flags(model, data, tmp_path / "run", custom_generate_function_path=path), tmp_path)
    deadline = time.monotonic() + 60
    while not (run.log.exists() and "weight_sync done" in run.log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(1)
    os.kill(run.process.pid, number)
    run.process.join(25)
    text = run.log.read_text()
    assert run.process.exitcode == code, text
    assert f"functions.py:{line}) blocks the event loop" in text
    assert "Traceback" not in text
    run.kill()
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).ok


def test_a_stopped_script_prints_one_line(argv, tmp_path):
    folder = tmp_path / "stopped"
    process = start(argv(folder), folder, script="train_async.py")
    try:
        deadline = time.monotonic() + 60
        while num_rows(folder) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
    finally:
        got, out, err = finish(process)
    assert got == 130, err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("furlong: interrupted")
    assert out == ""
