"""SIGTERM ends commands in good order, and nothing that user code started outlives them."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from furlong.core.process_end import SIGTERM_CODE, end_children
from furlong.run.signals import EndSignals

COMMAND = """
import sys, tempfile, time
from furlong import cli
def slow():
    with tempfile.TemporaryDirectory() as folder:
        print(folder, flush=True)
        {wait}
sys.exit(cli._run("furlong slow", slow, owns_process=True))
"""
THREAD = """
import sys, threading, time
from furlong import cli
import furlong.core.user_modules
cli.EXIT_WITHIN_S = 0.1
threading.Thread(target=time.sleep, args=(60,), name="mine").start()
sys.exit(cli._run("furlong slow", lambda: 3, owns_process=True))
"""


@pytest.mark.parametrize("wait", ["time.sleep(60)", "while True: pass"], ids=["sleep", "loop"])
def test_a_command_deletes_its_temporary_files(wait):
    words = [sys.executable, "-c", COMMAND.format(wait=wait)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        folder = process.stdout.readline().strip()
        assert folder
        for _ in range(3):  # more than one must not interrupt the end
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        _, error = process.communicate(timeout=10)
    assert process.returncode == SIGTERM_CODE
    assert error == "furlong slow: ended by SIGTERM\n"
    assert not Path(folder).exists()


def test_a_thread_that_never_ends_does_not_keep_the_process():
    done = subprocess.run([sys.executable, "-c", THREAD], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    assert "exiting without waiting for mine" in done.stderr


def test_a_pool_that_user_code_forks_can_be_ended():
    context = multiprocessing.get_context("fork")
    runs = context.Event()
    with EndSignals():
        process = context.Process(target=lambda: (runs.set(), time.sleep(60)))
        process.start()
        assert runs.wait(10)  # a signal that arrives while a process is forked is lost
        process.terminate()
        process.join(10)
    assert process.exitcode == -signal.SIGTERM


@pytest.mark.parametrize(("handler", "expected"), [(signal.SIG_DFL, ["SIGHUP"]), (signal.SIG_IGN, [])])
def test_a_closed_terminal_ends_a_run_in_good_order_but_not_under_nohup(handler, expected):
    before = signal.signal(signal.SIGHUP, handler)
    ends = []

    async def run(signals):
        signals.attach(ends.append)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)

    try:
        with EndSignals() as signals:
            asyncio.run(run(signals))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ends == expected


def test_children_of_user_code_are_killed_with_theirs_and_named(caplog):
    words = ["sh", "-c", "sleep 61.25 & wait"]
    with subprocess.Popen(words) as process, caplog.at_level(logging.WARNING):
        time.sleep(0.1)
        end_children()
        process.wait(5)
    assert f"sh -c 'sleep 61.25 & wait' (process {process.pid})" in caplog.text
    assert "killed 2 processes that user code had started" in caplog.text
