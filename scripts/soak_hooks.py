"""Reward and generate functions of `scripts/soak.py`, with faults on request.

The file `faults/KIND` beside the run's folder requests a fault. The first call that removes the file has it, so each
request causes one fault.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from furlong.rollout.agent import policy

REWARD_FAULTS = ("reward raises", "reward hangs", "reward is slow", "reward exits")
GENERATE_FAULTS = ("generate raises", "generate hangs", "generate is slow")
SLOW_S = 2.0
FOREVER_S = 1e6


def is_requested(args: Any, kind: str) -> bool:
    """Return whether this call takes the request for a fault."""
    try:
        os.unlink(Path(args.output_dir).parent / "faults" / kind)
    except FileNotFoundError:
        return False
    return True


def reward(args: Any, sample: Any) -> float:
    """Return 1 for the right sum, otherwise 0."""
    if is_requested(args, "reward raises"):
        raise ConnectionError("requested by the soak")
    if is_requested(args, "reward exits"):
        os._exit(3)
    if is_requested(args, "reward hangs"):
        time.sleep(FOREVER_S)
    if is_requested(args, "reward is slow"):
        time.sleep(SLOW_S)
    return float(sample.response.strip() == sample.label)


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generate one response with the policy."""
    if is_requested(args, "generate raises"):
        raise ConnectionError("requested by the soak")
    if is_requested(args, "generate hangs"):
        await asyncio.sleep(FOREVER_S)
    if is_requested(args, "generate is slow"):
        await asyncio.sleep(SLOW_S)
    turn = await policy().generate(sample.tokens, **sampling_params)
    sample.append_response_tokens(tokens=turn.tokens, log_probs=turn.log_probs, text=turn.text, version=turn.versions)
    return sample
