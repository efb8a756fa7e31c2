"""Reward and generate functions of `scripts/soak.py`, with faults on request.

The file `faults/KIND` beside the run's folder requests a fault. The first call that removes the file has it, so each
request causes one fault. `generate` runs in the driver and records its allocated memory in `allocated/PID`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from pathlib import Path
from typing import Any

from furlong.rollout.agent import policy

REWARD_FAULTS = ("reward raises", "reward hangs", "reward is slow", "reward exits")
GENERATE_FAULTS = ("generate raises", "generate hangs", "generate is slow")
SLOW_S = 2.0
FOREVER_S = 1e6
RECORD_S = 0.25  # between two records of the allocated memory
_recorded_s = 0.0


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library; mapped is its `hblkhd`, used its `uordblks`."""

    _fields_ = (
        ("arena", ctypes.c_size_t * 4), ("mapped", ctypes.c_size_t), ("bins", ctypes.c_size_t * 2),
        ("used", ctypes.c_size_t), ("free", ctypes.c_size_t * 2),
    )  # fmt: skip


def allocated_bytes() -> int:
    """Return the bytes that this process has from malloc, all Python objects included with PYTHONMALLOC=malloc."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Mallinfo
    info = library.mallinfo2()
    return info.used + info.mapped


def record_allocated(args: Any) -> None:
    """Write the allocated bytes to `allocated/PID`, unless the last record is too recent."""
    global _recorded_s
    if time.monotonic() - _recorded_s < RECORD_S:
        return
    _recorded_s = time.monotonic()
    path = Path(args.output_dir).parent / "allocated" / str(os.getpid())
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(str(allocated_bytes()))
    new.replace(path)


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
    record_allocated(args)
    if is_requested(args, "generate raises"):
        raise ConnectionError("requested by the soak")
    if is_requested(args, "generate hangs"):
        await asyncio.sleep(FOREVER_S)
    if is_requested(args, "generate is slow"):
        await asyncio.sleep(SLOW_S)
    turn = await policy().generate(sample.tokens, **sampling_params)
    sample.append_response_tokens(tokens=turn.tokens, log_probs=turn.log_probs, text=turn.text, version=turn.versions)
    return sample
