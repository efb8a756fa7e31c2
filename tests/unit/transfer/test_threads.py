"""Threads of collectives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

from furlong.transfer.threads import in_thread

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


def test_a_thread_is_used_again_when_it_is_free():
    async def threads() -> list[list[int]]:
        meet = threading.Barrier(2, timeout=10)
        apart = [await in_thread(threading.get_ident) for _ in range(3)]
        together = await asyncio.gather(*(in_thread(lambda: (meet.wait(), threading.get_ident())[1]) for _ in range(2)))
        return [apart, together]

    apart, together = asyncio.run(threads())
    assert len({*apart}) == 1
    assert len({*together}) == 2
    assert {*apart} & {*together}
