"""A reward that kills an engine process in the middle of the second rollout, and waits for its replacement."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import psutil

VICTIM = "KILLING_REWARD_VICTIM"  # environment variable: pattern for the victim's command line
WAIT_S = 180.0
FLAGS = {  # flags of a run with this reward; queued calls wait for the killing call
    "rm_type": None, "custom_rm_path": "killing_reward.reward_func", "reward_timeout": 2 * WAIT_S,
}  # fmt: skip


async def reward_func(args, sample):
    """Return 0 or 1; the first call after a recorded step kills the process."""
    run = Path(args.output_dir)
    if (run / "metrics.jsonl").exists() and not (run / "killed").exists():
        (run / "killed").touch()
        processes = psutil.process_iter(["cmdline"])
        [victim] = [each for each in processes if re.search(os.environ[VICTIM], " ".join(each.info["cmdline"] or []))]
        victim.kill()
        async with asyncio.timeout(WAIT_S):
            while "engine_restarted" not in (run / "events.jsonl").read_text():
                await asyncio.sleep(0.01)
    return float(len(sample.response) % 2)
