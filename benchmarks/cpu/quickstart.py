"""Run the quickstart with several seeds: gain in held-out accuracy, wall and CPU time, and peak memory.

    python benchmarks/cpu/quickstart.py --seeds 1 2 3 4 5 [--async]

The baseline is the model before training; every row shows its accuracy.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def children_cpu_s() -> float:
    """Return the CPU seconds of all child processes that have exited."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run the seeds one after another, each in its own process and folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--async", dest="is_async", action="store_true")
    options = parser.parse_args()
    rises: list[float] = []
    seconds: list[float] = []
    cpu_s: list[float] = []
    print("seed  before  after   gain  seconds  CPU s")
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            started, before = time.monotonic(), children_cpu_s()
            command = [
                sys.executable,
                "-m",
                "furlong",
                "quickstart",
                "--seed",
                str(seed),
                "--output-dir",
                f"{folder}/run",
            ]
            subprocess.run(command + ["--async"] * options.is_async, check=True, capture_output=True)
            seconds.append(time.monotonic() - started)
            cpu_s.append(children_cpu_s() - before)
            rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        scores = [row["eval/held_out"] for row in rows if "eval/held_out" in row]
        rises.append(scores[-1] - scores[0])
        print(
            f"{seed:4d}  {scores[0]:6.3f} {scores[-1]:6.3f} {rises[-1]:6.3f} {seconds[-1]:8.1f} {cpu_s[-1]:6.1f}",
            flush=True,
        )
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(
        f"median gain {100 * statistics.median(rises):.1f} points (smallest {100 * min(rises):.1f}), "
        f"median {statistics.median(seconds):.1f} s (longest {max(seconds):.1f}), "
        f"CPU {statistics.median(cpu_s):.1f} s (longest {max(cpu_s):.1f}), peak memory {peak_mb:.0f} MB"
    )


if __name__ == "__main__":
    main()
