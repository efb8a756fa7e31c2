"""SIGTERM ends commands in good order, and reaches processes that user code forks."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from furlong.core.sigterm import EXIT_CODE
from furlong.run.end_signals import EndSignals

COMMAND = """
import sys, tempfile, time
from furlong import cli
def slow():
    with tempfile.TemporaryDirectory() as folder:
        print(folder, flush=True)
        {wait}
sys.exit(cli._run("furlong slow", slow, owns_process=True))
"""


@pytest.mark.parametrize(
    "wait",
    ["time.sleep(60)", "import threading; threading.Event().wait()", "while True: pass"],
    ids=["sleep", "wait", "loop"],
)
def test_a_command_deletes_its_temporary_files(wait):
    words = [sys.executable, "-c", COMMAND.format(wait=wait)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        folder = process.stdout.readline().strip()
        assert folder
        for _ in range(3):  # more than one must not interrupt the end
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        _, error = process.communicate(timeout=10)
    assert process.returncode == EXIT_CODE
    assert error == "furlong slow: ended by SIGTERM\n"
    assert not Path(folder).exists()


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
