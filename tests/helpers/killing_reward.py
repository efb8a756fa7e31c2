"""A reward that kills a process of an engine in the middle of the second rollout, and waits for another to be there."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import psutil

VICTIM = "KILLING_REWARD_VICTIM"  # environment variable: what the command of the victim matches
WAIT_S = 180.0
FLAGS = {  # of a run that it is the reward of; others wait for it, too
    "rm_type": None, "custom_rm_path": "killing_reward.reward_func", "reward_timeout": 2 * WAIT_S,
}  # fmt: skip


async def reward_func(args, sample):
    """0 or 1. Whoever calls first after a step was recorded kills."""
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
