"""Stack traces of ranks: requested by a signal, and parsed for which rank the others wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from furlong.cluster.actor_process import ask_for_stacks
from furlong.diagnosis.hang_watchdog import describe_ranks

WAITS = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f2 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 2806 in all_reduce
  File "/venv/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/opt/furlong/training/fsdp/backend.py", line 300 in optim_step
  File "/opt/furlong/training/worker.py", line 120 in train_part
  File "/opt/furlong/cluster/rank_actor.py", line 160 in train
"""
SLEEPS = WAITS.replace(
    '/venv/torch/distributed/distributed_c10d.py", line 2806 in all_reduce', '/home/me/reward.py", line 7 in nap'
)
IDLE = WAITS.replace("/opt/furlong/cluster/rank_actor.py", "/venv/ray/_private/worker.py")


def test_a_waiting_rank_is_distinguished_from_the_one_that_it_waits_for():
    assert describe_ranks({"trainer rank 1, y": IDLE}) == ""
    summary = describe_ranks(
        {"trainer rank 0, process 3 on a": WAITS, "trainer rank 1, process 4 on b": SLEEPS, "trainer rank 2, x": WAITS}
    )
    assert summary == (
        "trainer rank 1, process 4 on b is in nap (me/reward.py:7), from optim_step (fsdp/backend.py:300); "
        "trainer rank 0, trainer rank 2: waits in all_reduce (distributed/distributed_c10d.py:2806), "
        "from optim_step (fsdp/backend.py:300)"
    )
    assert describe_ranks({"trainer rank 0, x": "(no answer within 3 s)", "trainer rank 1, y": IDLE}) == (
        "trainer rank 0, x (no answer within 3 s)"
    )
    assert describe_ranks({}) == ""


PROGRAM = """
import time
from furlong.cluster.actor_process import answer_with_stacks
answer_with_stacks()
def nap():
    print("ready", flush=True)
    time.sleep(60)
nap()
"""


def test_process_writes_stacks_on_request_and_stopped_process_is_reported(tmp_path, monkeypatch):
    log = tmp_path / "rank.log"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=file)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert "in nap" in ask_for_stacks(process.pid, str(log))
        os.kill(process.pid, signal.SIGSTOP)
        monkeypatch.setattr("furlong.cluster.actor_process.STACKS_S", 0.2)
        started = time.monotonic()
        assert "the process is stopped" in ask_for_stacks(process.pid, str(log))
        assert time.monotonic() - started < 20
    finally:
        process.kill()
        process.communicate()
    assert ask_for_stacks(0, str(log)) == "(it has not started yet)"  # and this process lives on
    assert ask_for_stacks(process.pid, str(log)).startswith("(gone")
