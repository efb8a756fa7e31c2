"""Measure one furlong step with different thread counts and OMP_WAIT_POLICY values.

    python benchmarks/cpu/threads.py

A synchronous run has two pools of OpenMP threads, one for the engine and one for the trainer; only one is active at a
time. OMP_WAIT_POLICY controls what idle threads do between parallel regions: PASSIVE yields the CPU, ACTIVE spins, and
if it is not set, libgomp spins for a few milliseconds. The settings alternate and only one process runs at a time,
because a spinning pool would slow down the others.

The step is the one in trl_step.py: 32 samples of 32 new tokens. Milliseconds are medians that exclude the first two
steps of each run; `x` is the speedup over one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import trl_step

SETTINGS: dict[str, tuple[bool, str]] = {
    "1 thread": (True, "PASSIVE"),
    "PASSIVE": (False, "PASSIVE"),
    "ACTIVE": (False, "ACTIVE"),
    "not set": (False, ""),
}


def step_times(folder: Path, prompts: Path, out: Path, *, threads: int, dtype: str, steps: int) -> list[float]:
    """Run once. Return the milliseconds of every step except the first two."""
    process, channel = trl_step.start(trl_step.run_furlong, folder, prompts, out, threads, dtype, steps)
    times: list[float] = []
    for _ in range(steps):
        times.append(trl_step.answer_of(channel, out)["wall"] * 1e3)
        channel.send(None)
    process.join()
    return times[2:]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["3m", "12m"], choices=["tiny", "3m", "12m"])
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=2, help="number of threads in the multi-threaded settings")
    parser.add_argument("--steps", type=int, default=8, help="steps per run")
    parser.add_argument("--rounds", type=int, default=3, help="runs per setting")
    args = parser.parse_args()
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        prompts = trl_step.write_prompts(scratch / "prompts.jsonl", trl_step.PROMPTS * args.steps, 16)
        print("model  setting       ms  (quartiles)        x")
        for size in args.models:
            folder = trl_step.write_model(size, scratch / size)
            times: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
            for i in range(args.rounds):
                for setting, (is_single, policy) in SETTINGS.items():
                    threads = 1 if is_single else args.threads
                    os.environ |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": policy}
                    out = scratch / f"{size}-{setting.replace(' ', '-')}-{i}"
                    times[setting] += step_times(
                        folder, prompts, out, threads=threads, dtype=args.dtype, steps=args.steps
                    )
            one = statistics.median(times["1 thread"])
            for setting, values in times.items():
                low, middle, high = trl_step.quartiles(values)
                print(f"{size:>5}  {setting:<9}{middle:8.1f}  ({low:.0f} - {high:.0f}){one / middle:12.2f}", flush=True)


if __name__ == "__main__":
    main()
