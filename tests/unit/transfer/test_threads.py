"""Threads of collectives."""

from __future__ import annotations

import subprocess
import sys

STILL_RUNNING = """
import asyncio, time, torch
from furlong.transfer.threads import in_thread

def work():
    ones, end = torch.ones(200, 200), time.monotonic() + 1.0
    while time.monotonic() < end:
        ones @ ones

async def main():
    in_thread(work)

asyncio.run(main())
"""


def test_a_program_that_ends_while_a_thread_computes_does_not_abort():
    done = subprocess.run([sys.executable, "-c", STILL_RUNNING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
