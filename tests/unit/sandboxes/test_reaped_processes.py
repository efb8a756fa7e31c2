"""Processes that user code starts in the process of a run end with it, also after SIGKILL."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from furlong.sandboxes.process_reaper import GRACE_S
from furlong.sandboxes.reaped_processes import RUN_MARK, ReapedProcesses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
DRIVER = """
import os, subprocess, time
from furlong.sandboxes.reaped_processes import ReapedProcesses

before = subprocess.Popen(["sleep", "1000"])
reaped = ReapedProcesses()
command = subprocess.Popen(["sleep", "1000"])
daemon = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"], start_new_session=True, close_fds=False)
if (forked := os.fork()) == 0:
    os.setsid()
    time.sleep(1000)
print(before.pid, command.pid, daemon.pid, forked, flush=True)
time.sleep(1000)
"""


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_commands_daemons_and_forks_end_after_sigkill():
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    before, *started = map(int, driver.stdout.readline().split())
    daemons = [child.pid for pid in started for child in psutil.Process(pid).children(recursive=True)]
    driver.kill()
    driver.wait()
    driver.stdout.close()
    deadline = time.monotonic() + 10
    while alive([*started, *daemons]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive([*started, *daemons, before]) == [before], "what was there before the run is left alone"
    os.kill(before, signal.SIGKILL)


def test_nothing_waits_for_processes_that_have_ended_and_the_environment_is_restored():
    async def main() -> float:
        reaped = ReapedProcesses()
        assert RUN_MARK in os.environ
        subprocess.run(["true"], check=True)
        started = time.monotonic()
        await reaped.close()
        return time.monotonic() - started

    assert asyncio.run(main()) < GRACE_S
    assert RUN_MARK not in os.environ
